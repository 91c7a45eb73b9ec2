"""Communication runs beside the computation: times of a simulated machine, which are exact.

A matrix product takes a second there and everything else nothing, so a block takes 1 in forward and 2 in backward.
"""

from __future__ import annotations

import pytest

from fsdp import ShardingStrategy
from tests.streams.scenarios import DIM, Model, accumulate, train, world
from tests.streams.simulator import Machine
from tools.bench.loopback_link import FREE, Network

BLOCKS = 8
BLOCK_BYTES = 4 * (DIM * DIM + 3 * DIM)
COSTS = {"aten::addmm": 1.0, "aten::mm": 1.0}


def seconds_of_a_step(network, *, forward_only=False, **options):
    """Of the third one; the first has nothing to foresee by."""
    machine = Machine()
    machine.costs = COSTS
    model = Model(BLOCKS)
    with world(machine, network=network, model=model, **options) as w, machine.watching():
        w.step(0)
        w.step(1)
        machine.synchronize_times()
        start = machine.elapsed
        loss = w.loss(2)
        if not forward_only:
            loss.backward()
            w.update()
        end = machine.elapsed
    assert not machine.races
    return end - start


def network_on_which_a_gather_takes(seconds):
    return Network(BLOCK_BYTES * 3 / 4 / seconds)


@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("orig", [False, True])
def test_only_the_first_gathers_of_a_forward_are_exposed(orig, forward_prefetch):
    options = {"forward_only": True, "orig": orig, "forward_prefetch": forward_prefetch}
    alone = seconds_of_a_step(FREE, **options)
    gather = 0.9
    taken = seconds_of_a_step(network_on_which_a_gather_takes(gather), **options)
    assert alone == BLOCKS + 1
    assert taken < alone + 1.5 * gather  # the root's, a small one, and the first block's


def test_a_step_exposes_what_nothing_could_hide():
    alone = seconds_of_a_step(FREE)
    gather = 0.6
    taken = seconds_of_a_step(network_on_which_a_gather_takes(gather))
    # The first gathers of the forward, that of the last block in the backward, the last reduction.
    assert taken < alone + 4 * gather, (alone, taken)


def test_a_slow_network_is_never_idle():
    gather = 10.0
    taken = seconds_of_a_step(network_on_which_a_gather_takes(gather))
    moved = 3 * BLOCKS * gather  # two gathers and a reduction of each block
    assert moved < taken < 1.1 * moved + 3


def test_a_sum_over_replicas_runs_beside_the_next_reduction():
    """With gathers for nothing: the sum of a unit, as long as its reduction, adds nothing but the last one."""
    hybrid = {"hybrid": True, "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}
    reduction = 2.5  # longer than a block's backward
    network = Network(BLOCK_BYTES / 2 / reduction)
    taken = seconds_of_a_step(network, **hybrid)
    gathers = 0.5 * reduction  # hidden but for the first, whose order is not what is looked at here
    assert taken < BLOCKS * (reduction + reduction) + BLOCKS + 1 + gathers + reduction, taken


@pytest.mark.parametrize("scenario", [train, accumulate], ids=["train", "accumulate"])
@pytest.mark.parametrize("orig", [False, True])
def test_a_steady_step_never_makes_the_host_wait(scenario, orig):
    machine = Machine()
    with world(machine, orig=orig) as w:
        for _ in range(2):  # both forwards are looked at for silent writes
            w.step()
        with machine.watching():
            scenario(w)
            for _ in range(7):  # past the fourth and the eighth, which are looked at on the CPU
                w.step()
    assert not machine.synchronisations
