"""Where communication runs: on streams of its own on accelerators, as asynchronous work on the CPU.

Note [Stream order]
    Three streams take part on an accelerator: compute (the user's current stream), gather and reduce; where shards are
    replicated, also replicate.  docs/explanation/streams.md has every buffer and hazard, and how the order is proven.

    ======================================  ===========================  =============================================
    what must come first                    what waits                   without it
    ======================================  ===========================  =============================================
    optimizer step (compute)                gather of the next forward   a gather would read half-updated shards
    last use of a unit (compute), recorded  any later gather             the allocator may hand the freed storage to the
    when it is resharded                                                 next gather while compute still reads it
    gather                                  compute, at first use        compute would read unfilled parameters
    user's write into a shard (compute)     gather, if it is noticed in  a gather would read the old values
                                            the middle of a forward
    copy into the reduce buffer (compute)   reduce                       the reduce would send half-filled gradients
    reduce                                  replicate                    unfinished sums would be summed over replicas
    reduce, replicate, scale, publish       compute, end of backward     the optimizer would read unfinished gradients
    reduce                                  compute, before the buffer   a later copy would overwrite gradients that are
                                            is filled again              still being sent
    ======================================  ===========================  =============================================

    Where shards rest on the host (``flat.offloaded``) the copy to the device is the first thing a gather does, on the
    gather stream, and the copy of the reduced gradient to page-locked memory the last thing a reduction does, on the
    reduce stream.  The optimizer then runs on the host, which streams do not order; three more orders must hold:

    ======================================  ===========================  =============================================
    copy of the gradient to the host        the host, before it adds or  the optimizer would step with a gradient that
    (reduce)                                publishes the gradient       has half arrived
    copy of a shard to the device (gather)  the host, at the end of      the optimizer would write into shards that are
                                            every forward and backward   still being read
    copy of the gradient to the host        free of the reduced shard    none is needed: it is allocated on compute's
    (reduce)                                on the device                pool, and the host has waited for the copy
    ======================================  ===========================  =============================================

    The first is waited for when a later reduction needs the place in flight, two units on, so that the device has
    work meanwhile; the optimizer's writes need no order with the next gather, because the host made them before it
    launched that.

    Gathered storages are allocated and freed in the gather stream's pool only and reduce buffers in the compute
    stream's only, so no tensor needs ``record_stream``, and memory comes back in program order.  The second row also
    bounds gathers in flight on the device, without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..comm.collectives import Work, abandon

__all__ = ["DeviceStreams", "HostStreams", "InTwo", "Streams", "capturing", "streams_for"]


class Streams(Protocol):
    """Runs gathers and reduces beside the computation (see Note [Stream order])."""

    host_synchronous: bool

    def start_step(self) -> None:
        """A forward begins: let gathers see what compute has written into shards so far (the optimizer step)."""

    def shards_written(self) -> None:
        """Let gathers see what compute has written into shards just now."""

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Fill and gather; waiting on the result makes compute see the gathered values."""

    def run_reduce(
        self, launch: Callable[[], Work], finish: Callable[[], None], *, apart: bool = False
    ) -> Work:
        """Reduce what compute has prepared, then ``finish``; waiting on the result makes compute see both.

        ``apart`` if ``finish`` communicates too, over another group: the next reduction then need not wait for it.
        """

    def run_reduce_to_host(
        self, launch: Callable[[], Work], finish: Callable[[], None], arrived: Callable[[], None]
    ) -> Work:
        """As :meth:`run_reduce`; waiting makes the host see what ``finish`` has copied to it, and runs ``arrived``."""

    def released(self) -> None:
        """Compute has used a gathered storage for the last time and it is about to be freed."""

    def end_step(self) -> None:
        """A forward or a backward has ended: the host may write into shards that rest with it."""


def streams_for(device: torch.device, *, reads_host: bool = False) -> Streams:
    """The streams of ``device``; ``reads_host`` if shards rest on the host."""
    if device.type == "cpu":
        return HostStreams()
    return HostReadingStreams(device) if reads_host else DeviceStreams(device)


class HostStreams:
    """The CPU: collectives run in the background once started, everything else in program order."""

    host_synchronous = True

    def start_step(self) -> None:
        """Nothing to order."""

    def shards_written(self) -> None:
        """Nothing to order."""

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Start it."""
        return launch()

    def run_reduce(
        self, launch: Callable[[], Work], finish: Callable[[], None], *, apart: bool = False
    ) -> Work:
        """Start it; ``finish`` runs when waited on."""
        return _Then(launch(), finish)

    def run_reduce_to_host(
        self, launch: Callable[[], Work], finish: Callable[[], None], arrived: Callable[[], None]
    ) -> Work:
        """Start it; ``finish`` and ``arrived`` run when waited on."""
        return _Then(_Then(launch(), finish), arrived)

    def released(self) -> None:
        """Nothing to order."""

    def end_step(self) -> None:
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

    def abandon(self) -> None:
        """Neither wait nor run the function."""
        abandon(self._work)


class InTwo:
    """Work that is followed by other work, and that by a function, on the host."""

    __slots__ = ("_finish", "_launch", "_work")

    def __init__(self, work: Work, launch: Callable[[], Work], finish: Callable[[], None]) -> None:
        self._work = work
        self._launch: Callable[[], Work] | None = launch
        self._finish = finish

    def advance(self) -> None:
        """Wait for the first and launch the second, if that has not happened yet."""
        launch, self._launch = self._launch, None
        if launch is not None:
            self._work.wait()
            self._work = launch()

    def wait(self) -> None:
        """Wait for both, then run the function."""
        self.advance()
        self._work.wait()
        self._finish()

    def abandon(self) -> None:
        """Neither wait nor run anything."""
        abandon(self._work)


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
        self._replicate = self._module.Stream(device=device, priority=-1)
        self._users: dict[
            Any, None
        ] = {}  # streams that have computed with gathered parameters in this step
        self._releases: dict[Any, Any] = {}  # how far each of them was, until gathers know of it

    def start_step(self) -> None:
        """Gathers of this forward come after all that the current stream has been given."""
        if capturing(self._module):
            # Capture began with an idle device, and may not wait for what was recorded before it.
            self._releases.clear()
        self._users.clear()
        self.shards_written()

    def shards_written(self) -> None:
        """The gather stream waits for the compute stream."""
        # Order: optimizer step (compute) -> gather.  Without it shards are read while they are updated.
        self._gather.wait_stream(self._module.current_stream(self._device))

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Launch on the gather stream; the result is an event."""
        for event in self._releases.values():
            # Order: last use of freed storage (compute) -> gather.  Without it live parameters are overwritten.
            self._gather.wait_event(event)
        self._releases.clear()
        with self._module.stream(self._gather):
            launch().wait()
            return self._event_work(self._gather, self._users)

    def run_reduce(
        self, launch: Callable[[], Work], finish: Callable[[], None], *, apart: bool = False
    ) -> Work:
        """Launch on the reduce stream, finish there or on one of its own; the result is an event."""
        # Order: copy into the reduce buffer (compute) -> reduce.  Without it unfinished gradients are sent.
        self._reduce.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._reduce):
            launch().wait()
        last = self._after_reduce() if apart else self._reduce
        with self._module.stream(last):
            finish()
        return self._event_work(last)

    def _after_reduce(self) -> Any:
        # Order: reduce-scatter -> all-reduce over replicas.  Without it unfinished sums are summed.
        self._replicate.wait_stream(self._reduce)
        return self._replicate

    def run_reduce_to_host(
        self, launch: Callable[[], Work], finish: Callable[[], None], arrived: Callable[[], None]
    ) -> Work:
        """Launch and finish on the reduce stream; ``arrived`` runs on the host when it has waited."""
        self.run_reduce(launch, finish, apart=False)
        # Order: copy of the gradient (reduce) -> host.  Without it a gradient that has half arrived is published.
        return _Then(_HostWork(self._recorded(self._reduce)), arrived)

    def end_step(self) -> None:
        """Nothing to order: shards are on the device."""

    def released(self) -> None:
        """Remember how far compute is, on every stream it has used: the current one may not be where it ran."""
        current = self._module.current_stream(self._device)
        for stream in {**self._users, current: None}:
            self._releases[stream] = self._recorded(stream)

    def _event_work(self, stream: Any, users: dict[Any, None] | None = None) -> Work:
        return _EventWork(self._module, self._device, self._recorded(stream), users)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


class HostReadingStreams(DeviceStreams):
    """An accelerator whose gathers begin with a copy from the host."""

    def end_step(self) -> None:
        """The host waits for every copy from its shards; the device still has the computation after them to do."""
        # Order: copy of a shard (gather) -> host.  Without it the optimizer writes into what is being read.
        self._recorded(self._gather).synchronize()


class _HostWork:
    """Work whose end is an event that the host waits for."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the host until the device has come to it."""
        self._event.synchronize()


def capturing(module: Any) -> bool:
    """Whether a graph is being captured on the current stream; not every accelerator has graphs."""
    asked = getattr(module, "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


class _EventWork:
    """Work whose end is an event; waiting makes the current stream wait, never the host, and enters it in ``users``."""

    __slots__ = ("_device", "_event", "_module", "_users")

    def __init__(
        self, module: Any, device: torch.device, event: Any, users: dict[Any, None] | None
    ) -> None:
        self._module = module
        self._device = device
        self._event = event
        self._users = users

    def wait(self) -> None:
        """Order: communication -> what the current stream runs next."""
        stream = self._module.current_stream(self._device)
        stream.wait_event(self._event)
        if self._users is not None:
            self._users[stream] = None
