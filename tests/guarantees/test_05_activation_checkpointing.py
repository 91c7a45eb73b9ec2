"""Activation checkpointing in every nesting: equal gradients, and no gather more than without it.

That is two gathers a unit and step under FULL_SHARD and one under SHARD_GRAD_OP.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.comm.recording import Event, Recording
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import Mlp, MlpBlock
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)


class Dropped(MlpBlock):
    """A block with dropout, whose mask must come back in the recomputation."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3, training=self.training))


class Net(Mlp):
    """Checkpoints as ``nesting`` says.

    ``around`` each unit, ``span`` over two of them, ``inside`` a unit, ``whole`` model, ``selective`` every second.
    """

    def __init__(self, nesting, reentrant, dropout):
        super().__init__()
        if dropout:
            self.blocks = nn.ModuleList(Dropped(7) for _ in range(3))
        self.nesting, self.reentrant = nesting, reentrant

    def run(self, fn, x):
        return checkpoint(fn, x, use_reentrant=self.reentrant)

    def middle(self, x):
        for index, block in enumerate(self.blocks):
            if self.nesting == "around" or (self.nesting == "selective" and index % 2):
                x = self.run(block, x)
            else:
                x = block(x)
        return x

    def forward(self, x):
        x = self.inp(x)
        if self.nesting == "span":
            x = self.run(nn.Sequential(*self.blocks[:2]), x)
            x = self.run(self.blocks[2], x)
        elif self.nesting == "whole":
            x = self.run(self.middle, x)
        else:
            x = self.middle(x)
        return self.out(x)


def build(nesting, reentrant, dropout):
    torch.manual_seed(0)
    net = Net(nesting, reentrant, dropout)
    if nesting == "inside":
        for block in net.blocks:
            inner = block.up.forward
            block.up.forward = lambda x, inner=inner: net.run(inner, x)
    return net


def script(model, rank):
    torch.manual_seed(100 + rank)
    x = torch.randn(4, 5)
    model(x).square().sum().backward()
    model(x + 1).sum().backward()


def gradients(nesting, reentrant, strategy):
    for dropout in (False, True):
        plain = build("none", reentrant, dropout)
        expected = mean_grads(plain, script, range(dist.get_world_size()))
        for orig in EXPOSURES:
            model = FSDP(
                build(nesting, reentrant, dropout),
                auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)


NESTINGS = ("around", "span", "inside", "whole", "selective")


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_gradients_are_those_without_checkpointing(nesting, reentrant, strategy):
    run_kept_ranks(gradients, 2, nesting, reentrant, strategy)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_for_other_numbers_of_ranks(nesting, reentrant, world_size):
    run_kept_ranks(gradients, world_size, nesting, reentrant, "FULL_SHARD")


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_replicated_units_too(reentrant):
    run_kept_ranks(gradients, 2, "around", reentrant, "NO_SHARD")


def counts(nesting, reentrant, strategy, use_orig_params):
    """Gathers and reductions a unit in the second step; the last block is frozen."""
    plain = build(nesting, reentrant, dropout=False)
    plain.blocks[2].requires_grad_(False)
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    events: list[Event] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Recording(unit.shard, unit.name, events)
    for _ in range(2):
        events.clear()
        model(torch.randn(4, 5)).sum().backward()
    return Counter((event.op, event.unit) for event in events)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize(("strategy", "gathers"), [("FULL_SHARD", 2), ("SHARD_GRAD_OP", 1)])
@pytest.mark.parametrize(("world_size", "orig"), [(2, False), (3, True)], ids=["2-flat", "3-orig"])
def test_recomputation_needs_no_gather_of_its_own(
    nesting, reentrant, strategy, gathers, world_size, orig
):
    counted = run_kept_ranks(counts, world_size, nesting, reentrant, strategy, orig)[0]
    for index in range(3):
        unit = f"blocks.{index}"
        assert counted["all_gather", unit] == gathers, counted
        assert counted["reduce_scatter", unit] == (index < 2), counted
    assert counted["all_gather", ""] == 1  # the root stays whole until its backward
    assert counted["reduce_scatter", ""] == 1


def wrapped(order, impl):
    """torch's ``checkpoint_wrapper`` inside or outside of ours; names stay clean."""
    torch.manual_seed(0)
    plain = Mlp()
    names = list(plain.state_dict())
    expected = mean_grads(plain, script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        torch.manual_seed(0)
        model = Mlp()
        for index in range(3):
            if order == "ours_outside":
                block = FSDP(
                    checkpoint_wrapper(model.blocks[index], checkpoint_impl=impl),
                    use_orig_params=orig,
                )
            else:
                block = checkpoint_wrapper(
                    FSDP(model.blocks[index], use_orig_params=orig), checkpoint_impl=impl
                )
            model.blocks[index] = block
        model = FSDP(model, use_orig_params=orig)
        assert list(model.state_dict()) == names
        if orig:
            assert [name for name, _ in model.named_parameters()] == names
        script(model, dist.get_rank())
        grads = full_grads(model)
        assert_close(expected, grads, GRADIENTS)
        model.load_state_dict(Mlp().state_dict())


@pytest.mark.parametrize("order", ["ours_outside", "ours_inside"])
@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_checkpoint_wrapper_may_be_inside_or_outside(order, impl, world_size):
    run_kept_ranks(wrapped, world_size, order, impl)


def frozen():
    """A frozen unit under a checkpoint: nothing to reduce, gradients flow through."""
    for reentrant in (False, True):

        def freeze(model):
            for param in model.blocks[1].parameters():
                param.requires_grad_(False)
            return model

        plain = freeze(build("none", reentrant, dropout=False))
        expected = mean_grads(plain, script, range(dist.get_world_size()))
        for orig in EXPOSURES:
            model = FSDP(
                freeze(build("around", reentrant, dropout=False)),
                auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
                use_orig_params=orig,
            )
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_frozen_units_under_a_checkpoint(world_size):
    run_kept_ranks(frozen, world_size)


class Selective(Mlp):
    """torch's selective checkpointing: what one kind of operation computed is kept, the rest recomputed."""

    @staticmethod
    def keep(context, operation, *args, **kwargs):
        kept = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        x = self.inp(x)
        contexts = functools.partial(create_selective_checkpoint_contexts, self.keep)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.out(x)


def selective():
    torch.manual_seed(0)
    expected = mean_grads(Selective(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        for classes in ({MlpBlock}, {nn.Linear}):
            torch.manual_seed(0)
            model = FSDP(
                Selective(), auto_wrap_policy=ModuleWrapPolicy(classes), use_orig_params=orig
            )
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpoints_that_keep_the_results_of_some_operations(world_size):
    run_kept_ranks(selective, world_size)
