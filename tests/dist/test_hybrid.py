"""Hybrid sharding: two groups of two, by pair and by mesh, equal the dense model; degenerate shapes synchronise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy, StateDictType
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)


def step(model, rank):
    model(batch(rank)).square().sum().backward()


def by_mesh(replicas, shards, strategy):
    mesh = init_device_mesh("cpu", (replicas, shards))
    check_script(step, sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
    model = wrap(build(), sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert sorted(model.state_dict()) == sorted(build().state_dict())
    step(model, dist.get_rank())
    norm = model.clip_grad_norm_(1e9)
    expected = dense_grads(build(), step, dist.get_world_size())
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in expected.values()]).norm())


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (2, 1), (1, 3)])
def test_every_mesh_gives_the_mean_over_all_ranks(replicas, shards, strategy):
    run_kept_ranks(by_mesh, replicas * shards, replicas, shards, strategy)


def by_node(monkey_local):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(monkey_local)
    model = wrap(build(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, sync_module_states=True)
    assert model.world_size == monkey_local
    step(model, dist.get_rank())
    expected = dense_grads(build(), step, dist.get_world_size())
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)


def test_groups_follow_the_nodes_when_none_are_given():
    run_ranks(by_node, 4, 2)
