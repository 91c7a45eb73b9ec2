"""Tensor-parallel parameters, DTensors, are checked before they are sharded further."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ..comm.topology import Axes
from ..errors import ConfigError, UnsupportedError, describe
from ..flat.tensor_parallel import is_distributed
from .ignored import Ignored

__all__ = ["check_tensor_parallel"]


def check_tensor_parallel(module: nn.Module, ignored: Ignored, axes: Axes) -> None:
    """Refuse DTensors that can not be sharded further, before anything is changed.

    Collective: none.

    Raises:
        UnsupportedError: If a mesh has more than one dimension, a placement is partial or strided, or it is on the
            meta device; names the parameter.
        ConfigError: If tensor-parallel ranks are among those to shard over, or there are several meshes.
    """
    first: tuple[str, Any] | None = None
    for name, found in module.named_parameters():
        param: Any = found
        if param in ignored.params or not is_distributed(param):
            continue
        mesh = param.device_mesh
        _check_form(name, param)
        _check_ranks(name, mesh, axes)
        first = first or (name, mesh)
        if mesh != first[1]:
            raise ConfigError(
                describe(
                    f"parameters are DTensors on several meshes: {first[0]!r} on {first[1]}, another on {mesh}",
                    fqn=name,
                    remedy="Parallelise the whole model over one submesh.",
                ),
                fqn=name,
            )


def _check_form(name: str, param: Any) -> None:
    placement = param.placements[0]
    problem = None
    if param.device_mesh.ndim != 1:
        problem = f"on a mesh of {param.device_mesh.ndim} dimensions"
    elif not placement.is_replicate() and type(placement).__name__ != "Shard":
        problem = f"placed {placement}"
    elif param.is_meta:
        problem = "on the meta device"
    if problem is not None:
        raise UnsupportedError(
            describe(
                f"a parameter is a DTensor {problem}",
                fqn=name,
                remedy="Parallelise over a 1-D submesh, mesh['tp'], with Shard or Replicate, and materialise "
                "parameters before wrapping.",
            ),
            fqn=name,
        )


def _check_ranks(name: str, mesh: Any, axes: Axes) -> None:
    tensor = set(mesh.mesh.flatten().tolist())
    for group in (axes.shard, axes.replicate):
        data = [] if group is None else dist.get_process_group_ranks(group)
        if len(tensor.intersection(data)) > 1:
            raise ConfigError(
                describe(
                    f"the tensor-parallel ranks {sorted(tensor)} are also among those to shard over, {sorted(data)}",
                    fqn=name,
                    remedy="Pass the other submesh of the same mesh: FSDP(model, device_mesh=mesh['dp']).",
                ),
                fqn=name,
            )
