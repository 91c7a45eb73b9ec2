"""A group of one rank, so that world size 1 is ordinary code and not a special case."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .collectives import DONE, Gather, Reduce, Work

__all__ = ["Loopback"]


class Loopback:
    """Collectives of a group that holds this rank alone: a gather has nothing to fetch, a sum one summand."""

    rank = 0
    size = 1
    averages = False

    def name_for_messages(self, name: str) -> None:
        """Nothing can go wrong here.  Collective: none."""

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Nothing to fetch.  Collective: none."""
        return DONE

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Copy the only contribution out.  Collective: none."""
        for reduce in reduces:
            if reduce.out.data_ptr() != reduce.whole.data_ptr():
                reduce.out.copy_(reduce.whole)
        return DONE

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Leave the tensors as they are.  Collective: none."""
        return DONE

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Copy what this rank sends to itself.  Collective: none."""
        receives[0].copy_(sends[0])
        return DONE

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Leave the tensors as they are.  Collective: none."""
        return DONE
