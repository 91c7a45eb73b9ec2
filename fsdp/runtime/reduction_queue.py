"""When reductions start and how many of them are under way.

Note [Bursts]
    Small units are gathered together and reduced together, each by collective calls of its own.  Between two units the
    model's own work pushes ours out of the processor's caches, and one unit of 13 KiB after the other takes 20 to 40 us
    more than all in a row (``docs/explanation/performance.md``).
    A unit whose gradients have arrived is *due* until those that are due come to 256 KiB, or the backward ends, or
    reaches the unit again.  Its parameters are free meanwhile and its gradients lie on the leaves; what a backward ends
    with is short, and small messages travel no faster one by one.
    Not on an accelerator: its reductions wait for the stream that is current when a unit's last gradient arrives, which
    may be another one for each unit.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .reduction import Reduction

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["ReductionQueue"]

_SMALL_BYTES = 4 << 20  # what may be under way together beyond the one that always may be
# By whether the host runs the computation itself:
_IN_FLIGHT = {True: 1, False: 2}
_BURST_BYTES = {True: 256 << 10, False: 0}


class ReductionQueue:
    """The reductions of one model, in the order in which its units' gradients arrive, which is every rank's."""

    __slots__ = ("_abandoned", "_due", "_due_bytes", "_in_flight", "_in_flight_bytes")

    def __init__(self) -> None:
        self._due: list[Unit] = []
        self._due_bytes = 0
        # Each with the bytes that its end lets go.
        self._in_flight: deque[tuple[Reduction, int]] = deque()
        self._in_flight_bytes = 0
        self._abandoned: list[Reduction] = []

    def add(self, unit: Unit) -> None:
        """Reduce the gradients of ``unit``, now or with those that come next (see Note [Bursts])."""
        self._due.append(unit)
        self._due_bytes += unit.gradient_bytes
        if self._due_bytes > _BURST_BYTES[unit.root.streams.host_synchronous]:
            self.start_due()

    def start_due(self) -> None:
        """Start what waits for more to come."""
        due, self._due, self._due_bytes = self._due, [], 0
        for unit in due:
            self.start(unit)

    def start(self, unit: Unit) -> None:
        """Reduce ``unit``'s gradients; wait for the oldest reduction first if too many are in flight."""
        limit = _IN_FLIGHT[unit.root.streams.host_synchronous]
        # Where the buffer stays as the gradient, and is not stepped at once, nothing is let go.
        stays = unit.shard.size == 1 and unit.on_gradients is None
        nbytes = 0 if stays else unit.gradient_bytes
        while len(self._in_flight) >= limit and self._in_flight_bytes + nbytes > _SMALL_BYTES:
            if len(self._in_flight) == 1 and self._in_flight[0][0].advance():
                break  # its sum over the replicas runs beside this one over the shard axis
            self._wait_for_oldest()
        reduction = unit.new_reduction(unit)
        if reduction.at_once:
            reduction.wait()
            return
        self._in_flight_bytes += nbytes
        self._in_flight.append((reduction, nbytes))

    def finish(self) -> None:
        """Start what is due, and wait for everything."""
        self.start_due()
        while self._in_flight:
            self._wait_for_oldest()

    def abandon(self) -> None:
        """A step has failed half way.  Collective: none; other ranks go on without this one's parts."""
        self._due, self._due_bytes = [], 0
        for reduction, _ in self._in_flight:
            reduction.abandon()
            # Peers may still read from its buffers, so they are kept, not freed.
            self._abandoned.append(reduction)
        self._in_flight.clear()
        self._in_flight_bytes = 0

    def _wait_for_oldest(self) -> None:
        oldest, nbytes = self._in_flight.popleft()
        self._in_flight_bytes -= nbytes
        oldest.wait()
