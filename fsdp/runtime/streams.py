"""Where communication runs: on streams of its own on accelerators, as asynchronous work on the CPU.

Note [Stream order]
    Three streams take part on an accelerator: compute (the user's current stream), gather and reduce; where shards are
    replicated, also replicate.  docs/explanation/streams.md has every buffer and hazard, and how the order is proven.

    ======================================  ===========================  =============================================
    what must come first                    what waits                   without it
    ======================================  ===========================  =============================================
    optimizer step (compute)                gather of the next forward   a gather would read half-updated shards
    last use of a unit (compute), recorded  the gather stream, before    the allocator may hand the freed storage to the
    when it is resharded                    the storage is freed         next gather while compute still reads it
    gather                                  compute, at first use        compute would read unfilled parameters
    user's write into a shard (compute)     gather, if it is noticed in  a gather would read the old values
                                            the middle of a forward
    copy into the reduce buffer (compute)   reduce                       the reduce would send half-filled gradients
    reduce                                  replicate                    unfinished sums would be summed over replicas
    reduce, replicate, scale, publish       compute, end of backward     the optimizer would read unfinished gradients
    reduce                                  every stream that computed   a later copy would overwrite gradients that are
                                            in this step, before the     still being sent
                                            buffer is filled again
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

    Gathered storages are allocated and freed in the gather stream's pool only, reduce buffers and gradients in the
    compute stream's only, so no tensor needs ``record_stream``, and memory comes back in program order.  The second
    row also bounds gathers in flight on the device, without blocking the host.

Note [One set of streams]
    All models of a process share the streams of a device.  torch hands out 32 streams of a priority in turn, so with
    streams of their own the gathers of one model might run where the reductions of another do, and take memory from
    one pool that only the other knows to be in use.

Note [Captured steps]
    A step may be captured in a CUDA graph.  What is captured may wait for nothing that is not, nor the other way round,
    so streams that computed before the capture began, with the device idle, or before it ended are not waited for.
    A capture ends with every stream joined that it has reached; the gather stream is, at the end of each forward and
    backward.  A graph goes on using the memory it was captured with, so buffers are the graph's own: ``start_step``
    says when others are due.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..comm.collectives import Work, abandon
from ..errors import UnsupportedError, describe

__all__ = [
    "DeviceStreams",
    "HostStreams",
    "InTwo",
    "Lanes",
    "Streams",
    "capturing",
    "streams_for",
]


class Streams(Protocol):
    """Runs gathers and reduces beside the computation (see Note [Stream order])."""

    host_synchronous: bool

    def start_step(self) -> bool:
        """A forward begins: let gathers see what compute has written into shards so far (the optimizer step).

        Returns:
            Whether a captured graph has begun or ended since the last one (see Note [Captured steps]).
        """

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

    def start_step(self) -> bool:
        """Nothing to order, and nothing captured."""
        return False

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


class Lanes(NamedTuple):
    """The streams of one device beside compute (see Note [One set of streams]).

    Attributes:
        module: What has the device's streams: ``torch.cuda`` or the like.
        gather: Gathers run on it.
        reduce: Reductions.
        replicate: Sums over replicas.
    """

    module: Any
    gather: Any
    reduce: Any
    replicate: Any

    @classmethod
    def made_by(cls, module: Any, device: torch.device) -> Lanes:
        """New ones."""
        gather, reduce, replicate = (module.Stream(device=device, priority=-1) for _ in range(3))
        return cls(module, gather, reduce, replicate)


@functools.cache
def _lanes_of(device: torch.device) -> Lanes:
    """Those of all models on ``device``."""
    return Lanes.made_by(torch.get_device_module(device), device)


class DeviceStreams:
    """An accelerator with streams and events.

    Args:
        device: Which one.
        lanes: Its streams, if not those of all models there.
    """

    host_synchronous = False

    def __init__(self, device: torch.device, lanes: Lanes | None = None) -> None:
        self._device = device
        self._module, self._gather, self._reduce, self._replicate = lanes or _lanes_of(device)
        self._users: dict[Any, None] = {}  # streams that have computed in this step
        self._captured = False  # whether this step was being captured when it began

    def start_step(self) -> bool:
        """Gathers of this forward come after all that the current stream has been given."""
        before, self._captured = self._captured, capturing(self._module)
        self._users.clear()
        self.shards_written()
        return before is not self._captured

    def shards_written(self) -> None:
        """The gather stream waits for the compute stream."""
        # Order: optimizer step (compute) -> gather.  Without it shards are read while they are updated.
        self._gather.wait_stream(self._current())

    def run_gather(self, launch: Callable[[], Work]) -> Work:
        """Launch on the gather stream; the result is an event."""
        with self._module.stream(self._gather):
            launch().wait()
            return _Gathered(self, self._recorded(self._gather))

    def run_reduce(
        self, launch: Callable[[], Work], finish: Callable[[], None], *, apart: bool = False
    ) -> Work:
        """Launch on the reduce stream, finish there or on one of its own; the result is an event."""
        current = self._current()
        self._users[current] = None
        # Order: copy into the reduce buffer (compute) -> reduce.  Without it unfinished gradients are sent.
        self._reduce.wait_stream(current)
        with self._module.stream(self._reduce):
            launch().wait()
        last = self._after_reduce() if apart else self._reduce
        with self._module.stream(last):
            finish()
        return _Reduced(self, self._recorded(last))

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

    def released(self) -> None:
        """The gather stream waits for all that have computed: the current one may not be where that was.

        At once and not when it gathers again: an allocator may follow the stream's own order when it takes memory back
        (``cudaMallocAsync`` does), and other code may have been handed the same stream.
        """
        for stream in self._computing():
            # Order: last use of freed storage (compute) -> gather.  Without it live parameters are overwritten.
            self._gather.wait_event(self._recorded(stream))

    def end_step(self) -> None:
        """A capture has to join the gather stream; nothing to order otherwise."""
        if capturing(self._module):
            self._current().wait_stream(self._gather)

    def use_after(self, gather: Any) -> None:
        """The current stream waits for a ``gather`` (an event), and takes part in the step from now on."""
        stream = self._current()
        # Order: gather -> use of the parameters (compute).  Without it unfilled memory is read.
        stream.wait_event(gather)
        self._users[stream] = None

    def reuse_after(self, reduction: Any) -> None:
        """All streams that have computed in this step wait for a ``reduction`` (an event).

        Any of them may own the memory that was sent: it goes back to the pool that it came from, and a buffer of ours
        to whichever unit is next.
        """
        for stream in self._computing():
            # Order: reduction -> whatever fills its memory again.  Without it gradients change while they are sent.
            stream.wait_event(reduction)

    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def _computing(self) -> Iterable[Any]:
        """The current stream and those that have computed in this step, unless a capture has begun or ended since."""
        current = self._current()
        if self._users.keys() <= {current} or capturing(self._module) is not self._captured:
            return (current,)
        return {**self._users, current: None}

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


class HostReadingStreams(DeviceStreams):
    """An accelerator whose gathers begin with a copy from the host."""

    def start_step(self) -> bool:
        """As on any accelerator.

        Raises:
            UnsupportedError: While a graph is captured, which would read the host's memory of now for ever.
        """
        if capturing(self._module):
            raise UnsupportedError(
                describe(
                    "a step with offloaded parameters was captured in a graph, which can not wait for the host",
                    remedy="Run offloaded steps uncaptured, or wrap without cpu_offload.",
                )
            )
        return super().start_step()

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


@dataclass(slots=True)
class _Gathered:
    """A gather whose end is an event; waiting makes the current stream wait, never the host."""

    streams: DeviceStreams
    event: Any

    def wait(self) -> None:
        """Order: gather -> what the current stream runs next."""
        self.streams.use_after(self.event)


@dataclass(slots=True)
class _Reduced:
    """A reduction whose end is an event; waiting makes streams wait, never the host."""

    streams: DeviceStreams
    event: Any

    def wait(self) -> None:
        """Order: reduction -> what computes next."""
        self.streams.reuse_after(self.event)
