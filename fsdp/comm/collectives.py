"""The collectives that units need, as a protocol; every implementation starts work and hands back what to wait on.

Nothing else in the package talks to torch.distributed in a step, so a trace, a fake network or a quantised wire is
one class here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

__all__ = [
    "DONE",
    "Abandonable",
    "Collectives",
    "DirectSums",
    "Gather",
    "InPieces",
    "Pending",
    "Reduce",
    "Work",
    "abandon",
]


@runtime_checkable
class Work(Protocol):
    """Something started."""

    def wait(self) -> object:
        """Block the host (CPU) or the current stream (accelerators) until it has finished."""


@runtime_checkable
class Abandonable(Protocol):
    """Work that others would wait for, if it were neither waited on nor abandoned."""

    def abandon(self) -> None:
        """Nobody will wait on it.  Its buffers must stay alive all the same: peers may still use them."""


def abandon(work: Work) -> None:
    """Tell ``work`` that nobody will wait on it.  Collective: none."""
    if isinstance(work, Abandonable):
        work.abandon()


class _Done:
    """Work that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


DONE: Work = _Done()


@dataclass(slots=True)
class Pending:
    """Several pieces of work waited on as one, in order."""

    works: Sequence[Work]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()

    def abandon(self) -> None:
        """Abandon all of them."""
        for work in self.works:
            abandon(work)


@dataclass(frozen=True, slots=True)
class Gather:
    """One flat parameter to gather in place.

    Attributes:
        whole: ``[world_size * n]``; this rank's slice is filled already.
        slices: ``whole`` cut into each rank's ``[n]``.
    """

    whole: torch.Tensor
    slices: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reduce:
    """One flat gradient to sum over ranks and scatter.

    Attributes:
        whole: ``[world_size * n]`` this rank's contribution; its contents are undefined afterwards.
        slices: ``whole`` cut into each rank's ``[n]``.
        out: ``[n]``, no part of ``whole``; receives this rank's slice of the sum.
        mean: Whether it receives the mean instead; only where :attr:`Collectives.averages`.
    """

    whole: torch.Tensor
    slices: Sequence[torch.Tensor]
    out: torch.Tensor
    mean: bool = False


@dataclass(frozen=True, slots=True)
class InPieces:
    """One flat gradient to sum over ranks and scatter, which need not lie in one place.

    Attributes:
        pieces: For each rank, 1-D tensors that tile its slice ``[n]`` in order, in any dtypes; there may be expanded
            zeros among them.
        out: ``[n]``; receives this rank's slice of the sum, in its own dtype.
    """

    pieces: Sequence[Sequence[torch.Tensor]]
    out: torch.Tensor


@runtime_checkable
class DirectSums(Protocol):
    """Collectives that can sum gradients from where they lie (see Note [Direct sums])."""

    def sums_directly(self) -> bool:
        """Whether they do: the same answer on all ranks.

        Collective: every rank of the group, the first time.
        """

    def sum_directly(self, sums: Sequence[InPieces]) -> None:
        """Sum, and return when that is done.  Collective: every rank of the group, in the same order."""


class Collectives(Protocol):
    """Communication among the ranks of one group.

    Every method is collective: all ranks of the group call it in the same order with equal sizes.  It returns once
    the work is started; buffers must stay alive and untouched until the returned work has been waited on.
    """

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def averages(self) -> bool:
        """Whether :meth:`reduce_scatter` can make the mean at no price."""

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Fill every other rank's slice of each ``whole``, all in one launch."""

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Sum each ``whole`` over ranks and leave this rank's slice in ``out``, all in one launch."""

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Combine each tensor over ranks in place; ``op`` is ``"sum"``, ``"max"`` or ``"min"``."""

    def name_for_messages(self, name: str) -> None:
        """Set the name of the unit that communicates, which errors tell.  Collective: none."""

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Copy each tensor from rank ``source`` of the group to every rank, in place."""

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Send ``sends[r]`` to each rank r and fill ``receives[r]`` with what r sends to this one (1-D, uint8).

        Sizes may differ and be zero; what one rank sends has the size the other receives.
        """
