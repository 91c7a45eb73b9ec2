"""Ranks of one host talk through shared memory; what they compute, and what is said when one fails, stays the same."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm.collectives import Gather, Reduce
from fsdp.comm.neighbours import meet
from fsdp.comm.process_group import PointToPointCollectives
from fsdp.comm.shared_memory import LONGEST_MESSAGE
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.scripts import batch, build, wrap
from tests.zero.support import bytes_sent

_TAG = (1 << 20) - 2


def without_memory(*ranks):
    """Make the given ranks look as if they were on hosts of their own."""
    if dist.get_rank() in ranks:
        os.environ["FSDP_SHARED_MEMORY"] = "0"


# -- what ranks compute ------------------------------------------------------------------------------------------------


def every_collective(alone):
    """Results of each collective, for sizes around the longest message and for several tensors at once."""
    without_memory(*alone)
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives = PointToPointCollectives(dist.group.WORLD)
    results = []
    longest = LONGEST_MESSAGE // 4
    long = [[longest], [longest + 1], [1, longest]]
    for numels in ([5], [0], [3, 0, 70], *long):
        for dtype in (torch.float32,) if numels in long else (torch.bfloat16, torch.int64):
            gathers, reduces = [], []
            for numel in numels:
                whole = torch.zeros(size * numel, dtype=dtype)
                slices = whole.split(numel) if numel else [whole] * size
                slices[rank].copy_(torch.arange(numel) % 97 + rank)
                gathers.append(Gather(whole, slices))
                terms = (torch.arange(size * numel) % 31 + 10 * rank).to(dtype)
                parts = terms.split(numel) if numel else [terms] * size
                reduces.append(Reduce(terms, parts, torch.empty(numel, dtype=dtype)))
            works = [collectives.all_gather(gathers), collectives.reduce_scatter(reduces)]
            for work in works:
                work.wait()
            results += [gather.whole[:: numel // 50 + 1].tolist() for gather in gathers]
            results += [reduce.out[:: len(reduce.out) // 50 + 1].tolist() for reduce in reduces]
    for op in ("sum", "max", "min"):
        tensors = [torch.tensor([[1.5, -2.0]]) * (rank + 1), torch.tensor(7 - rank)]
        collectives.all_reduce(tensors, op=op).wait()
        results += [tensor.tolist() for tensor in tensors]
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_through_memory_equal_those_through_sockets(world_size):
    through_memory = run_ranks(every_collective, world_size, ())
    through_sockets = run_ranks(every_collective, world_size, tuple(range(world_size)))
    assert through_memory == through_sockets


@pytest.mark.parametrize("alone", [(0,), (1,), (3,)])
def test_a_host_with_two_of_three_or_four_ranks_mixes_both_ways(alone):
    world_size = max(alone) + 1 if max(alone) > 2 else 3
    mixed = run_ranks(every_collective, world_size, alone)
    assert mixed == run_ranks(every_collective, world_size, tuple(range(world_size)))


def who_met(alone):
    without_memory(*alone)
    near = meet(dist.group.WORLD, _TAG)
    return None if near is None else near.ranks


def test_only_ranks_that_reach_each_other_use_memory():
    assert run_ranks(who_met, 3, ()) == [(1, 2), (0, 2), (0, 1)]
    assert run_ranks(who_met, 3, (1,)) == [(2,), None, (0,)]
    assert run_ranks(who_met, 2, (1,)) == [None, None]


def a_step(orig):
    model = wrap(build(), use_orig_params=orig)
    model(batch(0)).sum().backward()
    model(batch(1)).sum().backward()
    before = bytes_sent()
    of_counting = bytes_sent() - before
    before = bytes_sent()
    model(batch(2)).sum().backward()
    return bytes_sent() - before - of_counting


@pytest.mark.parametrize("orig", [False, True])
def test_a_step_sends_nothing_over_sockets(orig):
    assert run_ranks(a_step, 2, orig) == [0, 0]


def trained(alone, orig):
    without_memory(*alone)
    model = wrap(build(), use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step + 10 * dist.get_rank())).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_through_memory_equals_training_through_sockets_bit_by_bit(world_size, orig):
    through_sockets = run_ranks(trained, world_size, tuple(range(world_size)), orig)
    assert run_ranks(trained, world_size, (), orig) == through_sockets
    assert run_ranks(trained, world_size, (0,), orig) == through_sockets


# -- in any order, late, never -----------------------------------------------------------------------------------------


def at_odd_times(seed):
    """Many messages of several units, waited on late, in another order, or never, by ranks that pause."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alike, own = random.Random(seed), random.Random(seed * size + rank)
    units = [PointToPointCollectives(dist.group.WORLD) for _ in range(3)]
    pending = []
    for turn in range(120):
        unit = alike.randrange(3)
        numel = alike.choice([1, 30, 5000, 70000])
        whole = torch.zeros(size * numel)
        whole.split(numel)[rank].fill_(1000 * rank + turn)
        work = units[unit].all_gather([Gather(whole, whole.split(numel))])
        whole.split(numel)[rank].fill_(1000 * rank + turn)  # what is sent may be written again
        pending.append((turn, numel, whole, work))
        if alike.random() < 0.1:
            del pending[alike.randrange(len(pending))], work
        if own.random() < 0.05:
            time.sleep(0.003)
        while len(pending) > 6 or (pending and alike.random() < 0.4):
            turn_then, numel, whole, work = pending.pop(alike.randrange(len(pending)))
            work.wait()
            for peer, part in enumerate(whole.split(numel)):
                assert part.eq(1000 * peer + turn_then).all()
    return resident_shared()


def resident_shared():
    """MiB of shared pages in this process."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in line
    )
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_arrive_whole_however_late_and_in_whatever_order_they_are_read(world_size, seed):
    for megabytes in run_ranks(at_odd_times, world_size, seed):
        # At most seven messages wait here, and a few more at each peer, of 280 kB in 512 KiB.
        assert megabytes < 12 * world_size + 4


def given_up(times):
    """Reductions that nobody waits on, many times in a row, then one that counts."""
    collectives = PointToPointCollectives(dist.group.WORLD)
    size = dist.get_world_size()
    for _ in range(times):
        whole = torch.ones(size * 9)
        collectives.reduce_scatter([Reduce(whole, whole.split(9), torch.empty(9))])
    whole, out = torch.full((size * 9,), 3.0), torch.empty(9)
    collectives.reduce_scatter([Reduce(whole, whole.split(9), out)]).wait()
    assert out.eq(3.0 * size).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_work_that_nobody_waits_on_stands_in_nobodys_way(world_size):
    run_ranks(given_up, world_size, 100)


def far_ahead(times):
    """Rank 0 starts more gathers than a line can hold before it waits on the first; rank 1 waits on each at once."""
    rank = dist.get_rank()
    collectives = PointToPointCollectives(dist.group.WORLD)
    wholes = [torch.full((2,), -1.0) for _ in range(times)]
    works = []
    for number, whole in enumerate(wholes):
        whole[rank] = 1000 * rank + number
        works.append(collectives.all_gather([Gather(whole, whole.split(1))]))
        if rank == 1:
            works[-1].wait()
    if rank == 0:
        time.sleep(0.5)  # until rank 1 is as far ahead as it may be
    for number, (whole, work) in enumerate(zip(wholes, works, strict=True)):
        work.wait()
        assert whole.tolist() == [number, 1000 + number]


def test_a_sender_waits_before_it_would_overwrite_where_an_unread_message_lies():
    run_ranks(far_ahead, 2, 100)


# -- failures ----------------------------------------------------------------------------------------------------------


def left_by_a_peer(how):
    rank = dist.get_rank()
    collectives = PointToPointCollectives(dist.group.WORLD)
    whole = torch.zeros(2)
    collectives.all_gather([Gather(whole, whole.split(1))]).wait()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of the group .* has ended"):
        collectives.all_gather([Gather(whole, whole.split(1))]).wait()
    assert time.monotonic() - began < 5
    return "seen"


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_the_end_of_a_peers_process_ends_the_wait_for_it(how):
    survivor, dead = run_ranks_outcomes(left_by_a_peer, 2, how)
    assert not dead.ok
    assert survivor.ok, survivor
    assert survivor.value == "seen"


def timed_out():
    collectives = PointToPointCollectives(dist.group.WORLD)
    whole = torch.zeros(2)
    collectives.all_gather([Gather(whole, whole.split(1))]).wait()
    near = meet(dist.group.WORLD, _TAG)
    near._timeout = 0.5
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Timed out after 0.5 s of waiting for rank 1"):
            collectives.all_gather([Gather(whole, whole.split(1))]).wait()
    dist.barrier()


def test_a_wait_ends_with_the_groups_timeout():
    run_ranks(timed_out, 2)


def no_files_left():
    model = FSDP(torch.nn.Linear(7, 3))
    model(torch.ones(2, 7)).sum().backward()
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    names = [str(path.readlink()) for path in links]
    return sum("memfd:fsdp" in name for name in names)


def test_a_group_keeps_one_file_for_each_rank_open():
    assert run_ranks(no_files_left, 3) == [3, 3, 3]
