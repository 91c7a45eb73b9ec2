"""The order units ran in, and which one to gather next.

Pure: units are small integers.  A wrong guess costs time, never correctness: the unit that needs a parameter gathers
it whether or not somebody foresaw it.
"""

from __future__ import annotations

__all__ = ["ExecutionOrder"]


class ExecutionOrder:
    """What ran first in this iteration and in the last one.

    Attributes:
        forward: Units of the current iteration in the order their forwards began, each once.
        finished: The same in the order their forwards ended, which a backward walks from its end.
        last_forward: ``forward`` of the last complete iteration.

    Example:
        >>> order = ExecutionOrder()
        >>> for unit in (0, 1, 2):
        ...     passed = order.begin(unit)
        ...     order.finish(unit)
        >>> order.before(2), order.before(0)
        (1, None)
        >>> order.start_iteration()
        >>> order.after(0)
        1
        >>> order.foresee(1)
        >>> order.begin(2)
        [1]
    """

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.finished: list[int] = []
        self.last_forward: list[int] = []
        self._begun: set[int] = set()
        self._foreseen: list[int] = []
        self._finish_index: dict[int, int] = {}
        self._next_of: dict[int, int] = {}

    def start_iteration(self) -> None:
        """Close the current iteration; its order becomes the prediction for the next one."""
        if self.forward != self.last_forward:
            self.last_forward = self.forward
            self._next_of = dict(zip(self.forward, self.forward[1:], strict=False))
        self.forward = []
        self.finished = []
        self._begun.clear()
        self._foreseen = []
        self._finish_index = {}

    def foresee(self, unit: int) -> None:
        """The gather of ``unit`` has been started ahead of its forward."""
        self._foreseen.append(unit)

    def begin(self, unit: int) -> list[int]:
        """The forward of ``unit`` begins (only its first in an iteration counts).

        Returns:
            The units that were foreseen before it and have been passed over, so that their parameters need not wait
            until the end of the forward.
        """
        if unit in self._begun:
            return []
        self._begun.add(unit)
        self.forward.append(unit)
        foreseen = self._foreseen
        reached = foreseen.index(unit) if unit in foreseen else len(foreseen)
        self._foreseen = foreseen[reached + 1 :]
        return foreseen[:reached]

    def finish(self, unit: int) -> None:
        """The forward of ``unit`` has ended."""
        if unit not in self._finish_index:
            self._finish_index[unit] = len(self.finished)
            self.finished.append(unit)

    def after(self, unit: int) -> int | None:
        """The unit whose forward followed ``unit``'s in the last iteration, if any."""
        return self._next_of.get(unit)

    def before(self, unit: int) -> int | None:
        """The unit whose backward should follow ``unit``'s: the one that finished before it, if any."""
        index = self._finish_index.get(unit, 0)
        return self.finished[index - 1] if index > 0 else None
