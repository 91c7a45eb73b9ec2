"""Tied weights across units: one storage, summed gradients, both names; after meta init, copies and loads too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import GptBlock, entry
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes

POLICIES = {"embedding alone": {nn.Embedding}, "both": {nn.Embedding, nn.Linear, GptBlock}}


def script(model, rank):
    item = entry("gpt_tied")
    item.loss(model, item.make_batch(rank, 0)).backward()


def wrapped(policy, use_orig_params, plain=None, **kwargs):
    plain = entry("gpt_tied").build() if plain is None else plain
    return FSDP(plain, auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params, **kwargs)


def check(model):
    """Gradients are the sum of both uses, the model holds one copy, and both names are saved."""
    plain = entry("gpt_tied").build()
    expected = mean_grads(plain, script, range(dist.get_world_size()))
    model.zero_grad()
    script(model, dist.get_rank())
    assert_close(expected, full_grads(model), GRADIENTS)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert torch.equal(state["emb.weight"], state["head.weight"])
    elements = torch.tensor([sum(param.numel() for param in model.parameters())])
    dist.all_reduce(elements)
    whole = sum(param.numel() for param in plain.parameters())
    assert whole <= elements.item() <= whole + 64 * dist.get_world_size()


def give_memory(module):
    module.to_empty(device="cpu", recurse=False)


def built_in_every_way(policy, use_orig_params):
    item = entry("gpt_tied")
    values = item.build().state_dict()
    check(wrapped(policy, use_orig_params))
    check(copy.deepcopy(wrapped(policy, use_orig_params)))
    other = item.build()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(float(dist.get_rank() == 0))  # only the first rank has the values
    check(wrapped(policy, use_orig_params, other, sync_module_states=True))
    with torch.device("meta"):
        empty = item.build()
    model = wrapped(policy, use_orig_params, empty, param_init_fn=give_memory)
    for missing in ("emb.weight", "head.weight"):
        model.load_state_dict({k: v for k, v in values.items() if k != missing})
        assert_bitwise(values, model.state_dict())
    check(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_tied_weights_stay_tied_however_the_model_came_about(policy, use_orig_params, world_size):
    run_kept_ranks(built_in_every_way, world_size, policy, use_orig_params)


def contradictory(use_orig_params):
    model = wrapped("both", use_orig_params)
    values = model.state_dict()
    values["head.weight"] = values["head.weight"] + 1
    model.load_state_dict(values)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_values_for_one_weight_are_refused_naming_both(world_size, use_orig_params):
    for outcome in run_ranks_outcomes(contradictory, world_size, use_orig_params):
        assert outcome.error_type == "CheckpointError"
        assert "emb.weight" in outcome.message
        assert "head.weight" in outcome.message


def hand_wrapped(order, use_orig_params):
    """The model of each order of wrapping by hand."""
    kwargs = {"use_orig_params": use_orig_params}
    plain = entry("gpt_tied").build()
    if order == "one, then the root":
        plain.emb = FSDP(plain.emb, **kwargs)
    elif order == "the other, then the root":
        plain.head = FSDP(plain.head, **kwargs)
    elif order == "both":
        plain.emb = FSDP(plain.emb, **kwargs)
        plain.head = FSDP(plain.head, **kwargs)
    elif order == "both exposures":
        plain.emb = FSDP(plain.emb, use_orig_params=not use_orig_params)
        plain.head = FSDP(plain.head, use_orig_params=use_orig_params)
    elif order == "one inside a tree":
        part = FSDP(nn.Sequential(plain.head), auto_wrap_policy={nn.Linear}, **kwargs)
        plain.head = part
        return FSDP(plain, **kwargs), "head.0.weight"
    return FSDP(plain, **kwargs), "head.weight"


def tied_by_hand(use_orig_params):
    reference = entry("gpt_tied").build()
    expected = mean_grads(reference, script, range(dist.get_world_size()))
    for order in (
        "one, then the root",
        "the other, then the root",
        "both",
        "both exposures",
        "one inside a tree",
    ):
        model, head = hand_wrapped(order, use_orig_params)
        for wrapped_again in (model, copy.deepcopy(model)):
            script(wrapped_again, dist.get_rank())
            assert_close(expected, full_grads(wrapped_again), GRADIENTS)
        state = model.state_dict()
        assert torch.equal(state["emb.weight"], state[head]), order
        assert torch.equal(state["emb.weight"], reference.emb.weight), order
        changed = state["emb.weight"] + 1
        model.load_state_dict({**state, "emb.weight": changed, head: changed})
        assert torch.equal(model.state_dict()[head], changed), order
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        held = sum(param.numel() for param in model.parameters())
        elements = torch.tensor([held])
        dist.all_reduce(elements)
        whole = sum(param.numel() for param in reference.parameters())
        assert elements.item() <= whole + 64 * dist.get_world_size(), order


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_wrapped_by_hand_gives_up_what_is_tied_to_others(use_orig_params, world_size):
    run_kept_ranks(tied_by_hand, world_size, use_orig_params)


def tied_and_used(use_orig_params):
    plain = entry("gpt_tied").build()
    plain.emb = FSDP(plain.emb, use_orig_params=use_orig_params)
    plain.emb(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    FSDP(plain, use_orig_params=use_orig_params)


def tied_and_left_alone(use_orig_params):
    plain = entry("gpt_tied").build()
    plain.emb = FSDP(plain.emb, use_orig_params=use_orig_params)
    plain.head = FSDP(plain.head, use_orig_params=use_orig_params)
    plain.emb(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ties_found_too_late_or_left_open_are_refused_with_the_remedy(world_size, use_orig_params):
    for outcome in run_ranks_outcomes(tied_and_used, world_size, use_orig_params):
        assert outcome.error_type == "ConfigError"
        assert "auto_wrap_policy" in outcome.message
        assert "head.weight" in outcome.message
    for outcome in run_ranks_outcomes(tied_and_left_alone, world_size, use_orig_params):
        assert outcome.error_type == "UsageError"
        assert "Wrap the module that contains both" in outcome.message
