"""A step may be captured in a graph, under every option, and steps before and after it run as ever."""

from __future__ import annotations

import contextlib

import pytest

from fsdp import CPUOffload
from fsdp.errors import UnsupportedError
from fsdp.runtime.streams import HostReadingStreams, Lanes
from tests.streams.scenarios import CPU, OPTIONS, SCENARIOS, World, world
from tests.streams.simulator import Machine
from tests.streams.test_order import STREAMS


def captured_between_steps(w: World) -> None:
    """As users do: warm up beside, capture, run the graph and steps in turn; then whatever makes us drop buffers."""
    side = w.machine.Stream()
    w.machine.synchronize()
    with w.machine.stream(side):
        w.step(0)
        w.step(1)
        w.loss(
            2
        )  # its backward never comes, here and in the graph: the next forward frees what it has gathered
    w.machine.current_stream().wait_stream(side)
    with w.machine.captured() as graph:
        w.step(2)
        w.loss(3)
    w.machine.replay(graph)
    w.step(3)
    w.machine.replay(graph)
    SCENARIOS["fail_and_go_on"](w)
    w.machine.replay(graph)
    with w.machine.captured() as graph:
        w.step(4)
    w.machine.replay(graph)
    w.step(5)


def found(machine, **options):
    with world(machine, **options) as w, machine.watching():
        captured_between_steps(w)
    return machine.races


@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_step_breaks_no_rule_of_captures(options):
    races = found(Machine(), **OPTIONS[options]())
    assert not races, "\n".join(map(str, races))


def test_a_captured_step_may_step_the_optimizer_in_the_backward():
    races = found(Machine(), in_backward=True, max_norm=0.1)
    assert not races, "\n".join(map(str, races))


@pytest.mark.parametrize("options", ["orig", "no_shard"])
def test_the_capture_has_to_join_the_gather_stream(options):
    machine = Machine(STREAMS.name, ("end_step", None))
    races = found(machine, **OPTIONS[options]())
    assert any("not joined" in race.what for race in races)
    assert machine.drops


def test_a_step_that_waits_for_the_host_is_not_captured():
    machine = Machine()
    with world(machine, cpu_offload=CPUOffload(offload_params=True)) as w:
        w.root.streams = HostReadingStreams(CPU, Lanes.made_by(machine, CPU))
        w.step()
        with contextlib.ExitStack() as stack:
            stack.enter_context(machine.captured())
            with pytest.raises(UnsupportedError, match="captured"):
                w.step()
