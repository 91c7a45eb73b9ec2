"""What travels arrives, whatever its dtype, size and strides; sums are taken in rank order.

The wire of other backends (``_NativeWire``) runs here over gloo's own broadcasts, sends and reductions.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.optim import ZeroRedundancyOptimizer, zero
from fsdp.optim.exchange import _NativeWire, make_wire
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.zero import test_hooks, test_state

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.bool,
)  # fmt: skip
CPU = torch.device("cpu")
WIRES = {"gloo": make_wire, "native": _NativeWire}


def tensors(owner, fill):
    """Small and large ones of every dtype, some transposed, one with gaps, one empty."""
    value = (owner + 1) if fill else 0
    made = []
    for dtype in DTYPES:
        for numel in (6, 60_000):
            made.append(torch.full((numel // 3, 3), value, dtype=dtype))
            made.append(torch.full((3, numel // 3), value, dtype=dtype).t())
    made.append(torch.full((40_000, 4), float(value))[:, ::2])
    made.append(torch.empty(0))
    return made


def handed_out(kind):
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    given = [tensors(owner, fill=owner == rank) for owner in ranks]
    WIRES[kind](dist.group.WORLD, CPU).hand_out(given).wait()
    for owner in ranks:
        for got, wanted in zip(given[owner], tensors(owner, fill=True), strict=True):
            assert torch.equal(wanted, got)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", WIRES)
def test_every_rank_gets_what_the_owners_hand_out(kind, world_size):
    run_kept_ranks(handed_out, world_size, kind)


def sent_to_one(kind):
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    given = [tensors(owner, fill=owner == rank) for owner in ranks]
    WIRES[kind](dist.group.WORLD, CPU).send_to(1, given).wait()
    for owner in ranks:
        arrived = rank in (1, owner)
        for got, wanted in zip(given[owner], tensors(owner, fill=arrived), strict=True):
            assert torch.equal(wanted, got)


@pytest.mark.parametrize("kind", WIRES)
def test_only_the_target_gets_what_is_sent_to_it(kind):
    run_kept_ranks(sent_to_one, 3, kind)


def out_of_order():
    wire = make_wire(dist.group.WORLD, CPU)
    rank = dist.get_rank()
    given = [
        [torch.full((1000 * (1 + tag),), float(tag + 1) if rank == 0 else 0.0)] for tag in range(4)
    ]
    order = range(4) if rank == 0 else reversed(range(4))
    works = [wire.hand_out([given[tag], [torch.zeros(3)]], tag) for tag in order]
    for work in works:
        work.wait()
        work.wait()
    for tag, (tensor,) in enumerate(given):
        assert torch.equal(torch.full_like(tensor, tag + 1), tensor)


def test_tags_let_ranks_start_in_different_orders():
    run_kept_ranks(out_of_order, 2)


def summed(kind):
    torch.manual_seed(dist.get_rank())
    world = dist.get_world_size()
    mine = torch.randn(world + 1, 1000)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    runs = [(owner, mine[owner].clone()) for owner in range(world)]
    runs.append((-1, mine[world].clone()))
    WIRES[kind](dist.group.WORLD, CPU).reduce(runs).wait()
    expected = everyone[0].clone()
    for other in everyone[1:]:
        expected += other
    rank = dist.get_rank()
    if kind == "gloo":
        assert torch.equal(expected[rank], runs[rank][1])
    torch.testing.assert_close(runs[rank][1], expected[rank])
    torch.testing.assert_close(runs[-1][1], expected[world])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", WIRES)
def test_each_owner_gets_the_sum_in_rank_order(kind, world_size):
    run_kept_ranks(summed, world_size, kind)


def over_native(case, *arguments):
    zero.make_wire = _NativeWire
    zero.host_wire = _NativeWire
    case(*arguments)
    assert ZeroRedundancyOptimizer is zero.ZeroRedundancyOptimizer


@pytest.mark.parametrize("layout", test_hooks.LAYOUTS)
def test_the_optimizer_and_its_hooks_work_over_another_backends_wire(layout):
    run_ranks(over_native, 3, test_hooks.reduced, layout, {}, True)
    run_ranks(over_native, 3, test_hooks.overlapped, "after", layout, {}, "AdamW", {"lr": 0.02})
    run_ranks(over_native, 2, test_state.successive, layout)
