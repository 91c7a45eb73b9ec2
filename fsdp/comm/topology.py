"""Which process groups a unit's two axes use: ranks that share a flat parameter, ranks that hold equal shards."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from .. import _torch
from ..config import ShardingStrategy
from ..errors import ConfigError, ConfigTypeError, describe
from .entry import EntryGate, gate_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HYBRID_STRATEGIES", "Axes", "NodeGroups", "gates_of", "node_groups", "resolve_axes"]

HYBRID_STRATEGIES = (
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,  # noqa: SLF001 the reference's name for a public member
)
_HYBRID_DIMS = 2


@dataclass(frozen=True, slots=True)
class Axes:
    """The process groups of a unit's two axes; None stands for this rank alone.

    Attributes:
        shard: Ranks that share each flat parameter.
        replicate: Ranks that hold equal shards and average their gradients.
        whole: The group users named (or the default one); what ``process_group`` shows.
        mesh: The mesh they named them by, if they did: ``(shard,)`` or ``(replicate, shard)``.
    """

    shard: ProcessGroup | None
    replicate: ProcessGroup | None
    whole: ProcessGroup
    mesh: DeviceMesh | None = None


def resolve_axes(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: DeviceMesh | None,
) -> Axes:
    """Turn the arguments into process groups.

    Collective: every rank of the default group, only where hybrid sharding has to make its groups itself.

    Raises:
        ConfigError: If there is no process group, both arguments are given, or the mesh has the wrong shape.
        ConfigTypeError: If ``process_group`` is neither a group nor, for hybrid sharding, a pair of them.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "Cannot pass both process_group and device_mesh: a mesh brings its own groups."
        )
    given = process_group is not None or device_mesh is not None
    if not given and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            describe(
                "Default process group has not been initialized",
                remedy="Call torch.distributed.init_process_group() first, or launch with torchrun.",
            )
        )
    if strategy in HYBRID_STRATEGIES:
        shard, replicate = _hybrid_pair(process_group, device_mesh)
        return Axes(shard, replicate, shard, device_mesh)
    group = _single_group(process_group, device_mesh)
    if strategy is ShardingStrategy.NO_SHARD:
        return Axes(None, group, group)
    return Axes(group, None, group, device_mesh)


def gates_of(axes: Axes) -> tuple[EntryGate, ...]:
    """Where the ranks of both axes meet: those that users named, then, under hybrid sharding, those of the replicas.

    Collective: none.
    """
    groups = dict.fromkeys((axes.whole, axes.replicate or axes.whole))
    return tuple(gate_of(group) for group in groups)


def _single_group(process_group: Any, device_mesh: DeviceMesh | None) -> ProcessGroup:
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ConfigError(
                f"device_mesh has {device_mesh.ndim} dimensions: expected 1, or 2 with a hybrid sharding strategy."
            )
        return device_mesh.get_group()
    if process_group is None:
        return _torch.default_group()
    if not (
        callable(getattr(process_group, "rank", None))
        and callable(getattr(process_group, "size", None))
    ):
        raise ConfigTypeError(
            f"process_group is a {type(process_group).__name__}: expected a ProcessGroup that this rank belongs to."
        )
    return cast("ProcessGroup", process_group)


def _hybrid_pair(
    process_group: Any, device_mesh: DeviceMesh | None
) -> tuple[ProcessGroup, ProcessGroup]:
    if device_mesh is not None:
        if device_mesh.ndim != _HYBRID_DIMS:
            raise ConfigError(
                f"device_mesh has {device_mesh.ndim} dimensions: hybrid sharding takes 2, (replicate, shard)."
            )
        return device_mesh.get_group(1), device_mesh.get_group(0)
    if process_group is None:
        return _node_groups()
    if isinstance(process_group, tuple | list) and len(process_group) == _HYBRID_DIMS:
        return process_group[0], process_group[1]
    raise ConfigTypeError(
        "Expected process_group to be passed in as (shard_group, replicate_group) with hybrid sharding, or not at all."
    )


def _node_groups() -> tuple[ProcessGroup, ProcessGroup]:
    """Shard within a node, replicate across nodes, as LOCAL_WORLD_SIZE (set by torchrun) divides the world.

    Made once for each default group: modules that are wrapped one by one share their groups.
    """
    world_size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.accelerator.device_count()
    if not local or world_size % local:
        raise ConfigError(
            describe(
                f"cannot divide {world_size} ranks into nodes of {local}",
                remedy="Set LOCAL_WORLD_SIZE, or pass process_group=(shard_group, replicate_group).",
            )
        )
    known = _NODE_GROUPS.setdefault(_torch.default_group(), {})
    if local not in known:
        known[local] = _make_node_groups(world_size, local)
    return known[local]


_NODE_GROUPS: weakref.WeakKeyDictionary[Any, dict[int, tuple[ProcessGroup, ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


def _make_node_groups(world_size: int, local: int) -> tuple[ProcessGroup, ProcessGroup]:
    rank = dist.get_rank()
    shard = replicate = None
    for start in range(0, world_size, local):
        group = dist.new_group(range(start, start + local))
        shard = group if start <= rank < start + local else shard
    for offset in range(local):
        group = dist.new_group(range(offset, world_size, local))
        replicate = group if rank % local == offset else replicate
    assert shard is not None
    assert replicate is not None
    return shard, replicate


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """A group seen as nodes of neighbouring ranks.

    Attributes:
        inside: This node's ranks.
        across: The ranks with this one's place in every node.
    """

    inside: ProcessGroup
    across: ProcessGroup


def node_groups(group: ProcessGroup, ranks_per_node: int | None) -> NodeGroups:
    """Divide ``group`` into nodes; of LOCAL_WORLD_SIZE ranks (set by torchrun) where ``ranks_per_node`` is None.

    Collective: every rank of ``group``.

    Raises:
        ConfigError: If its size is no multiple of the ranks of a node.
    """
    local = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    size, rank = group.size(), group.rank()
    if not local or size % local:
        raise ConfigError(
            describe(
                f"cannot divide a group of {size} ranks into nodes of {local}",
                remedy="Pass ranks_per_node, a divisor of the group's size.",
            )
        )
    ranks = dist.get_process_group_ranks(group)
    first = rank - rank % local
    inside = dist.new_group(ranks[first : first + local], use_local_synchronization=True)
    across = dist.new_group(ranks[rank % local :: local], use_local_synchronization=True)
    return NodeGroups(inside, across)
