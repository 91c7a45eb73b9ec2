"""Shards that rest on the host: its own writes are ordered with the device's copies."""

from __future__ import annotations

import pytest

from fsdp import CPUOffload
from fsdp.flat.home import HostMemory
from fsdp.flat.offloaded import OffloadedHandle
from fsdp.runtime.streams import HostReadingStreams, Lanes
from tests.streams.scenarios import CPU, SCENARIOS, World, world
from tests.streams.simulator import Machine
from tests.streams.test_order import STREAMS

KINDS = {
    "parameters": CPUOffload(offload_params=True),
    "optimizer": CPUOffload(offload_optimizer=True),
}
# Without clipping: moving its coefficient to the host makes the host wait, but is no operation where all is the CPU.
WATCHED = ["train", "accumulate", "add_to_gradients", "change_data", "fail_and_go_on"]


def races(machine, scenario, monkeypatch, *, orig=True, kind="parameters"):
    """What the detector finds if homes are the host's memory and all else is the device's."""
    empty = HostMemory.empty

    def resting(home, numel, dtype):
        tensor = empty(home, numel, dtype)
        machine.rests_on_host(tensor)
        return tensor

    monkeypatch.setattr(HostMemory, "empty", resting)
    with world(machine, orig=orig, cpu_offload=KINDS[kind]) as w:
        w.root.streams = HostReadingStreams(CPU, Lanes.made_by(machine, CPU))
        handles = [handle for unit in w.root.units for handle in unit.handles]
        assert all(isinstance(handle, OffloadedHandle) for handle in handles)
        assert all(machine.is_hosts([handle.flat_param]) for handle in handles)
        with machine.watching():
            scenario(w)
    return machine.races


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("scenario", WATCHED)
def test_the_host_writes_only_what_no_copy_still_reads(scenario, orig, kind, monkeypatch):
    found = races(Machine(), SCENARIOS[scenario], monkeypatch, orig=orig, kind=kind)
    assert not found, "\n".join(map(str, found))


def steps_and_forwards(w: World) -> None:
    """The host writes right after a forward as well."""
    for seed in range(3):
        w.step(seed)
        w.loss(seed)
        for param in w.model.parameters():
            param.data.mul_(0.9)


@pytest.mark.parametrize(
    "dropped", [("end_step", None), ("wait", "_wait_for_oldest")], ids=["copy in", "copy out"]
)
def test_no_wait_of_the_host_can_be_left_out(dropped, monkeypatch):
    machine = Machine(STREAMS.name, dropped)
    assert races(machine, steps_and_forwards, monkeypatch)
    assert machine.drops
