"""Buffers that gradients are copied into before they are reduced, reused from unit to unit."""

from __future__ import annotations

import torch

from ..flat.layout import FlatLayout
from ..flat.views import layout_views

__all__ = ["BufferPool", "GradBuffer"]


class GradBuffer:
    """An unsharded gradient ``[padded_numel]`` with one view a parameter and one slice a rank.

    Gaps between parameters are zero when the buffer is built and nothing of ours ever writes to them.
    """

    __slots__ = ("flat", "slices", "views")

    def __init__(self, flat: torch.Tensor, layout: FlatLayout) -> None:
        self.flat = flat
        self.views = layout_views(flat, layout)
        owned = [layout.owned(rank) for rank in range(layout.world_size)]
        self.slices = [flat[span.start : span.stop] for span in owned]
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


class BufferPool:
    """Arenas by dtype and device; a steady step takes and gives back without allocating."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[_Arena]] = {}
        self._taken: dict[int, tuple[tuple[torch.dtype, torch.device], _Arena]] = {}
        self._largest: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> GradBuffer:
        """A buffer for ``layout``; give it back when nothing reads it any more."""
        key = (dtype, device)
        largest = max(self._largest.get(key, 0), layout.padded_numel)
        self._largest[key] = largest
        free = self._free.setdefault(key, [])
        arena = free.pop() if free else None
        if arena is None or arena.memory.numel() < layout.padded_numel:
            arena = _Arena(largest, dtype, device)
        buffer = arena.buffer(layout)
        self._taken[id(buffer)] = (key, arena)
        return buffer

    def give_back(self, buffer: GradBuffer) -> None:
        """Return what :meth:`take` gave."""
        key, arena = self._taken.pop(id(buffer))
        self._free[key].append(arena)

    def clear(self) -> None:
        """Drop the free arenas."""
        self._free.clear()
