"""The state that all units below one outermost unit share, and what happens around a whole forward or backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .. import _torch
from ..config import BackwardPrefetch, TrainingState
from ..errors import TrainingStateError, describe
from ..names import join_names
from ..schedule.order import ExecutionOrder
from . import precision
from .buffers import BufferPool
from .reduction import Reduction
from .streams import Streams, streams_for
from .unit import Residency, Unit

__all__ = ["Root"]

_REDUCTIONS_IN_FLIGHT = {True: 1, False: 2}  # by whether the host runs the computation itself


class Root:
    """Runtime of a tree of units.

    Built by the outermost wrapper's constructor, complete; a wrapper that is later put around it builds a new one
    over all units.

    Attributes:
        units: Every unit, the outermost first, in the order of the module walk.
        order: What ran when, for prefetching.
        streams: Where communication runs.
        pool: Buffers for gradients.
        stack: Units whose forward is running, outermost first.
        backward_running: Whether a backward has reached one of the units and not ended yet.
        started: Whether any forward has run.
        open_saves: How to close each unit that is being saved; those inside one another were entered together.
        entered_with_grad: Whether the running forward was entered with gradients enabled.
    """

    def __init__(self, units: Sequence[Unit], names: Sequence[str]) -> None:
        self.units = tuple(units)
        self.order = ExecutionOrder()
        self.streams: Streams = streams_for(units[0].config.device)
        self.pool = BufferPool()
        self.stack: list[Unit] = []
        self.backward_running = False
        self.started = False
        self.entered_with_grad = False
        self.open_saves: list[Callable[[], None]] = []
        self._in_flight: deque[Reduction] = deque()
        for index, (unit, name) in enumerate(zip(units, names, strict=True)):
            unit.root = self
            unit.index = index
            unit.name = name
            for handle in unit.handles:
                handle.name_with(partial(join_names, name))

    @property
    def training_state(self) -> TrainingState:
        """What is going on."""
        if self.stack or self.backward_running:
            return TrainingState.FORWARD_BACKWARD
        if any(unit.summoned for unit in self.units):
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE

    def check_idle(self, action: str) -> None:
        """Raise unless no forward or backward is running.

        Raises:
            TrainingStateError: Naming ``action`` and the unit that is running.
        """
        if self.backward_running and not _torch.in_backward():
            self.reset()  # an earlier backward failed
        if self.stack or self.backward_running:
            running = self.stack[-1].name if self.stack else None
            raise TrainingStateError(
                describe(
                    f"Cannot manually unshard parameters during forward/backward: {action} was called inside one",
                    unit=running,
                    remedy="Call it between steps.",
                ),
                unit=running,
            )

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self, entry: Unit) -> None:
        """The first unit of a forward is entered: nothing gathered earlier may be used again."""
        if not self.started:
            self.started = True
            with torch.inference_mode(mode=False):
                for unit in self.units:
                    precision.cast_buffers(unit)
        if _torch.in_backward():
            return
        if self.backward_running:
            self.reset()
        for close in reversed(self.open_saves):
            close()  # a state_dict() failed half way
        self.entered_with_grad = torch.is_grad_enabled()
        for unit in self.units:
            unit.reshard()
        if entry.index == 0:
            self.order.start_iteration()
        self.streams.start_step()

    def end_forward(self) -> None:
        """The last unit of a forward is left: free what was gathered ahead and not used."""
        if not _torch.in_backward():
            for unit in self.units:
                if unit.residency is Residency.GATHERING:
                    unit.reshard()

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether ``unit`` is freed between its forward and its backward; the outermost would be wanted at once."""
        is_outermost = unit.index == 0 and not self.stack
        return unit.config.reshard_after_forward and not (is_outermost and unit.module.training)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start gathering what followed ``unit`` last time.

        An accelerator's host runs ahead and does so by itself, unless it is slow; the CPU never does.
        """
        if unit.config.forward_prefetch or self.streams.host_synchronous:
            following = self.order.after(unit.index)
            if following is not None:
                ahead = self.units[following]
                if ahead.residency is Residency.SHARDED and not ahead.summoned:
                    ahead.follow_user_changes()
                    ahead.start_unshard()

    # -- backward --------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first unit of a backward is reached."""
        self.backward_running = True
        _torch.queue_end_of_backward(self.end_backward)

    def prefetch_backward(self, unit: Unit, moment: BackwardPrefetch) -> None:
        """Start gathering what finished its forward before ``unit``, if this is the configured moment."""
        if unit.config.backward_prefetch is moment:
            preceding = self.order.before(unit.index)
            if preceding is not None:
                self.units[preceding].start_unshard()

    def start_reduction(self, unit: Unit) -> None:
        """Reduce ``unit``'s gradients; wait for the oldest reduction first if too many are in flight."""
        limit = _REDUCTIONS_IN_FLIGHT[self.streams.host_synchronous]
        while len(self._in_flight) >= limit:
            self._in_flight.popleft().wait()
        self._in_flight.append(Reduction(unit))

    def end_backward(self) -> None:
        """Every gradient of a backward has arrived: reduce what is left, publish, free.

        Units of which only some parameters got gradients, or none now but some inside an earlier ``no_sync``, are
        finished here, last unit first on every rank.
        """
        for unit in reversed(self.units):
            if unit.partly_arrived or (unit.accumulating and unit.sync_gradients):
                unit.finish_backward()
        self._wait_for_reductions()
        for unit in self.units:
            unit.reshard()
        self.backward_running = False

    def _wait_for_reductions(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()

    # -- recovery --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget a step that failed half way; published gradients stay.  Collective: none."""
        self.stack.clear()
        self._in_flight.clear()
        self.pool = BufferPool()
        self.backward_running = False
        for unit in self.units:
            unit.reset()
