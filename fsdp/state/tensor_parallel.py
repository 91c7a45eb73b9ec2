"""Tensor-parallel parameters in state dicts: under their whole shapes, cut over tensor ranks first and then over data.

Slices are DTensors on a mesh ``(tensor, shard)``, or ``(tensor, replicate, shard)``: a mesh lists first what cuts
first, so that both may cut the same dimension and no strided placement is needed::

    whole [8, 4]    Shard(0) over 2 tensor ranks: [4, 4]    Shard(0) over 2 data ranks: [2, 4]
    tensor rank 1, data rank 0 holds rows 4 and 5
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError, describe
from ..flat.layout import Slot
from ..flat.tensor_parallel import TensorShard, is_distributed
from ..runtime.held import Held
from ..runtime.unit import Unit
from .sharded import axis_roles

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "along_data",
    "joint_mesh",
    "over_tensor_axis",
    "refuse_tensor_parallel",
    "tensor_rank",
    "whole_optim_state",
]

_TENSOR = "tensor"


def tensor_rank(units: Sequence[Unit]) -> int | None:
    """This rank's place on the tensor-parallel mesh of ``units``; None if there is none.  Collective: none."""
    for unit in units:
        for handle in unit.handles:
            for managed in handle.params if handle.has_tensor_shards else ():
                if managed.tensor_shard is not None:
                    return managed.tensor_shard.rank
    return None


def refuse_tensor_parallel(units: Sequence[Unit], call: str, remedy: str) -> None:
    """Raise if there are tensor-parallel parameters, which ``call`` does not know.

    Collective: none.

    Raises:
        UnsupportedError: Naming the first one.
    """
    for unit in units:
        for handle in unit.handles:
            if handle.has_tensor_shards:
                raise UnsupportedError(
                    describe(
                        f"{call} does not know tensor-parallel parameters",
                        unit=unit.name,
                        fqn=handle.fqns[0],
                        remedy=remedy,
                    ),
                    unit=unit.name,
                    fqn=handle.fqns[0],
                )


def joint_mesh(data: DeviceMesh, shard: TensorShard) -> DeviceMesh:
    """The mesh ``(tensor, *data)`` of a unit whose axes have the mesh ``data``.

    Collective: every rank of the tensor-parallel mesh, the first time, to learn who is in it.
    """
    from torch.distributed.device_mesh import DeviceMesh

    known = _MESHES.setdefault(data, {})
    mesh: DeviceMesh | None = known.get(shard.group)
    if mesh is None:
        rows: list[Any] = [None] * shard.mesh.size()
        dist.all_gather_object(rows, data.mesh.tolist(), group=shard.group)
        mesh = known[shard.group] = DeviceMesh.from_group(
            [shard.group, *data.get_all_groups()],
            data.device_type,
            mesh=torch.tensor(rows),
            mesh_dim_names=(_TENSOR, *axis_roles(data)),
        )
    return mesh


def over_tensor_axis(value: DTensor, shard: TensorShard) -> DTensor:
    """Slices of this rank's part, on a mesh of data ranks, as slices of the whole on the joint mesh.

    Collective: as :func:`joint_mesh`; no copy.
    """
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        value.to_local(),
        joint_mesh(value.device_mesh, shard),
        [shard.placement, *value.placements],
        run_check=False,
        shape=torch.Size(shard.shape),
        stride=shard.stride,
    )
    return made


def along_data(value: DTensor, shard: TensorShard, slot: Slot, data: DeviceMesh) -> torch.Tensor:
    """What this rank's part needs of ``value``, a DTensor of the whole on any mesh.

    Collective: as :func:`joint_mesh`; where it is cut in another way, every rank of its mesh.

    Returns:
        Slices of this rank's part on the mesh ``data``, or the whole tensor.
    """
    from torch.distributed.tensor import DTensor

    joint = joint_mesh(data, shard)
    is_ours = value.device_mesh.mesh.tolist() == joint.mesh.tolist()
    if not is_ours or value.placements[0] != shard.placement:
        return value.full_tensor()
    made: DTensor = DTensor.from_local(
        value.to_local(),
        data,
        value.placements[1:],
        run_check=False,
        shape=torch.Size(slot.shape),
        stride=slot.stride,
    )
    return made


def whole_optim_state(
    state: Mapping[str, dict[str, Any]], held: Sequence[Held], *, to_cpu: bool
) -> None:
    """Replace state tensors of this rank's parts by those of the whole parameters, in place.

    Collective: every rank of the tensor-parallel mesh, with state of the same parameters.
    """
    for item in held:
        shard = item.tensor_shard
        if shard is None or item.handle is None:
            continue
        slot = item.handle.layout.slots[item.index]
        values = state.get(item.fqn, {})
        for name in sorted(values):
            value = values[name]
            if is_distributed(value):
                values[name] = over_tensor_axis(value, shard)
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == slot.shape:
                whole = shard.whole(value)
                values[name] = whole.cpu() if to_cpu else whole


_MESHES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
