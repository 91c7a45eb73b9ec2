"""Parameters on their way from the ranks that stepped them to all others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..comm.collectives import DONE, Pending, Work
from .exchange import Wire, make_wire
from .ownership import Ownership, Regions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["HandingOut"]

_logger = logging.getLogger(__name__)


class HandingOut:
    """What travels after a step, over which wires, and what is still under way.

    Only *active* parameters travel: trainable ones, and frozen ones that still have a gradient.  Nothing else can
    have changed in a step.

    Args:
        group: The optimizer's process group.
        ownership: Who owns what.
        warns_of_rebuilds: Whether to log when parameters become active or inactive, because packed tensors are then
            rebuilt.
    """

    def __init__(
        self, group: ProcessGroup, ownership: Ownership, *, warns_of_rebuilds: bool
    ) -> None:
        self._group = group
        self._ownership = ownership
        self._warns_of_rebuilds = warns_of_rebuilds
        self._wires: dict[torch.device, Wire] = {}
        self._active: frozenset[torch.Tensor] = frozenset()
        self._regions: Regions = []
        self._in_flight: Sequence[Work] = ()
        self._start_instead: Callable[[Sequence[torch.Tensor]], None] | None = None

    def plan(self, params: Sequence[torch.Tensor]) -> None:
        """Find out anew which of ``params``, all there are, travel after a step.  Collective: none."""
        self._active = _active_among(params)
        self._ownership.set_inactive(frozenset(params) - self._active)
        self._regions = self._ownership.regions(self._active_of(params))

    def run(self, params: Sequence[torch.Tensor]) -> None:
        """Bring ``params``, all there are, up to date on all ranks after a step.

        Collective: every rank of the group.
        """
        if _active_among(params) != self._active:
            if self._warns_of_rebuilds:
                _logger.warning("The trainable parameters changed: rebuilding parameter buckets.")
            self.plan(params)
        if self._start_instead is None:
            self.start(self._regions).wait()
        else:
            self._start_instead(self._active_of(params))

    def start(self, regions: Regions, tag: int = 0) -> Work:
        """Start to hand out the memory of some parameters (see ``Ownership.regions``).

        Collective: every rank of the group.
        """
        if self._group.size() == 1:
            return DONE
        return Pending([self.wire(device).hand_out(by_rank, tag) for device, by_rank in regions])

    def wire(self, device: torch.device) -> Wire:
        """Communication for tensors on ``device``.  Collective: none."""
        wire = self._wires.get(device)
        if wire is None:
            wire = self._wires[device] = make_wire(self._group, device)
        return wire

    def start_by(self, start: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Let ``start`` hand out parameters after a step, in place of waiting for them.  Collective: none."""
        self._start_instead = start

    def leave_in_flight(self, works: Sequence[Work]) -> None:
        """Let parameters arrive later; the next step, save or load waits for them.  Collective: none."""
        self._in_flight = works

    def wait(self) -> None:
        """Wait until parameters that were left in flight have arrived.  Collective: none."""
        works, self._in_flight = self._in_flight, ()
        for work in works:
            work.wait()

    def _active_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [param for param in params if param in self._active]


def _active_among(params: Sequence[torch.Tensor]) -> frozenset[torch.Tensor]:
    return frozenset(param for param in params if param.requires_grad or param.grad is not None)
