"""Tied weights across units, parameter identity, and optimizers built before wrapping."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import FsdpError
from fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy
from tests.support.compare import GRADIENTS, TRAINED, assert_close
from tests.support.models import GptBlock, entry
from tests.support.oracles import (
    Recipe,
    full_grads,
    make_optimizer,
    mean_grads,
    train_dense,
    wrap_entry,
)
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)

POLICIES = {
    "blocks": {GptBlock},
    "embedding": {GptBlock, nn.Embedding},
    "head": {nn.Linear},
    "both": {nn.Embedding, nn.Linear},
    "always": always_wrap_policy,
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=70),
    "none": None,
}


def tied(policy, strategy):
    item = entry("gpt_tied")

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        plain = item.build()
        owned = plain.emb.weight
        model = FSDP(
            plain,
            auto_wrap_policy=POLICIES[policy],
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        script(model, dist.get_rank())
        assert_close(expected, full_grads(model), GRADIENTS)
        with FSDP.summon_full_params(model):
            emb, head = model.module.emb, model.module.head
            emb, head = (part.module if isinstance(part, FSDP) else part for part in (emb, head))
            assert emb.weight is head.weight
        if orig:
            named = dict(model.named_parameters(remove_duplicate=False))
            assert named["emb.weight"] is named["head.weight"] is owned
        elements = sum(param.numel() for param in model.parameters())
        assert elements < sum(param.numel() for param in item.build().parameters()) + 64


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_tied_weights_stay_one_parameter_under_any_policy(world_size, policy, strategy):
    run_kept_ranks(tied, world_size, policy, strategy)


def kept():
    """Same objects before and after; attributes, hooks, groups and names survive."""
    for name in ("mlp", "gpt_tied", "lora", "odd", "lstm", "shared"):
        item = entry(name)
        plain = item.build()
        before = dict(plain.named_parameters())
        for param in before.values():
            param.note = object()
        notes = {key: param.note for key, param in before.items()}
        model = wrap_entry(item, plain, use_orig_params=True)
        for _ in range(2):
            after = dict(model.named_parameters())
            assert list(after) == list(before)
            for key, param in after.items():
                assert param is before[key], key
                assert param.note is notes[key], key
                assert param.is_leaf
                whole = dist.get_world_size() == 1  # nothing is cut, so shapes stay
                assert param.dim() <= 1 or whole
            item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        total = sum(param.numel() for param in model.parameters())
        counts = torch.tensor([total])
        dist.all_reduce(counts)
        assert counts.item() == sum(param.numel() for param in item.build().parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_are_the_same_objects_before_and_after_wrapping(world_size):
    run_kept_ranks(kept, world_size)


def earlier_optimizer(strategy):
    for name in ("gpt_tied", "lora"):
        item = entry(name)
        plain = item.build()
        optimizer = make_optimizer(item, plain)
        model = wrap_entry(
            item, plain, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy]
        )
        for step in range(4):
            optimizer.zero_grad()
            item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
            optimizer.step()
        expected = train_dense(name, dist.get_world_size(), Recipe()).params
        state = model.state_dict()
        assert_close(expected, {key: state[key] for key in expected}, TRAINED)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_built_before_wrapping_trains_identically_in_orig_mode(strategy, world_size):
    run_kept_ranks(earlier_optimizer, world_size, strategy)


def groups():
    """Parameter groups by name, as one would write them for a plain model."""
    item = entry("gpt_tied")

    def split(model):
        named = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
        decay = [p for key, p in named if "norm" not in key and "bias" not in key]
        rest = [p for key, p in named if "norm" in key or "bias" in key]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
        )

    dense = item.build()
    dense_optimizer = split(dense)
    model = wrap_entry(item, item.build(), use_orig_params=True)
    optimizer = split(model)
    world_size = dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
        item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
        for rank in range(world_size):
            (item.loss(dense, item.make_batch(rank, step)) / world_size).backward()
        optimizer.step()
        dense_optimizer.step()
    assert_close(dict(dense.state_dict()), dict(model.state_dict()), TRAINED)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameter_groups_by_name_train_as_in_the_plain_model(world_size):
    run_kept_ranks(groups, world_size)


def thaw():
    """Freezing and unfreezing in the middle of a run, and gradients that the user drops."""
    item = entry("mlp")
    dense = item.build()
    model = wrap_entry(item, item.build(), use_orig_params=True)
    world_size = dist.get_world_size()
    for step in range(4):
        for net in (dense, model):
            for name, param in net.named_parameters():
                param.requires_grad_(not (name.startswith("blocks.1") and step in (1, 2)))
            net.zero_grad()
        item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
        for rank in range(world_size):
            (item.loss(dense, item.make_batch(rank, step)) / world_size).backward()
        expected = {name: param.grad for name, param in dense.named_parameters()}
        assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(world_size):
    run_kept_ranks(thaw, world_size)


def stale_optimizer():
    """Flat exposure: an optimizer over the parameters from before wrapping would train nothing."""
    item = entry("mlp")
    plain = item.build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = wrap_entry(item, plain)
    item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
    with pytest.raises(FsdpError) as caught:
        optimizer.step()
    assert "optimizer" in str(caught.value)
    assert "use_orig_params" in str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_built_before_wrapping_is_refused_in_flat_mode(world_size):
    run_kept_ranks(stale_optimizer, world_size)
