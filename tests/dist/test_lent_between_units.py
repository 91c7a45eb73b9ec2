"""What one unit owns and modules of another hold: modules registered in several places, weights tied across units."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from tests.support.compare import assert_bitwise
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)


class Linear(nn.Module):
    """A residual layer without a bias; a unit in these tests."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) * 0.3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return x + torch.tanh(F.linear(x, self.weight)) * self.scale


class Around(nn.Module):
    """Runs another module; a unit in these tests."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.inner(x) + self.bias


class SharedModule(nn.Module):
    """A layer that the root runs, and two units inside one another after it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False))
        self.outer = Around(Around(self.layer))

    def forward(self, x):
        return self.outer(self.layer(x))


class TiedWeights(nn.Module):
    """A weight that two units share, one of them inside a third."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(), Around(Linear())
        self.second.inner.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


MODELS = (SharedModule, TiedWeights)
UNITS = {Around, Linear}


def script(model, rank):
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()


def states_and_copies(use_orig_params):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for make in MODELS:
        expected = dense_grads(build(make), script, world_size)
        model = wrap(build(make), UNITS, use_orig_params=use_orig_params)
        whole = dict(build(make).state_dict())
        for offload in (False, True):
            config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                state = model.state_dict()
            assert not state or rank == 0
            if rank == 0:
                assert_bitwise(whole, dict(state))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_bitwise(whole, dict(other.state_dict()))
            script(other, rank)
            assert_same_gradients(expected, full_grads(other), none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_several_units_hold_is_saved_by_one_rank_and_copied_like_the_rest(
    world_size, use_orig_params
):
    run_kept_ranks(states_and_copies, world_size, use_orig_params)


class Checkpointed(nn.Module):
    """Runs another module under a reentrant checkpoint; a unit or not."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


class CheckpointedBesideTied(nn.Module):
    """A weight inside a reentrant checkpoint, whose gradient from outside of it comes first."""

    def __init__(self):
        super().__init__()
        self.first, self.third = Around(nn.Identity()), Linear()
        self.second = Checkpointed(Linear())
        self.third.weight = self.second.inner.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


class KeptInside(nn.Module):
    """A tied weight in a unit whose output alone is in the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(), Linear()
        self.second.weight = self.first.weight
        self.kept = []

    def forward(self, x):
        hidden = self.first(x)
        self.kept[:] = [hidden]
        return self.second(hidden)


def from_inside(model, rank):
    for step in range(2):
        model(batch(rank, step))
        getattr(model, "module", model).kept.pop().square().sum().backward()


class TiedIntoCheckpoint(nn.Module):
    """One unit: the gradient of a tied weight comes from a reentrant checkpoint first, and last from outside of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.third = Checkpointed(Linear())
        self.third.inner.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def accumulated(model, rank):
    for step in range(3):
        held = model.no_sync() if isinstance(model, FSDP) and step < 2 else nullcontext()
        with held:
            model(batch(rank, step)).square().sum().backward()


def checkpoints(strategy):
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    for units in (UNITS, {*UNITS, Checkpointed}, {Around, Checkpointed}):
        check_script(script, CheckpointedBesideTied, units, **options)
    check_script(accumulated, TiedIntoCheckpoint, set(), **options)
    check_script(from_inside, KeptInside, UNITS, **options)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_that_computes_in_a_backward_finds_what_it_borrows(world_size, strategy):
    run_kept_ranks(checkpoints, world_size, strategy)
