"""The loop-back process group: defined values, real bytes, a network's time."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

from tests.streams.simulator import Machine
from tools.bench import cuda_overlap
from tools.bench.loopback import loopback_group
from tools.bench.loopback_link import FREE, NETWORKS, DeviceLink, HostLink, Network
from tools.bench.models import Shape

CPU = torch.device("cpu")
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture
def fabric():
    with loopback_group(4, rank=1) as made:
        yield made


def test_a_gather_repeats_the_own_shard(fabric):
    own, whole = torch.tensor([1.0, 2.0]), torch.zeros(8)
    gather(whole, own)
    assert whole.tolist() == [1.0, 2.0] * 4
    in_place = torch.arange(8.0)
    gather(in_place, in_place[2:4])
    assert in_place.tolist() == [2.0, 3.0] * 4
    parts = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)
    assert fabric.carried == {"all_gather": (3 * 3 * 8, 3)}


def test_a_sum_is_the_own_part_as_often_as_there_are_ranks(fabric):
    whole, out = torch.arange(8.0), torch.zeros(2)
    reduce_scatter(out, whole)
    assert out.tolist() == [8.0, 12.0]
    reduce_scatter(out, whole, op=dist.ReduceOp.AVG)
    assert out.tolist() == [2.0, 3.0]
    dist.all_reduce(out)
    assert out.tolist() == [8.0, 12.0]
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    assert out.tolist() == [8.0, 12.0]
    assert fabric.carried == {"reduce_scatter": (2 * 3 * 8, 2), "all_reduce": (2 * 12, 2)}


def test_the_rest_changes_nothing_and_returns(fabric):
    x = torch.arange(4.0)
    dist.broadcast(x, 0)
    dist.barrier()
    dist.send(x, 2)
    dist.recv(x, 2)
    out = torch.zeros(4)
    dist.all_to_all_single(out, x)
    assert torch.equal(out, x)
    group = dist.new_group([1, 3])
    assert (group.rank(), group.size(), dist.get_backend(group)) == (0, 2, "loopback")


def test_coalesced_collectives_are_one_launch():
    carried = []

    class Log(HostLink):
        def carry(self, seconds, move):
            carried.append(seconds)
            return super().carry(0.0, move)

    network = Network(100.0, base=3.0)
    with loopback_group(4, network, links={CPU: Log()}):
        wholes = [torch.zeros(8), torch.zeros(12)]
        group = dist.group.WORLD
        group._start_coalescing(CPU)
        for whole in wholes:
            gather(whole, torch.ones(whole.numel() // 4), async_op=True)
        assert not carried
        group._end_coalescing(CPU).wait()
    assert all(whole.eq(1).all() for whole in wholes)
    assert carried == [3.0 + (6 + 9) * 4 / 100]


def test_the_host_waits_as_long_as_the_network_takes_and_links_carry_one_at_a_time(fabric):
    fabric.network = Network(math.inf, base=0.02)
    x = torch.ones(4)
    start = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    works[1].wait()
    assert time.monotonic() - start >= 0.04
    start = time.monotonic()
    dist.all_reduce(x, async_op=True).get_future().wait()
    assert time.monotonic() - start >= 0.02


def test_a_network_costs_hops_and_bytes():
    network = Network(100.0, base=1.0, hop=0.1, node_hop=0.5, per_node=4)
    assert network.seconds(200, 4) == pytest.approx(1.0 + 3 * 0.1 + 2.0)
    assert network.seconds(0, 8) == pytest.approx(1.0 + 6 * 0.1 + 0.5)
    assert network.seconds(0, 8, passes=2) == pytest.approx(1.0 + 12 * 0.1 + 1.0)
    assert FREE.seconds(1 << 40, 512) == 0.0
    # 8 H200 gather 1 GiB in 2.6 ms (spec, section 3.4).
    assert NETWORKS["nvlink"].seconds((1 << 30) * 7 // 8, 8) == pytest.approx(2.6e-3, rel=0.05)


def test_a_device_link_waits_for_the_current_stream_and_for_what_it_carries():
    machine = Machine()
    link = DeviceLink(machine, CPU, machine.spin)
    with machine.watching():
        source, target = torch.ones(4), torch.zeros(4)
        carried = [link.carry(2.0, lambda: target.copy_(source)) for _ in range(2)]
        assert machine.current_stream().now == 0.0
        carried[1].wait()
        assert machine.current_stream().now == 4.0
        target.sum()
        source.zero_()
    assert not machine.races


def test_an_unwaited_collective_on_a_device_is_a_race():
    machine = Machine()
    link = DeviceLink(machine, CPU, machine.spin)
    with machine.watching():
        target = torch.zeros(4)
        link.carry(0.0, lambda: target.add_(1))
        target.sum()
    assert machine.races


def test_every_contender_runs_over_every_network():
    shape = Shape(2, dim=32, heads=4, vocabulary=64, batch=2, sequence=8, hidden=64)
    result = cuda_overlap.measure(
        shape=vars(shape),
        world_size=4,
        networks=["free", "slow"],
        rounds=1,
        steps=1,
        seed=0,
        device="cpu",
    )
    assert not result["failures"]
    assert result["contenders"] == list(cuda_overlap.NAMES)
    text = cuda_overlap.table("title", "slow", result["samples"], {}).text()
    assert all(name in text for name in cuda_overlap.NAMES)
    # Flat parameters of the same layout: the same bytes as FSDP1's.
    assert result["bytes"]["ours-flat"] == result["bytes"]["fsdp1-flat"]


def test_a_link_of_the_host_moves_at_once():
    moved = []
    HostLink().carry(0.0, lambda: moved.append(True))
    assert moved
