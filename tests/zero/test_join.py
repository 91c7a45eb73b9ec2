"""Uneven inputs: ``Join([ddp, zero])`` equals DDP with the plain optimizer in the same context.

Oracle: DDP and the plain optimizer under ``Join([ddp])``; the last rank to run out has the authoritative model.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.optim import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.ranks import run_kept_ranks
from tests.zero.support import assert_same_everywhere, make_model

SMALL = {"bucket_cap_mb": 0.0001}
HOOKS = {
    None: None,
    "after": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
    "reduce_scatter": reduce_scatter_hook,
}


def batches():
    """Rank r has r inputs more than rank 0."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 5, generator=generator) for _ in range(2 + 2 * dist.get_rank())]


def train_unevenly(wrapped, optimizer, joinables, *, steps=True):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    with Join(joinables):
        for batch in batches():
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            if steps:
                optimizer.step()
            scheduler.step()


def uneven(kind, layout):
    overlaps = kind in ("after", "interleaved")
    wrapped = DDP(make_model(), **SMALL)
    zero = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, lr=0.05, overlap_with_ddp=overlaps, **layout
    )
    if overlaps:
        wrapped.register_comm_hook(None, HOOKS[kind](allreduce_hook, wrapped, zero))
    elif kind is not None:
        wrapped.register_comm_hook(None, reduce_scatter_hook(wrapped, zero))
    reference = DDP(make_model(), **SMALL)
    reference.register_comm_hook(None, allreduce_hook)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05)
    train_unevenly(wrapped, zero, [wrapped, zero], steps=not overlaps)
    train_unevenly(reference, plain, [reference])
    assert_same_everywhere(wrapped.parameters())
    for ours, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    saved = zero.state_dict(consolidate=True)
    if dist.get_rank() == dist.get_world_size() - 1:  # the rank with the most inputs
        expected = plain.state_dict()
        torch.testing.assert_close(saved["state"], expected["state"], rtol=1e-4, atol=1e-6)
    # Outside the context everything is as before.
    assert not zero.in_join
    zero.zero_grad()
    wrapped(torch.ones(2, 5)).sum().backward()
    if not overlaps:
        zero.step()
    assert_same_everywhere(wrapped.parameters())


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("layout", [{}, {"partition": "element"}], ids=str)
def test_uneven_inputs_give_what_the_plain_optimizer_gives(kind, layout):
    run_kept_ranks(uneven, 3, kind, layout)


def alone():
    model, dense = make_model(), make_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(dense.parameters(), lr=0.1)
    most = 2 * dist.get_world_size()

    def backward(module, iteration):
        module.zero_grad()
        module(torch.full((2, 5), 1.0 + iteration)).square().sum().backward()

    with Join([zero]):
        for iteration in range(most - 2 * (dist.get_world_size() - 1 - dist.get_rank())):
            backward(model, iteration)
            zero.step()
    for iteration in range(most):
        backward(dense, iteration)
        plain.step()
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_without_ddp_ranks_out_of_inputs_step_with_the_gradients_of_those_that_train():
    run_kept_ranks(alone, 3)


def throwing():
    wrapped = DDP(make_model())
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    count = 0
    try:
        with Join([wrapped, zero], throw_on_early_termination=True):
            for batch in batches():
                zero.zero_grad()
                wrapped(batch).sum().backward()
                zero.step()
                count += 1
    except RuntimeError as error:
        return count, "exhausted" in str(error)
    return count, False


def test_throw_mode_ends_all_ranks_when_the_first_runs_out():
    assert [(2, True)] * 3 == run_kept_ranks(throwing, 3)


def raising():
    wrapped = DDP(make_model())
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)

    def fail():
        with Join([wrapped, zero]):
            wrapped(torch.ones(2, 5)).sum().backward()
            zero.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    zero.zero_grad()
    wrapped(torch.ones(2, 5)).sum().backward()
    zero.step()
    assert_same_everywhere(wrapped.parameters())
    with Join([wrapped, zero]):
        for batch in batches():
            zero.zero_grad()
            wrapped(batch).sum().backward()
            zero.step()
    assert_same_everywhere(wrapped.parameters())


def test_an_exception_in_the_context_passes_through_and_training_can_go_on():
    run_kept_ranks(raising, 2)


def disabled():
    wrapped = DDP(make_model())
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    with Join([wrapped, zero], enable=False):
        wrapped(torch.ones(2, 5)).sum().backward()
        zero.step()
    assert_same_everywhere(wrapped.parameters())


def test_a_disabled_context_changes_nothing():
    run_kept_ranks(disabled, 2)


def beside_the_wrapper():
    """A sharded model and, behind DDP, a second one with ZeRO, trained in one loop."""

    def both():
        sharded = FSDP(make_model(1), use_orig_params=True)
        wrapped = DDP(make_model(2), **SMALL)
        adam = torch.optim.AdamW(sharded.parameters(), lr=0.05)
        zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.05)
        return sharded, wrapped, adam, zero

    def iterate(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    sharded, wrapped, adam, zero = both()
    with Join([sharded, wrapped, zero]):
        for batch in batches():
            iterate(sharded, adam, batch)
            iterate(wrapped, zero, batch)
    expected_sharded, expected_wrapped, expected_adam, expected_zero = both()
    with Join([expected_sharded]):
        for batch in batches():
            iterate(expected_sharded, expected_adam, batch)
    with Join([expected_wrapped, expected_zero]):
        for batch in batches():
            iterate(expected_wrapped, expected_zero, batch)
    assert_same_everywhere(wrapped.parameters())
    for ours, theirs in (
        *zip(sharded.parameters(), expected_sharded.parameters(), strict=True),
        *zip(wrapped.parameters(), expected_wrapped.parameters(), strict=True),
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_context_serves_the_wrapper_and_ddp_with_zero_together(world_size):
    run_kept_ranks(beside_the_wrapper, world_size)
