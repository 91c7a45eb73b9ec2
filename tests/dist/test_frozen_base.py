"""A frozen layer that a unit's backward reads after the last gradient of the adapters beside it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.runtime.held import units_in
from fsdp.runtime.unit import Residency
from fsdp.wrap import ModuleWrapPolicy
from tests.support import scripts
from tests.support.ranks import run_kept_ranks

DIM = 6


class Adapted(nn.Module):
    """The base first, then the adapter, as LoRA libraries have it: autograd runs the adapter's backward first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = self.base(x)
        return torch.tanh(frozen + self.up(self.down(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, DIM), *(Adapted() for _ in range(4)), nn.Linear(DIM, 1))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))


def gradients(orig: bool, first_is_leaf: bool) -> None:
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Adapted}), use_orig_params=orig)
    dense = build()
    whole: list[int] = []
    for index, wrapper in enumerate(model.module):
        if index:
            wrapper.register_full_backward_pre_hook(
                lambda *_: whole.append(
                    sum(unit.residency is not Residency.SHARDED for unit in units_in(model))
                )
            )
    for _ in range(2):
        whole.clear()
        for candidate, ranks in ((model, [dist.get_rank()]), (dense, range(dist.get_world_size()))):
            candidate.zero_grad()
            for rank in ranks:
                x = batch(rank).requires_grad_(first_is_leaf)
                candidate(x).square().sum().backward()
        # The root, what runs, what is about to be freed; small units are gathered ahead several at a time.
        assert whole[-1] <= 3, whole
        with FSDP.summon_full_params(model, with_grads=True):
            for (name, mine), (_, theirs) in zip(
                model.named_parameters(), dense.named_parameters(), strict=True
            ):
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad / dist.get_world_size())


@pytest.mark.parametrize("first_is_leaf", [False, True])
@pytest.mark.parametrize("orig", [False, True])
def test_a_frozen_layer_is_whole_until_the_gradient_of_the_input_is_computed(orig, first_is_leaf):
    run_kept_ranks(gradients, 2, orig, first_is_leaf)


def leaf_input(orig: bool) -> None:
    torch.manual_seed(0)
    dense = Adapted()
    model = FSDP(copy.deepcopy(dense), use_orig_params=orig)
    results = []
    for candidate in (model, dense):
        x = torch.ones(2, DIM, requires_grad=True)
        candidate(x).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("orig", [False, True])
def test_the_gradient_of_a_leaf_that_is_the_input_is_right_too(orig):
    run_kept_ranks(leaf_input, 2, orig)


class Repeated(nn.Module):
    """Runs its adapted layer as often as it is told, none at all included."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.adapted = nn.Linear(5, DIM), Adapted()

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.inp(x)
        for _ in range(times):
            x = self.adapted(x)
        return x


def left_out_of_a_reduction(model: nn.Module, rank: int) -> None:
    for step, (times, sync) in enumerate([(1, False), (0, True), (2, False), (2, True)]):
        held = model.no_sync() if isinstance(model, FSDP) and not sync else nullcontext()
        with held:
            model(scripts.batch(rank, step), times).square().sum().backward()


def reduced_unused() -> None:
    for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP:
        options = {"sharding_strategy": strategy}
        scripts.check_script(left_out_of_a_reduction, Repeated, {Adapted}, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_that_is_reduced_by_a_backward_without_it_is_whole_for_all_uses_in_the_next(
    world_size,
):
    run_kept_ranks(reduced_unused, world_size)


class Checkpointed(nn.Module):
    """Runs its adapted layer twice, and once more under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.adapted = nn.Linear(5, DIM), Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.adapted(self.adapted(self.inp(x)))
        return checkpoint(self.adapted, x, use_reentrant=True)


def checkpointed_too() -> None:
    def script(model: nn.Module, rank: int) -> None:
        for step in range(2):
            model(scripts.batch(rank, step)).square().sum().backward()

    for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP:
        for classes in {Adapted}, {Adapted, nn.Linear}:
            scripts.check_script(script, Checkpointed, classes, sharding_strategy=strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_reentrant_checkpoint_finishes_is_whole_for_the_uses_outside_of_it(world_size):
    run_kept_ranks(checkpointed_too, world_size)


class FrozenTwice(nn.Module):
    """Runs a frozen layer twice on what has no history: the input, and what a reentrant checkpoint detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).requires_grad_(False)
        self.out = nn.Linear(5, 3)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.frozen(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.twice, self.twice(x), use_reentrant=True))


def frozen_twice() -> None:
    def script(model: nn.Module, rank: int) -> None:
        for step in range(2):
            x = scripts.batch(rank, step).requires_grad_()
            model(x).square().sum().backward()
            assert x.grad is not None

    for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP:
        scripts.check_script(script, FrozenTwice, {nn.Sequential}, sharding_strategy=strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_unit_is_whole_for_its_first_use_on_a_leaf_too(world_size):
    run_kept_ranks(frozen_twice, world_size)
