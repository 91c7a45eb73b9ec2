"""Hybrid sharding, however its groups are named, trains as the dense model; init, clipping and states on both axes."""

from __future__ import annotations

import contextlib
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import ConfigError, ConfigTypeError
from tests.support.compare import GRADIENTS, TRAINED, assert_bitwise, assert_close
from tests.support.models import entry
from tests.support.oracles import (
    Recipe,
    full_grads,
    full_params,
    mean_grads,
    train_dense,
    wrap_entry,
)
from tests.support.ranks import run_kept_ranks, run_ranks

STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
RECIPE = Recipe(steps=3, clip=0.1, micro_batches=2)


def axes(how, replicas, shards):
    """The argument that names ``replicas`` groups of ``shards`` ranks.  Collective: every rank."""
    if how == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (replicas, shards))}
    if how == "nodes":
        os.environ["LOCAL_WORLD_SIZE"] = str(shards)
        return {}
    world, rank = replicas * shards, dist.get_rank()
    rows = [dist.new_group(range(i, i + shards)) for i in range(0, world, shards)]
    columns = [dist.new_group(range(i, world, shards)) for i in range(shards)]
    return {"process_group": (rows[rank // shards], columns[rank % shards])}


def train(model, item, recipe):
    """As ``train_wrapped`` does, of a model that is wrapped already."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                batch = item.make_batch(rank, step * recipe.micro_batches + micro)
                (item.loss(model, batch) / recipe.micro_batches).backward()
        norms.append(model.clip_grad_norm_(recipe.clip, recipe.norm_type).item())
        optimizer.step()
    return norms, optimizer


def trained(how, replicas, shards, strategy):
    item = entry("gpt_tied")
    dense = train_dense("gpt_tied", replicas * shards, RECIPE)
    found = []
    for orig in (False, True):
        model = wrap_entry(
            item,
            item.build(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
            **axes(how, replicas, shards),
        )
        assert model.world_size == shards
        norms, _ = train(model, item, RECIPE)
        assert norms == pytest.approx(dense.norms, rel=1e-5)
        assert_close(dense.params, dict(model.state_dict()), TRAINED)
        found.append((norms, full_params(model)))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["pair", "mesh", "nodes"])
@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (3, 1)])
def test_training_with_accumulation_and_clipping_is_the_dense_models(
    how, replicas, shards, strategy
):
    by_rank = run_kept_ranks(trained, replicas * shards, how, replicas, shards, strategy)
    for exposures in by_rank:
        for (norms, params), (first_norms, first) in zip(exposures, by_rank[0], strict=True):
            assert norms == first_norms
            assert_bitwise(first, params)


def synchronised(replicas, shards):
    item = entry("gpt_tied")
    expected = item.build(seed=0).state_dict()
    for orig in (False, True):
        model = wrap_entry(
            item,
            item.build(seed=dist.get_rank()),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=orig,
            sync_module_states=True,
            **axes("mesh", replicas, shards),
        )
        assert_bitwise(dict(expected), dict(model.state_dict()))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (2, 1)])
def test_init_is_synchronised_over_both_axes(replicas, shards):
    run_kept_ranks(synchronised, replicas * shards, replicas, shards)


def clipped(order, by_function):
    item = entry("gpt_tied")

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    dense = item.build()
    for name, grad in mean_grads(dense, script, range(4)).items():
        dense.get_parameter(name).grad = grad
    expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.05, order)
    wanted = {name: param.grad for name, param in dense.named_parameters()}
    found = []
    for orig in (False, True):
        model = wrap_entry(
            item,
            item.build(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=orig,
            **axes("mesh", 2, 2),
        )
        script(model, dist.get_rank())
        if by_function:
            norm = fsdp.clip_grad_norm_(model.parameters(), 0.05, order)
        else:
            norm = model.clip_grad_norm_(0.05, order)
        torch.testing.assert_close(norm, expected, rtol=1e-6 if order >= 1 else 1e-5, atol=0)
        assert_close(wanted, full_grads(model), GRADIENTS)
        found.append(norm.item())
    return found


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_the_dense_models_on_every_rank(order, by_function):
    by_rank = run_kept_ranks(clipped, 4, order, by_function)
    assert all(found == by_rank[0] for found in by_rank)


def resumed(orig):
    """Half of a run, saved by slices, goes on under other axes."""
    item = entry("mlp")
    first_half, whole = Recipe(steps=2, clip=0.1), Recipe(steps=4, clip=0.1)
    kwargs = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **axes("mesh", 2, 2)}
    model = wrap_entry(item, item.build(), use_orig_params=orig, **kwargs)
    _, optimizer = train(model, item, first_half)
    state = model.state_dict()
    optimizer_state = FSDP.sharded_optim_state_dict(model, optimizer)

    other = wrap_entry(item, item.build(1), use_orig_params=not orig)  # FULL_SHARD over all four
    other.load_state_dict(state)
    resumed_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    resumed_optimizer.load_state_dict(
        FSDP.optim_state_dict_to_load(other, resumed_optimizer, optimizer_state)
    )
    for step in range(2, 4):
        resumed_optimizer.zero_grad()
        item.loss(other, item.make_batch(dist.get_rank(), step)).backward()
        other.clip_grad_norm_(0.1)
        resumed_optimizer.step()
    dense = train_dense("mlp", 4, whole)
    assert_close(dense.params, dict(other.state_dict()), TRAINED)


@pytest.mark.parametrize("orig", [False, True])
def test_optimizer_slices_of_two_axes_resume_under_one(orig):
    run_kept_ranks(resumed, 4, orig)


def refused():
    mesh = init_device_mesh("cpu", (2, 1))
    line = init_device_mesh("cpu", (2,))
    hybrid = ShardingStrategy.HYBRID_SHARD
    with pytest.raises(ConfigError, match=r"hybrid sharding takes 2, \(replicate, shard\)"):
        FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, device_mesh=line)
    with pytest.raises(ConfigError, match="expected 1, or 2 with a hybrid"):
        FSDP(nn.Linear(2, 2), device_mesh=mesh)
    with pytest.raises(ConfigTypeError, match="shard_group, replicate_group"):
        FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, process_group=dist.group.WORLD)
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError, match="cannot divide 2 ranks into nodes of 3"):
        FSDP(nn.Linear(2, 2), sharding_strategy=hybrid)
    model = FSDP(nn.Linear(2, 2), device_mesh=line)
    assert model.world_size == 2


def shared_groups():
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    first = FSDP(nn.Linear(2, 2), **hybrid)
    made = len(dist.distributed_c10d._world.pg_map)
    second = FSDP(nn.Linear(2, 2), **hybrid)
    assert first.process_group is second.process_group
    assert len(dist.distributed_c10d._world.pg_map) == made
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    third = FSDP(nn.Linear(2, 2), **hybrid)
    assert third.process_group.size() == 2
    assert first.process_group.size() == 1


def test_modules_wrapped_one_by_one_share_the_groups_that_nodes_give():
    run_ranks(shared_groups, 2)


def test_meshes_and_groups_that_do_not_fit_are_refused_with_what_would():
    run_ranks(refused, 2)
