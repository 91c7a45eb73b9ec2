"""How pieces of state tensors travel: to whoever keeps whole ones, into slices and back, from the rank that has all.

Everything of one unit goes in one launch, as bytes, however many tensors it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..comm.collectives import Collectives
from ..flat.handle import FlatParamHandle
from ..flat.layout import FlatLayout, Span
from ..runtime.full_params import gather_flat
from ..runtime.unit import Unit
from .sharded import slice_span

__all__ = [
    "as_bytes",
    "flats_from_slices",
    "slices_from_flats",
    "send_whole",
    "to_keepers",
]


def to_keepers(
    unit: Unit,
    shards: Sequence[torch.Tensor],
    handles: Sequence[FlatParamHandle],
    keepers: Sequence[int],
) -> Iterator[torch.Tensor]:
    """The whole of each sharded tensor, ``[padded_numel]``, one after the other; nothing where none is kept.

    Collective: every rank of the unit's shard group; one launch, none if nobody keeps anything.

    Args:
        unit: Whose group.
        shards: This rank's ``[shard_numel]`` of each tensor.
        handles: Whose layout each has.
        keepers: Ranks of the shard group that want the result; all get it if it is more than one.
    """
    me, size = unit.shard.rank, unit.shard.size
    if not keepers or not shards:
        return
    if size == 1 or len(keepers) > 1:
        yield from gather_flat(unit, shards, handles)
        return
    packed = torch.cat([as_bytes(shard) for shard in shards])
    nothing = packed[:0]
    is_target = me == keepers[0]
    sends = [packed if rank == keepers[0] else nothing for rank in range(size)]
    receives = [torch.empty_like(packed) if is_target else nothing for _ in range(size)]
    unit.shard.exchange(sends, receives).wait()
    if not is_target:
        return
    start = 0
    for shard in shards:
        stop = start + shard.nbytes
        yield torch.cat([received[start:stop] for received in receives]).view(shard.dtype)
        start = stop


def slices_from_flats(
    unit: Unit, flats: Sequence[tuple[FlatLayout, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """This rank's slices of each parameter of each flat tensor, ``[n]`` each, as ``slice_span`` says.

    Collective: every rank of the unit's shard group; one launch.

    Args:
        unit: Whose group.
        flats: This rank's ``[shard_numel]`` of each tensor, on the device or the host, with its layout.
    """
    me = unit.shard.rank
    flats = [(layout, shard.to(unit.config.device)) for layout, shard in flats]
    slices = [
        [shard.new_empty(slice_span(slot, layout.world_size, me).numel) for slot in layout.slots]
        for layout, shard in flats
    ]
    outgoing: list[list[torch.Tensor]] = []
    incoming: list[list[torch.Tensor]] = []
    for peer in range(unit.shard.size):
        outgoing.append([])
        incoming.append([])
        for (layout, shard), own in zip(flats, slices, strict=True):
            for index, mine in enumerate(own):
                sent = _overlap(layout, index, me, peer)
                outgoing[-1].append(shard[sent.in_shard.start : sent.in_shard.stop])
                got = _overlap(layout, index, peer, me)
                incoming[-1].append(mine[got.in_slices.start : got.in_slices.stop])
    _swap(unit.shard, outgoing, incoming)
    return slices


def flats_from_slices(
    unit: Unit, wanted: Sequence[tuple[FlatLayout, int, torch.Tensor]]
) -> list[torch.Tensor]:
    """This rank's flat piece of each parameter, ``[n]``, from every rank's slices.

    Collective: every rank of the unit's shard group; one launch.

    Args:
        unit: Whose group.
        wanted: For each parameter its layout, its index there, and this rank's slices of it, ``[m]``.
    """
    me = unit.shard.rank
    pieces = []
    starts = []
    for layout, index, slices in wanted:
        held = layout.slots[index].span.clip(layout.owned(me))
        pieces.append(slices.new_empty(held.numel))
        starts.append(held.start - layout.owned(me).start)
    outgoing: list[list[torch.Tensor]] = []
    incoming: list[list[torch.Tensor]] = []
    for peer in range(unit.shard.size):
        outgoing.append([])
        incoming.append([])
        for (layout, index, slices), piece, start in zip(wanted, pieces, starts, strict=True):
            sent = _overlap(layout, index, peer, me).in_slices
            outgoing[-1].append(slices[sent.start : sent.stop])
            got = _overlap(layout, index, me, peer).in_shard
            if got.numel:
                incoming[-1].append(piece[got.start - start : got.stop - start])
    _swap(unit.shard, outgoing, incoming)
    return pieces


class _Overlap(NamedTuple):
    """Elements of one parameter that lie in a rank's shard and in another's slices: their place in either."""

    in_shard: Span
    in_slices: Span


def _overlap(layout: FlatLayout, index: int, flat_rank: int, slice_rank: int) -> _Overlap:
    """What the shard of one rank shares with the slices of another; empty spans if nothing.  Pure."""
    slot, owned = layout.slots[index], layout.owned(flat_rank)
    held = slot.span.clip(owned)
    if not held.numel:
        return _NOTHING
    wanted = slice_span(slot, layout.world_size, slice_rank)
    both = held.shift(-slot.span.start).clip(wanted)
    if not both.numel:
        return _NOTHING
    return _Overlap(both.shift(slot.span.start - owned.start), both.shift(-wanted.start))


_NOTHING = _Overlap(Span(0, 0), Span(0, 0))


def _swap(
    group: Collectives,
    outgoing: Sequence[Sequence[torch.Tensor]],
    incoming: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Send each rank its tensors, in order, and write what each sends into the tensors given for it."""
    device = next((part.device for parts in (*outgoing, *incoming) for part in parts), None)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    sends = [torch.cat([nothing, *map(as_bytes, parts)]) for parts in outgoing]
    receives = [
        torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
        for parts in incoming
    ]
    group.exchange(sends, receives).wait()
    for received, parts in zip(receives, incoming, strict=True):
        start = 0
        for part in parts:
            part.view(torch.uint8).copy_(received[start : start + part.nbytes])
            start += part.nbytes


def send_whole(
    unit: Unit, tensors: Sequence[torch.Tensor], owner: tuple[int, int], device: torch.device
) -> None:
    """Copy tensors from their owner, ``(shard rank, replica rank)``, into the same ones of every rank.

    Collective: every rank of both axes of the unit; one launch an axis.
    """
    shard_rank, replica = owner
    packed = torch.cat([as_bytes(tensor).to(device) for tensor in tensors])
    if unit.shard.size > 1 and unit.replicate.rank == replica:
        unit.shard.broadcast([packed], shard_rank).wait()
    if unit.replicate.size > 1:
        unit.replicate.broadcast([packed], replica).wait()
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        tensor.view(-1).view(torch.uint8).copy_(packed[start:stop])
        start = stop


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as ``[nbytes]`` uint8, which every backend sends.  Collective: none."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
