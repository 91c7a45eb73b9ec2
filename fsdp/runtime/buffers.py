"""Buffers that gradients are copied into before they are reduced, reused from unit to unit."""

from __future__ import annotations

import torch

from ..flat.layout import FlatLayout, Span
from ..flat.slices import RankSlices
from ..flat.views import layout_views

__all__ = ["BufferPool", "GradBuffer", "RankCut"]

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
    """Memory that serves buffers of any layout, one at a time; it comes and goes, their views stay."""

    __slots__ = ("_by_layout", "_dtype", "_last", "_storage")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self._by_layout: dict[int, tuple[FlatLayout, GradBuffer]] = {}
        self._last: FlatLayout | None = None

    def buffer(self, layout: FlatLayout) -> GradBuffer:
        """The arena as a buffer of ``layout``, with more memory if it has too little."""
        nbytes = layout.padded_numel * self._dtype.itemsize
        if self._storage.nbytes() < nbytes:
            self.free()
            self._storage.resize_(nbytes)
        known = self._by_layout.get(id(layout))
        if known is None:
            flat = torch.empty(0, dtype=self._dtype, device=self._storage.device)
            buffer = GradBuffer(flat.set_(self._storage, 0, (layout.padded_numel,), (1,)), layout)
            # The layout is kept beside the buffer, so that its id cannot be taken by another one.
            self._by_layout[id(layout)] = (layout, buffer)
        else:
            buffer = known[1]
            if self._last is not layout:
                buffer.clear_gaps(layout)
        self._last = layout
        return buffer

    def free(self) -> None:
        """Let the memory go."""
        self._storage.resize_(0)
        self._last = None


RankCut = tuple[tuple[int | None, int, int], ...]
"""A rank's slice, stretch by stretch: of which slot (None: of none), and from where to where in it."""


class _SizeClass:
    """Arenas of one dtype and device, and of sizes within a factor of two of one another.

    Attributes:
        free: Those that nobody has taken.
        is_large: Whether they have memory only while units of this class follow one another.
    """

    __slots__ = ("free", "is_large")

    def __init__(self, dtype: torch.dtype, bits: int) -> None:
        self.free: list[_Arena] = []
        self.is_large = dtype.itemsize << bits > _SMALL_BYTES


class BufferPool:
    """Arenas by size class; a steady step over equal units takes and gives back without allocating.

    Large ones have memory for as long as units of their class follow one another: that of a head would stand idle
    beside the backward of the blocks, and that of the blocks beside the optimizer.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[torch.dtype, torch.device, int], _SizeClass] = {}
        self._taken: dict[int, tuple[_SizeClass, _Arena]] = {}
        self._large: _SizeClass | None = None  # the class of large buffers that was last asked for
        self._cuts: dict[int, tuple[FlatLayout, tuple[RankCut, ...]]] = {}

    def cuts(self, layout: FlatLayout) -> tuple[RankCut, ...]:
        """What each rank's slice of ``layout`` is made of."""
        known = self._cuts.get(id(layout))
        if known is None:
            cuts = tuple(_rank_cut(layout, rank) for rank in range(layout.world_size))
            # The layout is kept beside them, so that its id cannot be taken by another one.
            known = self._cuts[id(layout)] = (layout, cuts)
        return known[1]

    def take(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> GradBuffer:
        """A buffer for ``layout``; give it back when nothing reads it any more."""
        bits = layout.padded_numel.bit_length()
        size = self._classes.get((dtype, device, bits))
        if size is None:
            size = self._classes[dtype, device, bits] = _SizeClass(dtype, bits)
        if size.is_large and size is not self._large:
            self.free_large()
            self._large = size
        arena = size.free.pop() if size.free else _Arena(dtype, device)
        buffer = arena.buffer(layout)
        self._taken[id(buffer)] = (size, arena)
        return buffer

    def give_back(self, buffer: GradBuffer) -> None:
        """Return what :meth:`take` gave."""
        size, arena = self._taken.pop(id(buffer))
        if size.is_large and size is not self._large:
            arena.free()
        size.free.append(arena)

    def free_large(self) -> None:
        """Let the memory of large arenas go that nobody has taken."""
        for arena in self._large.free if self._large is not None else ():
            arena.free()
        self._large = None


def _rank_cut(layout: FlatLayout, rank: int) -> RankCut:
    stretches = [(slot.span, index) for index, slot in enumerate(layout.slots)]
    tiles: list[tuple[Span, int | None]] = [*stretches, *((gap, None) for gap in layout.gaps)]
    tiles.sort(key=lambda tile: tile[0].start)
    cut: list[tuple[int | None, int, int]] = []
    for span, slot in tiles:
        held = span.clip(layout.owned(rank))
        if held.numel:
            cut.append((slot, held.start - span.start, held.stop - span.start))
    return tuple(cut)
