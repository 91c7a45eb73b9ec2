"""Spans of a tensor's elements as boxes of it, and back.

A rank holds a span of each parameter; a checkpoint stores boxes.  Elements are counted in row-major order: a span of a
tensor of ``d`` dimensions is at most ``2 d - 1`` boxes, each of them one run of elements.  Pure: integers only.

Example: elements 1 to 7 of a tensor ``[4, 3]``::

    . a a        a    offsets (0, 1)  sizes (1, 2)
    b b b        b    offsets (1, 0)  sizes (1, 3)
    c c .        c    offsets (2, 0)  sizes (1, 2)
    . . .
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..flat.layout import Span

__all__ = ["Box", "boxes_of", "run_of"]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins and how long it is, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], span: Span) -> tuple[Box, ...]:
    """The boxes that ``span`` of a tensor of ``shape`` consists of, in order; none if it is empty.

    Example:
        >>> boxes_of((4, 3), Span(3, 7))
        (Box(offsets=(1, 0), sizes=(1, 3)), Box(offsets=(2, 0), sizes=(1, 1)))
    """
    if not span.numel:
        return ()
    if not shape:
        return (Box((), ()),)
    row = math.prod(shape[1:])
    first, last = -(-span.start // row), span.stop // row  # the whole rows, if there are any
    if first > last:
        return _within_row(last, shape, span)
    head, tail = Span(span.start, first * row), Span(last * row, span.stop)
    rows = Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    return (
        *_within_row(first - 1, shape, head),
        *([rows] if rows.numel else []),
        *_within_row(last, shape, tail),
    )


def _within_row(index: int, shape: Sequence[int], span: Span) -> tuple[Box, ...]:
    """As :func:`boxes_of`, for a span inside row ``index``, or an empty one."""
    if not span.numel:
        return ()
    inner = boxes_of(shape[1:], span.shift(-index * math.prod(shape[1:])))
    return tuple(Box((index, *box.offsets), (1, *box.sizes)) for box in inner)


def run_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Span | None:
    """The span that a box of a tensor of ``shape`` is; None if its elements are not all in one.

    Example:
        >>> run_of((4, 3), (1, 0), (2, 3)), run_of((4, 3), (0, 1), (2, 2))
        (Span(start=3, stop=9), None)
    """
    start, step, is_cut = 0, 1, False
    for length, offset, size in zip(
        reversed(shape), reversed(offsets), reversed(sizes), strict=True
    ):
        if is_cut and size != 1:
            return None
        is_cut |= size != length
        start += offset * step
        step *= length
    return Span(start, start + math.prod(sizes))
