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
from tests.support.ranks import run_ranks, run_ranks_outcomes

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
    run_ranks(built_in_every_way, world_size, policy, use_orig_params)


def contradictory(use_orig_params):
    model = wrapped("both", use_orig_params)
    values = model.state_dict()
    values["head.weight"] = values["head.weight"] + 1
    model.load_state_dict(values)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_two_values_for_one_weight_are_refused_naming_both(use_orig_params):
    for outcome in run_ranks_outcomes(contradictory, 2, use_orig_params):
        assert outcome.error_type == "CheckpointError"
        assert "emb.weight" in outcome.message
        assert "head.weight" in outcome.message


def tied_to_an_inner_wrapper():
    plain = entry("gpt_tied").build()
    plain.emb = FSDP(plain.emb, use_orig_params=True)
    FSDP(plain, use_orig_params=True)


def test_a_tie_to_a_weight_that_an_inner_wrapper_manages_is_refused_with_the_remedy():
    outcome = run_ranks_outcomes(tied_to_an_inner_wrapper, 1)[0]
    assert outcome.error_type == "ConfigError"
    assert "auto_wrap_policy" in outcome.message
