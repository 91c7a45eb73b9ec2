"""Buffers that gradients are copied into before they are reduced, reused from unit to unit."""

from __future__ import annotations

import torch

from ..flat.layout import FlatLayout
from ..flat.slices import RankSlices
from ..flat.views import layout_views

__all__ = ["BufferPool", "GradBuffer"]

_SMALL_BYTES = 4 << 20


class GradBuffer:
    """An unsharded gradient ``[padded_numel]`` with one view a parameter and one slice a rank.

    Gaps between parameters are zero when the buffer is built and nothing of ours ever writes to them.
    """

    __slots__ = ("flat", "slices", "views")

    def __init__(self, flat: torch.Tensor, layout: FlatLayout) -> None:
        self.flat = flat
        self.views = layout_views(flat, layout)
        self.slices = RankSlices(flat, layout.world_size)
        self.clear_gaps(layout)

    def clear_gaps(self, layout: FlatLayout) -> None:
        """Zero what no parameter covers, so that padding never reaches a gradient or a norm."""
        for gap in layout.gaps:
            self.flat[gap.start : gap.stop].zero_()


class _Arena:
    """One allocation that serves buffers of any layout up to its size, one at a time."""

    __slots__ = ("_by_layout", "_last", "memory")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self._by_layout: dict[int, tuple[FlatLayout, GradBuffer]] = {}
        self._last: FlatLayout | None = None

    def buffer(self, layout: FlatLayout) -> GradBuffer:
        """The arena as a buffer of ``layout``."""
        known = self._by_layout.get(id(layout))
        if known is None:
            buffer = GradBuffer(self.memory[: layout.padded_numel], layout)
            # The layout is kept beside the buffer, so that its id cannot be taken by another one.
            self._by_layout[id(layout)] = (layout, buffer)
        else:
            buffer = known[1]
            if self._last is not layout:
                buffer.clear_gaps(layout)
        self._last = layout
        return buffer


_Place = tuple[torch.dtype, torch.device, int]


class BufferPool:
    """Arenas by dtype, device and size class; a steady step over equal units takes and gives back without allocating.

    A size class spans a factor of two.  Large arenas that one layout alone would use (the root's, say) are not kept:
    they would stand idle through the whole step.
    """

    def __init__(self) -> None:
        self._free: dict[_Place, list[_Arena]] = {}
        self._taken: dict[int, tuple[_Place, _Arena]] = {}
        self._layouts: dict[_Place, dict[int, int]] = {}

    def take(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> GradBuffer:
        """A buffer for ``layout``; give it back when nothing reads it any more."""
        numel = layout.padded_numel
        place = (dtype, device, numel.bit_length())
        layouts = self._layouts.setdefault(place, {})
        layouts[id(layout)] = numel
        free = self._free.setdefault(place, [])
        arena = free.pop() if free else None
        if arena is None or arena.memory.numel() < numel:
            arena = _Arena(max(layouts.values()), dtype, device)
        buffer = arena.buffer(layout)
        self._taken[id(buffer)] = (place, arena)
        return buffer

    def give_back(self, buffer: GradBuffer) -> None:
        """Return what :meth:`take` gave."""
        place, arena = self._taken.pop(id(buffer))
        if len(self._layouts[place]) > 1 or arena.memory.nbytes <= _SMALL_BYTES:
            self._free[place].append(arena)
