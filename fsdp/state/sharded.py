"""Each rank's rows of each original parameter, as DTensors, from flat shards and back.

A flat shard cuts parameters anywhere; a DTensor holds whole rows (``Shard(0)``).  The two differ by a few elements at
each end of a piece, so ranks exchange just what lies in the overlap of one's piece and the other's rows, all parameters
of a handle in one all-to-all.  No unit is gathered whole.

Example: a parameter of shape ``[3, 2]``, flat over 2 ranks, holds elements ``[0, 3)`` and ``[3, 6)``; the rows are
``[0, 4)`` and ``[4, 6)``: rank 1 sends one element to rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..flat.handle import FlatParamHandle
from ..flat.layout import FlatLayout, Span

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["local_part", "local_shard_tensor", "mesh_of", "row_shards", "row_span", "whole_tensor"]


def mesh_of(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """A 1-D mesh over the ranks of ``group``.  Collective: none."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device.type)


def row_span(shape: tuple[int, ...], world_size: int, rank: int) -> Span:
    """Which elements, counted in row-major order, ``rank`` holds of a tensor sharded by rows.

    A 0-dimensional tensor can not be cut: every rank holds all of it.  Pure.

    Example:
        >>> row_span((3, 2), 2, 0), row_span((3, 2), 2, 1)
        (Span(start=0, stop=4), Span(start=4, stop=6))
    """
    if not shape:
        return Span(0, 1)
    row = 1
    for size in shape[1:]:
        row *= size
    per_rank = -(-shape[0] // world_size)
    start = min(rank * per_rank, shape[0])
    return Span(start * row, min(start + per_rank, shape[0]) * row)


@dataclass(frozen=True, slots=True)
class _Move:
    """Elements of one slot that go from one rank's flat shard to another's rows.

    Attributes:
        slot: Index of the parameter.
        source: Place in the sender's shard.
        target: Place in the receiver's rows.
    """

    slot: int
    source: Span
    target: Span


def _moves(layout: FlatLayout, sender: int, receiver: int) -> list[_Move]:
    """What ``sender`` has of what ``receiver`` wants, in slot order.  Pure."""
    moves = []
    for index, (slot, piece) in enumerate(zip(layout.slots, layout.pieces(sender), strict=True)):
        wanted = row_span(slot.shape, layout.world_size, receiver)
        overlap = piece.in_slot.clip(wanted)
        if overlap.numel:
            offset = piece.in_shard.start - piece.in_slot.start
            moves.append(_Move(index, overlap.shift(offset), overlap.shift(-wanted.start)))
    return moves


def row_shards(
    handle: FlatParamHandle, shard: torch.Tensor, group: ProcessGroup
) -> list[torch.Tensor]:
    """This rank's rows of every parameter of ``handle``, as DTensors over ``group`` (0-dimensional ones replicated).

    Collective: every rank of ``group``; one all-to-all.

    Args:
        handle: Whose layout ``shard`` has.
        shard: This rank's flat shard ``[shard_numel]``, of the parameters or of an optimizer state; any dtype.
        group: The shard group.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    layout, rank = handle.layout, handle.rank
    rows = _exchange(layout, rank, shard, group)
    mesh = mesh_of(group, shard.device)
    tensors: list[torch.Tensor] = []
    for index, slot in enumerate(layout.slots):
        placement = Shard(0) if slot.shape else Replicate()
        local = rows[index]
        if slot.shape:
            span = row_span(slot.shape, layout.world_size, rank)
            row = slot.span.numel // slot.shape[0] if slot.shape[0] else 0
            local = local.view(span.numel // row if row else 0, *slot.shape[1:])
        else:
            local = local.view(())
        tensors.append(
            DTensor.from_local(
                local,
                mesh,
                [placement],
                run_check=False,
                shape=torch.Size(slot.shape),
                stride=_row_major(slot.shape),
            )
        )
    return tensors


def _exchange(
    layout: FlatLayout, rank: int, shard: torch.Tensor, group: ProcessGroup
) -> list[torch.Tensor]:
    """The elements of this rank's rows of each slot, ``[n]`` each."""
    world = range(layout.world_size)
    outgoing = [_moves(layout, rank, peer) for peer in world]
    incoming = [_moves(layout, peer, rank) for peer in world]
    flat = shard.detach()
    parts = [flat[move.source.start : move.source.stop] for moves in outgoing for move in moves]
    sent = torch.cat(parts) if parts else flat.new_empty(0)
    counts_out = [sum(move.source.numel for move in moves) for moves in outgoing]
    counts_in = [sum(move.source.numel for move in moves) for moves in incoming]
    received = flat.new_empty(sum(counts_in))
    # Bytes, because backends do not send every dtype.
    itemsize = flat.element_size()
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [count * itemsize for count in counts_in],
        [count * itemsize for count in counts_out],
        group=group,
    )
    rows = [
        flat.new_empty(row_span(slot.shape, layout.world_size, rank).numel) for slot in layout.slots
    ]
    place = 0
    for moves in incoming:
        for move in moves:
            stop = place + move.source.numel
            rows[move.slot][move.target.start : move.target.stop] = received[place:stop]
            place = stop
    return rows


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)


def local_shard_tensor(shard: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """A flat shard itself as a DTensor, which knows its global size and offset.  Collective: none; no copy."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of(group, shard.device)
    made: torch.Tensor = DTensor.from_local(shard.detach(), mesh, [Shard(0)], run_check=False)
    return made


def local_part(value: torch.Tensor) -> torch.Tensor:
    """``value`` itself, or what this rank holds of a DTensor.  Collective: none."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """``value`` itself, or all of a DTensor.

    Collective: every rank of a DTensor's mesh.
    """
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
