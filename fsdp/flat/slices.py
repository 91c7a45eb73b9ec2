"""What each rank has of a flat tensor, as views that are made when they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["RankSlices"]


class RankSlices(Sequence[torch.Tensor]):
    """``flat`` ``[ranks * n]`` cut into each rank's ``[n]``.

    A view takes about a kibibyte.  Most backends want this rank's alone, so a group of thousands costs what a small
    one does; where all are wanted, in every step, each is made once.

    Args:
        flat: The tensor.
        ranks: Into how many slices; divides its size.
    """

    __slots__ = ("_flat", "_made", "_numel", "_ranks")

    def __init__(self, flat: torch.Tensor, ranks: int) -> None:
        self._flat = flat
        self._ranks = ranks
        self._numel = flat.numel() // ranks
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, rank: Any) -> Any:
        """The slice of ``rank``, counted from 0."""
        made = self._made.get(rank)
        if made is None:
            if not 0 <= rank < self._ranks:
                raise IndexError(rank)
            # It outlives whatever runs now: no inference tensor, nothing in a graph.
            with torch.inference_mode(mode=False), torch.no_grad():
                start = rank * self._numel
                made = self._made[rank] = self._flat[start : start + self._numel]
        return made
