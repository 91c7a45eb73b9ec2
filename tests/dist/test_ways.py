"""Messages to higher and to lower ranks go over connections of their own; which there are, and how waits end."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.collectives import Gather
from fsdp.comm.process_group import PointToPointCollectives
from fsdp.comm.shared_memory import LONGEST_MESSAGE
from fsdp.comm.ways import Ways, interrupt
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import batch, build, wrap

_TAG = (1 << 20) - 7
_PATIENCE = 20.0


def sockets():
    """Connections that this process has open."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def gained(alone):
    """How many connections are made by a training step, a long all-reduce, and a gather too long for memory."""
    if dist.get_rank() in alone:
        os.environ["FSDP_SHARED_MEMORY"] = "0"
    counts = [sockets()]
    model = wrap(build())
    model(batch(0)).sum().backward()
    counts.append(sockets())
    long = PointToPointCollectives(dist.group.WORLD)
    long.all_reduce([torch.ones(LONGEST_MESSAGE // 4 + 1)]).wait()
    counts.append(sockets())
    whole = torch.zeros(dist.get_world_size() * (LONGEST_MESSAGE // 4 + 1))
    slices = whole.chunk(dist.get_world_size())
    slices[dist.get_rank()].fill_(1.0)
    long.all_gather([Gather(whole, slices)]).wait()
    assert whole.eq(1.0).all()
    counts.append(sockets())
    dist.barrier()
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_one_host_make_more_connections_when_they_first_need_them(world_size):
    expected = [0, 0, world_size - 1]
    for found in run_ranks(gained, world_size, ()):
        assert [min(more, world_size - 1) for more in found] == expected, found


def test_every_rank_makes_more_connections_where_any_two_are_on_different_hosts():
    for found in run_ranks(gained, 3, (2,)):
        assert found[0] >= 2, found
        assert found[1:] == [0, 0], found


def crossing():
    """Long messages both ways at once, while each rank launches its own and waits in an order of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ways = Ways(dist.group.WORLD)
    ways.connect()
    peers = [peer for peer in range(size) if peer != rank]
    rounds = []
    for step in range(3):
        received = {peer: torch.empty(300_000) for peer in peers}
        works = [ways.receive(received[peer], peer, _TAG + step) for peer in peers]
        sent = [torch.full((300_000,), 10.0 * rank + step) for _ in peers]
        works += [ways.send(s, p, _TAG + step) for s, p in zip(sent, peers, strict=True)]
        rounds.append((received, sent, works))
    for step, (received, _, works) in reversed(list(enumerate(rounds))):
        for work in works[:: 1 if rank else -1]:
            work.wait()
        for peer, values in received.items():
            assert values.eq(10.0 * peer + step).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_both_ways_arrive_whole(world_size):
    run_kept_ranks(crossing, world_size)


def interrupted():
    """Seconds until a wait over either way ends, when this rank interrupts it from another thread."""
    rank = dist.get_rank()
    ways = Ways(dist.group.WORLD)
    ways.connect()
    dist.barrier()
    work = ways.receive(torch.empty(1), 1 - rank, _TAG)  # nobody sends
    timer = threading.Timer(0.1, interrupt, (dist.group.WORLD, 1 - rank, _TAG - 1))
    timer.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        work.wait()
    return time.monotonic() - start


def test_waits_over_both_ways_can_be_interrupted():
    assert max(run_kept_ranks(interrupted, 2)) < _PATIENCE


def later_groups():
    """Two of three ranks train over sockets; then all three make a group."""
    os.environ["FSDP_SHARED_MEMORY"] = "0"
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        model = wrap(build(), process_group=pair)
        model(batch(0)).sum().backward()
    everyone = dist.new_group([0, 1, 2])
    total = torch.ones(1)
    dist.all_reduce(total, group=everyone)
    return everyone.group_name, total.item()


def test_groups_made_afterwards_have_the_same_names_on_all_ranks():
    first, *others = run_ranks(later_groups, 3)
    assert others == [first, first]
    assert first[1] == 3.0
