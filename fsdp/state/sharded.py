"""Each rank's slices of each original parameter, as DTensors, from flat shards and back.

A flat shard cuts parameters anywhere; a DTensor holds whole slices along one dimension.  The two differ by a few
elements at each end of a piece, so ranks exchange just those (``exchange``), all parameters of a handle at once.
No unit is gathered whole.

Slices are cut along the dimension that is outermost in memory, which is the first one of a contiguous parameter: so a
slice is one span of the slot, and equals the chunk that ``torch.chunk`` gives to this rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..comm.collectives import Collectives
from ..comm.topology import Axes
from ..flat.handle import FlatParamHandle
from ..flat.layout import FlatLayout, Slot, Span
from .exchange import Spread, flat_spread, only, redistribute

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "axes_mesh",
    "axis_roles",
    "cut_dim",
    "flat_from_slices",
    "local_part",
    "local_shard_tensor",
    "mesh_of",
    "placements_of",
    "row_span",
    "slice_shards",
    "slice_span",
    "slice_tensor",
    "whole_tensor",
]


# -- how a parameter is cut --------------------------------------------------------------------------------------------


def cut_dim(slot: Slot) -> int:
    """The dimension along which ``slot`` is cut into slices: the outermost one in memory.  Pure."""
    if slot.stride == row_major(slot.shape):
        return 0
    return max(range(len(slot.shape)), key=lambda dim: (slot.shape[dim] > 1, slot.stride[dim]))


def slice_span(slot: Slot, world_size: int, rank: int) -> Span:
    """Which elements of ``slot``, counted in memory order, ``rank`` holds of it as slices.

    A 0-dimensional tensor can not be cut: every rank holds all of it.  Pure.

    Example:
        >>> slot = Slot((3, 2), (2, 1), Span(0, 6))
        >>> slice_span(slot, 2, 0), slice_span(slot, 2, 1)
        (Span(start=0, stop=4), Span(start=4, stop=6))
    """
    if not slot.shape:
        return Span(0, 1)
    length = slot.shape[cut_dim(slot)]
    each = slot.span.numel // length if length else 0
    taken = _slices_of(length, world_size, rank)
    return Span(taken.start * each, taken.stop * each)


def _slices_of(length: int, world_size: int, rank: int) -> Span:
    """Which of ``length`` slices ``rank`` holds."""
    per_rank = -(-length // world_size)
    start = min(rank * per_rank, length)
    return Span(start, min(start + per_rank, length))


def row_span(shape: tuple[int, ...], world_size: int, rank: int) -> Span:
    """As :func:`slice_span`, of a contiguous tensor of ``shape``.  Pure.

    Example:
        >>> row_span((3, 2), 2, 0), row_span((3, 2), 2, 1)
        (Span(start=0, stop=4), Span(start=4, stop=6))
    """
    return slice_span(Slot(shape, row_major(shape), Span(0, math.prod(shape))), world_size, rank)


def slice_spread(layout: FlatLayout) -> Spread:
    """What each rank holds when every slot is cut into slices.  Pure."""
    return [
        [slice_span(slot, layout.world_size, rank) for slot in layout.slots]
        for rank in range(layout.world_size)
    ]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.  Pure."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)


# -- DTensors ----------------------------------------------------------------------------------------------------------


def slice_shards(
    handle: FlatParamHandle, shard: torch.Tensor, collectives: Collectives, mesh: DeviceMesh
) -> list[DTensor]:
    """This rank's slices of the parameters of ``handle``, or of a state of the same layout, as DTensors.

    Collective: every rank of the shard axis; one exchange.  Costs the memory of the slices and of what is sent.

    Args:
        handle: Whose layout ``shard`` has.
        shard: This rank's flat shard ``[shard_numel]``, of the parameters or of an optimizer state; any dtype.
        collectives: The shard axis.
        mesh: As :func:`axes_mesh` gives it.
    """
    layout = handle.layout
    pieces = [shard.detach()[piece.in_shard.start : piece.in_shard.stop] for piece in handle.pieces]
    local = redistribute(
        pieces,
        flat_spread(layout),
        slice_spread(layout),
        collectives,
        dtype=shard.dtype,
        device=handle.device,
    )
    return [
        slice_tensor(layout, handle.rank, index, part, mesh) for index, part in enumerate(local)
    ]


def flat_from_slices(
    handle: FlatParamHandle, index: int, value: DTensor, collectives: Collectives, mesh: DeviceMesh
) -> torch.Tensor | None:
    """This rank's piece ``[n]`` of parameter ``index``, from slices of it; None if it is cut in another way.

    Collective: every rank of the shard axis; one exchange of the elements that lie on another rank.
    """
    layout, slot = handle.layout, handle.layout.slots[index]
    local = value.to_local().detach()
    if (
        tuple(value.placements) != tuple(placements_of(slot, mesh))
        or value.device_mesh.mesh.tolist() != mesh.mesh.tolist()
        or local.numel() != slice_span(slot, layout.world_size, handle.rank).numel
    ):
        return None
    if local.stride() != slot.stride:
        ordered = torch.empty_strided(
            local.shape, slot.stride, dtype=local.dtype, device=local.device
        )
        local = ordered.copy_(local)
    held = [local.new_empty(0)] * len(layout.slots)
    held[index] = local.as_strided((local.numel(),), (1,), local.storage_offset())
    return redistribute(
        held,
        only(slice_spread(layout), [index]),
        only(flat_spread(layout), [index]),
        collectives,
        dtype=local.dtype,
        device=handle.device,
    )[index]


def placements_of(slot: Slot, mesh: DeviceMesh) -> list[Any]:
    """How slices of ``slot`` lie on the ranks of ``mesh``.  Pure."""
    from torch.distributed.tensor import Replicate, Shard

    kinds: dict[str, Callable[[], Any]] = {
        _SHARD: lambda: Shard(cut_dim(slot)) if slot.shape else Replicate(),
        _REPLICATE: Replicate,
    }
    return [kinds[role]() for role in axis_roles(mesh)]


def slice_tensor(
    layout: FlatLayout, rank: int, index: int, local: torch.Tensor, mesh: DeviceMesh
) -> DTensor:
    """This rank's elements ``[n]`` of slot ``index`` as a DTensor.  Collective: none; no copy."""
    from torch.distributed.tensor import DTensor

    slot = layout.slots[index]
    shape = list(slot.shape)
    if shape:
        dim = cut_dim(slot)
        shape[dim] = _slices_of(shape[dim], layout.world_size, rank).numel
    made: DTensor = DTensor.from_local(
        local.as_strided(shape, slot.stride),
        mesh,
        placements_of(slot, mesh),
        run_check=False,
        shape=torch.Size(slot.shape),
        stride=slot.stride,
    )
    return made


def local_shard_tensor(shard: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A flat shard itself as a DTensor, which knows its global size and offset.  Collective: none; no copy."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    kinds = {_SHARD: Shard(0), _REPLICATE: Replicate()}
    made: DTensor = DTensor.from_local(
        shard.detach(), mesh, [kinds[role] for role in axis_roles(mesh)], run_check=False
    )
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


# -- meshes ------------------------------------------------------------------------------------------------------------

_SHARD, _REPLICATE = "shard", "replicate"


def mesh_of(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """A 1-D mesh over the ranks of ``group``, which share what lies on it.  Collective: none."""
    return axes_mesh(Axes(group, None, group), device)


def axis_roles(mesh: DeviceMesh) -> tuple[str, ...]:
    """What each dimension of a unit's mesh is, whatever users call it: ``"replicate"`` or ``"shard"``.  Pure."""
    is_replicated = mesh.mesh_dim_names == (_REPLICATE,)
    return (_REPLICATE,) if is_replicated else (_REPLICATE, _SHARD)[-mesh.ndim :]


def axes_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    """The mesh of a unit's two axes: 1-D, or 2-D ``(replicate, shard)`` where it has both; the user's if there is one.

    Collective: every rank of the replicate axis, the first time for hybrid sharding, to learn who is in the mesh.
    """
    given = axes.mesh
    if given is not None and given.device_type == device.type and _SHARD in axis_roles(given):
        return given
    known = _MESHES.setdefault(axes.whole, {})
    key = (axes.shard, axes.replicate, device.type)
    mesh: DeviceMesh | None = known.get(key)
    if mesh is None:
        mesh = known[key] = _make_mesh(axes, device)
    return mesh


def _make_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if axes.shard is None or axes.replicate is None:
        name = _REPLICATE if axes.shard is None else _SHARD
        group = axes.replicate if axes.shard is None else axes.shard
        assert group is not None
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
    rows: list[Any] = [None] * axes.replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(axes.shard), group=axes.replicate)
    return DeviceMesh.from_group(
        [axes.replicate, axes.shard],
        device.type,
        mesh=torch.tensor(rows),
        mesh_dim_names=(_REPLICATE, _SHARD),
    )


_MESHES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
