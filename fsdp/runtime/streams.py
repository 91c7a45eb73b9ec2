"""Where communication runs: on streams of its own on accelerators, as asynchronous work on the CPU.

Note [Stream order]
    Three streams take part on an accelerator: compute (the user's current stream), gather and reduce.

    ======================================  ===========================  =============================================
    what must come first                    what waits                   without it
    ======================================  ===========================  =============================================
    optimizer step (compute)                gather of the next forward   a gather would read half-updated shards
    last use of a unit (compute), recorded  any later gather             the allocator may hand the freed storage to the
    when it is resharded                                                 next gather while compute still reads it
    gather                                  compute, at first use        compute would read unfilled parameters
    copy into the reduce buffer (compute)   reduce                       the reduce would send half-filled gradients
    reduce, scale, publish                  compute, end of backward     the optimizer would read unfinished gradients
    reduce                                  compute, before the buffer   a later copy would overwrite gradients that are
                                            is filled again              still being sent
    ======================================  ===========================  =============================================

    Gathered storages are allocated and freed in the gather stream's pool only and reduce buffers in the compute
    stream's only, so no tensor needs ``record_stream``, and memory comes back in program order.  The second row also
    bounds gathers in flight on the device, without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..comm.collectives import Work

__all__ = ["HostStreams", "DeviceStreams", "Streams", "streams_for"]


class Streams(Protocol):
    """Runs gathers and reduces beside the computation (see Note [Stream order])."""

    host_synchronous: bool

    def start_step(self) -> None:
        """Let gathers see what compute has done so far (the optimizer step)."""

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Fill and gather; waiting on the result makes compute see the gathered values."""

    def run_reduce(self, launch: Callable[[], Work], finish: Callable[[], None]) -> Work:
        """Reduce what compute has prepared, then ``finish``; waiting on the result makes compute see both."""

    def released(self) -> None:
        """Compute has used a gathered storage for the last time and it is about to be freed."""


def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)


class HostStreams:
    """The CPU: collectives run in the background once started, everything else in program order."""

    host_synchronous = True

    def start_step(self) -> None:
        """Nothing to order."""

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Start it."""
        return launch()

    def run_reduce(self, launch: Callable[[], Work], finish: Callable[[], None]) -> Work:
        """Start it; ``finish`` runs when waited on."""
        return _Then(launch(), finish)

    def released(self) -> None:
        """Nothing to order."""


class _Then:
    """Work that is followed by a function on the host."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> None:
        """Wait, then run the function."""
        self._work.wait()
        self._finish()


class DeviceStreams:
    """An accelerator with streams and events.

    Args:
        device: Which one.
        module: What has its streams, if not ``torch.cuda`` or the like.
    """

    host_synchronous = False

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._module: Any = torch.get_device_module(device) if module is None else module
        self._device = device
        self._gather = self._module.Stream(device=device, priority=-1)
        self._reduce = self._module.Stream(device=device, priority=-1)
        self._last_release: Any = None

    def start_step(self) -> None:
        """The gather stream waits for the compute stream."""
        # Order: optimizer step (compute) -> gather.  Without it shards are read while they are updated.
        self._gather.wait_stream(self._module.current_stream(self._device))

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Launch on the gather stream; the result is an event."""
        if self._last_release is not None:
            # Order: last use of freed storage (compute) -> gather.  Without it live parameters are overwritten.
            self._gather.wait_event(self._last_release)
        with self._module.stream(self._gather):
            launch().wait()
            return self._event_work(self._gather)

    def run_reduce(self, launch: Callable[[], Work], finish: Callable[[], None]) -> Work:
        """Launch and finish on the reduce stream; the result is an event."""
        # Order: copy into the reduce buffer (compute) -> reduce.  Without it unfinished gradients are sent.
        self._reduce.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce):
            launch().wait()
            finish()
            return self._event_work(self._reduce)

    def released(self) -> None:
        """Remember how far compute is."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        self._last_release = event

    def _event_work(self, stream: Any) -> Work:
        event = self._module.Event()
        event.record(stream)
        return _EventWork(self._module, self._device, event)


class _EventWork:
    """Work whose end is an event; waiting makes the current stream wait, never the host."""

    __slots__ = ("_device", "_event", "_module")

    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module = module
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Order: communication -> what the current stream runs next."""
        self._module.current_stream(self._device).wait_event(self._event)
