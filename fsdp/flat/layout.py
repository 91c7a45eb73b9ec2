"""Where each original parameter lies in a flat parameter, and which part of it each rank holds.

Pure: integers only, no tensors, no process groups.  All spans are half-open and count elements.

Example: three parameters of 3, 5 and 2 elements, no alignment, two ranks::

    unsharded   [a a a b b b b b c c]          numel 10, shard_numel 5
    rank 0      [a a a b b]                    pieces a[0:3) b[0:2) c[2:2)
    rank 1      [b b b c c]                    pieces a[3:3) b[2:5) c[0:2)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["FlatLayout", "Piece", "Slot", "Span", "build_layout"]


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range ``[start, stop)`` of elements."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"malformed span [{self.start}, {self.stop})"

    @property
    def numel(self) -> int:
        """Number of elements in the span."""
        return self.stop - self.start

    def clip(self, other: Span) -> Span:
        """The part of this span inside ``other``; an empty span at the nearest edge if they are disjoint."""
        start = min(max(self.start, other.start), other.stop)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Span:
        """The same span, ``offset`` elements further on."""
        return Span(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Slot:
    """One original parameter's place in the unsharded flat parameter.

    Attributes:
        shape: Shape of the original parameter.
        stride: Its strides in elements; dense, so the slot holds the elements in memory order.
        span: Its place in the unsharded flat parameter.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one slot that one rank holds; both spans have the same length, which may be zero.

    Attributes:
        in_slot: Place in the original parameter, counted in memory order.
        in_shard: Place in the rank's shard.
    """

    in_slot: Span
    in_shard: Span


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of one flat parameter over ``world_size`` ranks.

    Attributes:
        slots: The original parameters, in order, each starting at a multiple of the alignment.
        world_size: Ranks that share the flat parameter.
        shard_numel: Elements each rank holds, tail padding included; the same on every rank.
        padded_numel: Elements of the unsharded flat parameter, tail padding included.
    """

    slots: tuple[Slot, ...]
    world_size: int
    shard_numel: int
    padded_numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_numel", self.shard_numel * self.world_size)
        end = 0
        for slot in self.slots:
            assert slot.span.start >= end, (
                f"slot {slot} overlaps the one before it, which ends at {end}"
            )
            end = slot.span.stop
        assert end <= self.padded_numel, f"slots end at {end}, beyond {self.padded_numel}"

    @property
    def numel(self) -> int:
        """Elements up to the end of the last slot, alignment gaps included and tail padding not."""
        return self.slots[-1].span.stop if self.slots else 0

    @property
    def gaps(self) -> tuple[Span, ...]:
        """The spans that belong to no slot: alignment gaps and tail padding."""
        gaps = []
        end = 0
        for slot in self.slots:
            gaps.append(Span(end, slot.span.start))
            end = slot.span.stop
        gaps.append(Span(end, self.padded_numel))
        return tuple(gap for gap in gaps if gap.numel)

    def owned(self, rank: int) -> Span:
        """The span of the unsharded flat parameter that ``rank`` holds."""
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds of each slot, in slot order, empty pieces included."""
        owned = self.owned(rank)
        pieces = []
        for slot in self.slots:
            held = slot.span.clip(owned)
            in_slot = held.shift(-slot.span.start) if held.numel else _empty_edge(slot.span, owned)
            pieces.append(Piece(in_slot, held.shift(-owned.start)))
        return tuple(pieces)


def _empty_edge(slot: Span, owned: Span) -> Span:
    """The empty span of a slot that a rank holds nothing of: its start or its end, whichever is nearer."""
    edge = 0 if slot.start >= owned.stop else slot.numel
    return Span(edge, edge)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def build_layout(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    world_size: int,
    alignment: int = 1,
) -> FlatLayout:
    """Lay the parameters out one after another and divide them evenly over ``world_size`` ranks.

    Equal arguments give the identical object, so units of the same shape share buffers.

    Args:
        shapes: Shape of each parameter.
        strides: Strides of each parameter in elements; dense.
        world_size: Number of ranks, at least 1.
        alignment: Every slot starts at a multiple of this many elements.

    Example:
        >>> layout = build_layout(((3,), (5,), (2,)), ((1,), (1,), (1,)), world_size=2)
        >>> layout.shard_numel, layout.pieces(1)[1].in_slot
        (5, Span(start=2, stop=5))
    """
    slots = []
    end = 0
    for shape, stride in zip(shapes, strides, strict=True):
        numel = 1
        for size in shape:
            numel *= size
        start = _round_up(end, alignment)
        end = start + numel
        slots.append(Slot(shape, stride, Span(start, end)))
    shard_numel = -(-end // world_size)
    return FlatLayout(tuple(slots), world_size, shard_numel)
