"""A network that is not there: how long a collective takes on it, and links that take that long.

A link carries one collective at a time, as one communicator does.  On a GPU it is a stream: the time is spent on the
device, beside copies of the real number of bytes, and the host never waits.  On the CPU it is a clock: the bytes are
copied when the collective starts, and whoever waits sleeps until the network would have been done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["FREE", "NETWORKS", "DeviceLink", "HostLink", "Link", "Network", "link_for"]

_CALIBRATION_CYCLES = 20_000_000


@dataclass(frozen=True)
class Network:
    """What a ring over nodes costs: ``base + hops + bytes / bandwidth``.

    Attributes:
        bandwidth: Bytes per second into each rank; infinite for a network that is free.
        base: Seconds a collective takes whatever its size.
        hop: Seconds from one rank of a node to the next.
        node_hop: Seconds from one node to the next.
        per_node: Ranks of a node.
    """

    bandwidth: float
    base: float = 0.0
    hop: float = 0.0
    node_hop: float = 0.0
    per_node: int = 8

    def seconds(self, nbytes: int, world_size: int, passes: int = 1) -> float:
        """Seconds until ``nbytes`` have reached this rank in ``passes`` rounds of the ring."""
        across = (world_size - 1) // self.per_node
        inside = world_size - 1 - across
        hops = passes * (inside * self.hop + across * self.node_hop)
        return self.base + hops + nbytes / self.bandwidth


FREE = Network(float("inf"))
# NCCL's ring with the Simple protocol, as torch/_inductor/comm_analysis.py has it, and what 8xH200 nodes reach.
NETWORKS = {
    "free": FREE,
    "nvlink": Network(361e9, base=8.4e-6, hop=3.4e-6, node_hop=14e-6),  # 900 GB/s NVLink 4
    "ib": Network(40e9, base=8.4e-6, hop=3.4e-6, node_hop=14e-6),  # 400 Gbit/s a GPU, 80% of it
    "ib-node": Network(5e9, base=8.4e-6, hop=3.4e-6, node_hop=14e-6),  # 400 Gbit/s a node of 8
}


class Carried(Protocol):
    """A collective on its way."""

    def wait(self) -> None:
        """Block the host (CPU) or the current stream until it has arrived."""

    def future(self, values: Sequence[Tensor]) -> torch.futures.Future[Any]:
        """A future of ``values`` that completes when it has arrived."""


class Link(Protocol):
    """Carries one collective after another."""

    def carry(self, seconds: float, move: Callable[[], None]) -> Carried:
        """Run ``move`` once what came before has passed; arrive ``seconds`` after that at the earliest."""


def link_for(device: torch.device) -> Link:
    """A link for tensors on ``device``."""
    if device.type == "cpu":
        return HostLink()
    module: Any = torch.get_device_module(device)
    return DeviceLink(module, device, spinner(module))


class HostLink:
    """A link of the CPU."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def carry(self, seconds: float, move: Callable[[], None]) -> Carried:
        """Move at once; arrival is a time."""
        start = max(self._free_at, time.monotonic())
        move()
        self._free_at = start + seconds
        return _OnHost(self._free_at)


@dataclass(frozen=True)
class _OnHost:
    arrival: float

    def wait(self) -> None:
        """Sleep until the arrival."""
        remaining = self.arrival - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def future(self, values: Sequence[Tensor]) -> torch.futures.Future[Any]:
        """Completed by a timer, so that whoever waits in C++ waits as long."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        remaining = self.arrival - time.monotonic()
        if remaining > 0:
            threading.Timer(remaining, future.set_result, (list(values),)).start()
        else:
            future.set_result(list(values))
        return future


class DeviceLink:
    """A link of an accelerator: one stream that spends the time, one beside it that moves the bytes.

    Args:
        module: ``torch.cuda``, or what stands in for it.
        device: Whose streams.
        spin: Keeps the current stream busy for so many seconds.
    """

    def __init__(self, module: Any, device: torch.device, spin: Callable[[float], None]) -> None:
        self._module = module
        self._device = device
        self._spin = spin
        self._wire = module.Stream(device=device, priority=-1)
        self._mover = module.Stream(device=device, priority=-1)

    def carry(self, seconds: float, move: Callable[[], None]) -> Carried:
        """Both begin when the current stream has come this far and the link is free, and end together."""
        self._wire.wait_stream(self._module.current_stream(self._device))
        self._mover.wait_stream(self._wire)
        with self._module.stream(self._mover):
            move()
        with self._module.stream(self._wire):
            if seconds > 0:
                self._spin(seconds)
            self._wire.wait_stream(self._mover)
            arrival = self._module.Event()
            arrival.record(self._wire)
        return _OnDevice(self._module, self._device, self._wire, arrival)


@dataclass(frozen=True)
class _OnDevice:
    module: Any
    device: torch.device
    wire: Any
    arrival: Any

    def wait(self) -> None:
        """The current stream waits, the host does not."""
        self.module.current_stream(self.device).wait_event(self.arrival)

    def future(self, values: Sequence[Tensor]) -> torch.futures.Future[Any]:
        """Complete for the host; for streams when the wire has come this far."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self.device])
        with self.module.stream(self.wire):
            future.set_result(list(values))
        return future


def spinner(module: Any) -> Callable[[float], None]:
    """Keeps a stream busy with one thread block; how many cycles a second has is measured first."""
    module._sleep(_CALIBRATION_CYCLES)  # the clock rises under load
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    start.record()
    module._sleep(_CALIBRATION_CYCLES)
    end.record()
    module.synchronize()
    cycles_per_second = _CALIBRATION_CYCLES / start.elapsed_time(end) * 1e3

    def spin(seconds: float) -> None:
        module._sleep(int(seconds * cycles_per_second))

    return spin
