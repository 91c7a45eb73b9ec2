"""Elements of parameters go from how one party holds them to how another wants them, in one exchange a handle.

A *spread* says which span of each slot each rank holds, in memory order.  Flat shards, whole rows, and all on one rank
are spreads; what must travel between two of them is the overlap of what a rank has and what another wants.

Example: a slot of 6 elements over 2 ranks.  Flat shards hold ``[0, 3)`` and ``[3, 6)``; rows of two hold ``[0, 4)``
and ``[4, 6)``: from the first to the second, rank 1 sends one element to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import Collectives
from ..flat.layout import FlatLayout, Span

__all__ = ["Spread", "all_on_first", "flat_spread", "only", "redistribute"]

Spread = Sequence[Sequence[Span]]
"""Which span of each slot each rank holds: ``spread[rank][slot]``, elements in memory order."""

_NOTHING = Span(0, 0)


def flat_spread(layout: FlatLayout) -> Spread:
    """What flat shards hold.  Pure."""
    return [[piece.in_slot for piece in layout.pieces(rank)] for rank in range(layout.world_size)]


def all_on_first(layout: FlatLayout) -> Spread:
    """Everything on the first rank.  Pure."""
    everything = [Span(0, slot.span.numel) for slot in layout.slots]
    return [everything, *([_NOTHING] * len(everything) for _ in range(layout.world_size - 1))]


def only(spread: Spread, slots: Sequence[int]) -> Spread:
    """``spread`` with nothing of any other slot.  Pure."""
    chosen = set(slots)
    return [
        [span if index in chosen else _NOTHING for index, span in enumerate(spans)]
        for spans in spread
    ]


def redistribute(
    held: Sequence[torch.Tensor],
    source: Spread,
    target: Spread,
    shard: Collectives,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Turn what this rank holds under ``source`` into what it holds under ``target``.

    Costs the memory of what is sent and of what is received, and nothing of what neither spread gives this rank.

    Collective: every rank of ``shard``; one exchange.

    Args:
        held: For each slot this rank's elements ``[source[rank][slot].numel]``.
        source: How the slots are held; where several ranks hold an element they hold the same value.
        target: How they are wanted.
        shard: The ranks.
        dtype: Of all elements, on every rank.
        device: Where the results go.

    Returns:
        One new tensor a slot, ``[target[rank][slot].numel]``.
    """
    rank, world = shard.rank, range(shard.size)
    sends = []
    for peer in world:
        overlaps = _overlaps(source[rank], target[peer])
        parts = [
            held[slot][span.start - source[rank][slot].start : span.stop - source[rank][slot].start]
            for slot, span in overlaps
        ]
        sends.append(_as_bytes(parts, dtype, device))
    incoming = [_overlaps(source[peer], target[rank]) for peer in world]
    received = [
        torch.empty(sum(span.numel for _, span in spans), dtype=dtype, device=device)
        for spans in incoming
    ]
    shard.exchange(sends, [part.view(torch.uint8) for part in received]).wait()
    results = [torch.empty(span.numel, dtype=dtype, device=device) for span in target[rank]]
    for spans, part in zip(incoming, received, strict=True):
        place = 0
        for slot, span in spans:
            wanted = span.shift(-target[rank][slot].start)
            results[slot][wanted.start : wanted.stop] = part[place : place + span.numel]
            place += span.numel
    return results


def _overlaps(having: Sequence[Span], wanting: Sequence[Span]) -> list[tuple[int, Span]]:
    """Which span of which slot one has of what the other wants, in slot order."""
    found = []
    for slot, (mine, theirs) in enumerate(zip(having, wanting, strict=True)):
        overlap = mine.clip(theirs)
        if overlap.numel:
            found.append((slot, overlap))
    return found


def _as_bytes(
    parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``parts`` one after another; as bytes, because backends do not send every dtype."""
    if not parts:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([part.detach().to(device) for part in parts]).to(dtype).view(torch.uint8)
