"""A trace of collectives, for tests and ``explain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .collectives import Collectives, Gather, Reduce, Work

__all__ = ["Event", "Recording"]


@dataclass(frozen=True, slots=True)
class Event:
    """One launch.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"broadcast"`` or ``"exchange"``.
        unit: Name of the unit it was launched for.
        numels: Unsharded element count of each tensor in the launch.
        dtypes: Their dtypes, without the ``torch.`` prefix.
    """

    op: str
    unit: str
    numels: tuple[int, ...]
    dtypes: tuple[str, ...]


class Recording:
    """Collectives that write down each launch in ``events`` and pass it on to ``inner``.

    Launches in a group of one rank move nothing and are left out.
    """

    def __init__(self, inner: Collectives, unit: str, events: list[Event]) -> None:
        self.inner = inner
        self._unit = unit
        self._events = events

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.inner.size

    @property
    def averages(self) -> bool:
        """As ``inner``.  Collective: none."""
        return self.inner.averages

    def name_for_messages(self, name: str) -> None:
        """Pass it on.  Collective: none."""
        self.inner.name_for_messages(name)

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Record and pass on.  Collective: as ``inner``."""
        self._record("all_gather", [gather.whole for gather in gathers])
        return self.inner.all_gather(gathers)

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Record and pass on.  Collective: as ``inner``."""
        self._record("reduce_scatter", [reduce.whole for reduce in reduces])
        return self.inner.reduce_scatter(reduces)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Record and pass on.  Collective: as ``inner``."""
        self._record("all_reduce", tensors)
        return self.inner.all_reduce(tensors, op=op)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Record and pass on.  Collective: as ``inner``."""
        self._record("broadcast", tensors)
        return self.inner.broadcast(tensors, source)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Record and pass on.  Collective: as ``inner``."""
        self._record("exchange", sends)
        return self.inner.exchange(sends, receives)

    def _record(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        if self.size == 1:
            return
        self._events.append(
            Event(
                op,
                self._unit,
                tuple(tensor.numel() for tensor in tensors),
                tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            )
        )
