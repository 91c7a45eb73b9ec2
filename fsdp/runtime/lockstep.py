"""The same collectives in the same order on every rank, whatever part of the model each rank runs.

Ordinarily a unit communicates when it is used, so ranks must use the same units in the same order.  In lockstep they
need not: what a rank does not use it gathers and reduces all the same, at a place in a fixed order.

::

    forward    a unit that is used gathers, after all units before it in ``Root.units``;
               the forward's end gathers the rest
    backward   its beginning gathers what is not whole;
               units reduce from the last to the first, each when all after it have;
               its end reduces the rest, with zeros where this rank computed nothing, and frees everything

No rank waits for an exchange before it has launched all those that precede it, so nobody can wait in a circle.  The
price: parameters stay whole from a unit's first use to the end of the backward, as under ``SHARD_GRAD_OP``, and one
unused unit delays the reductions after it to the end.

It serves ``allow_unused="any_rank"``, where ranks take different branches, and ``Join``, where a rank without data
takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import UsageError, describe
from .residency import ResidentUnit
from .unit import Unit

__all__ = ["Lockstep"]


class Lockstep:
    """Where this rank stands in the fixed order.

    Attributes:
        on: Whether units follow the fixed order.
        always: Whether they do so outside ``Join`` as well.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.on = self.always = any(unit.config.any_rank for unit in units)
        self._units = units
        self._whole = 0
        self._to_reduce = 0
        self._arrived: set[Unit] = set()

    def gather_before(self, unit: ResidentUnit) -> None:
        """Start every gather that precedes ``unit``'s.

        Collective: every rank of their shard groups.
        """
        while self._whole < unit.index:
            self._whole += 1
            self._units[self._whole - 1].start_unshard()

    def gather_all(self) -> None:
        """Start every gather that has not begun.

        Collective: every rank of every shard group.
        """
        for unit in self._units[self._whole :]:
            unit.start_unshard()
        self._whole = len(self._units)

    def start_over(self) -> None:
        """Everything has been freed.  Collective: none."""
        self._whole = 0

    def begin_backward(self) -> None:
        """Gather for a backward, and expect a reduction of every unit."""
        self._to_reduce = len(self._units)
        self._arrived.clear()
        self.gather_all()

    def reduce(self, unit: Unit, start: Callable[[Unit], None]) -> None:
        """The gradients of ``unit`` have arrived: ``start`` the reductions whose turn it is.

        Collective: every rank of those units' groups.

        Raises:
            UsageError: If its turn is over, because one backward brought its gradients several times.
        """
        if unit.index >= self._to_reduce:
            raise UsageError(
                describe(
                    "a backward brought gradients of one unit twice, through several reentrant checkpoints, while "
                    "ranks may use different units",
                    unit=unit.name,
                    remedy="Checkpoint with use_reentrant=False.",
                ),
                unit=unit.name,
            )
        self._arrived.add(unit)
        while self._to_reduce:
            following = self._units[self._to_reduce - 1]
            if following.trains and following.sync_gradients and following not in self._arrived:
                return
            self._to_reduce -= 1
            if following in self._arrived:
                start(following)

    def reduce_rest(self, start: Callable[[Unit], None]) -> None:
        """The backward has ended: ``start`` the reductions that this rank has nothing to give to.

        Collective: every rank of those units' groups.
        """
        for unit in reversed(self._units[: self._to_reduce]):
            if unit.trains and unit.sync_gradients:
                start(unit)
        self._to_reduce = 0
