"""Pickles of a wrapped model: this rank's shards, and all it takes to be the same wrapper again in the same world.

Note [Pickles]
    A wrapper pickles as a record: copies of its modules without our hooks, its shards, and the ranks of its groups in
    place of the groups.  Inner wrappers are records inside it.  So ``torch.save(model, f"model-{rank}.pt")`` on every
    rank costs the size of the shards and communicates nothing, and ``torch.load(..., weights_only=False)`` on as many
    ranks gives wrappers over their process groups.  Another number of ranks takes ``fsdp.checkpoint`` or a state dict.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..comm.process_group import collectives_for
from ..comm.topology import Axes, gates_of
from ..config import StateDictSettings
from ..errors import CheckpointError, UnsupportedError
from ..flat.handle import FlatParamHandle
from ..flat.layout import FlatLayout, Piece
from ..flat.offloaded import handle_maker
from ..flat.sharing import ManagedParam
from ..runtime.precision import DtypeRules, RuleCasts
from ..runtime.unit import Unit

if TYPE_CHECKING:
    from ..init.build import BuildArguments

__all__ = ["SAVING", "SavedUnit", "restore_unit", "saved_unit"]

SAVING = "fsdp: wrappers become records in this copy"


@dataclass(frozen=True, slots=True)
class _SavedHandle:
    """A handle's shard, where it lies, and the parameters it belongs to."""

    params: tuple[ManagedParam, ...]
    layout: FlatLayout
    pieces: tuple[Piece, ...]
    rank: int
    shard: torch.Tensor
    compute_dtype: torch.dtype | None
    orig_mode: bool


@dataclass(frozen=True, slots=True)
class SavedUnit:
    """What a wrapper is pickled as (see Note [Pickles]).

    Attributes:
        module: A copy of the wrapped module without our hooks; inner wrappers are records.
        modules: Those of the unit.
        handles: Its parameters.
        arguments: Its arguments, without the process groups.
        ranks: Of each axis, and of the group users named, the global ranks; None for this rank alone.
        settings: What kind of state dicts it makes.
        forward_methods: Methods that gather.
        training: Whether it was in training mode.
        buffer_masters: Originals of the buffers that were cast.
        rules: Modules with a dtype of their own.
        comm_hook: The communication hook and its state.
        gradient_divisor: What gradients are divided by.
        unshards_in_backward: Whether backwards gather its parameters.
    """

    module: nn.Module
    modules: tuple[nn.Module, ...]
    handles: tuple[_SavedHandle, ...]
    arguments: BuildArguments
    ranks: tuple[tuple[int, ...] | None, ...]
    settings: StateDictSettings
    forward_methods: tuple[str, ...]
    training: bool
    buffer_masters: dict[tuple[nn.Module, str], torch.Tensor]
    rules: DtypeRules
    comm_hook: tuple[Any, Any]
    gradient_divisor: float | None
    unshards_in_backward: bool = True


def saved_unit(
    unit: Unit,
    module: nn.Module,
    arguments: BuildArguments,
    settings: StateDictSettings,
    forward_methods: tuple[str, ...],
    memo: dict[int, Any],
) -> SavedUnit:
    """The record of ``unit``, whose module ``memo`` has copied to ``module``.  Collective: none.

    Raises:
        UnsupportedError: If the unit compresses its communication or has tensor-parallel parameters.
    """
    if unit.compression is not None:
        raise UnsupportedError(
            "a wrapper with compressed communication can not be pickled: save its state_dict()."
        )
    if any(handle.has_tensor_shards for handle in unit.handles):
        raise UnsupportedError(
            "a wrapper of tensor-parallel parameters can not be pickled: save a sharded state_dict(), or use "
            "fsdp.checkpoint."
        )
    axes = arguments.axes
    groups = (axes.shard, axes.replicate, axes.whole)
    ranks = [None if g is None else tuple(dist.get_process_group_ranks(g)) for g in groups]
    without_groups: Any = dataclasses.replace(arguments, axes=None, param_init_fn=None)  # type: ignore[arg-type]
    return SavedUnit(
        module=module,
        modules=tuple(memo[id(inner)] for inner in unit.modules),
        handles=tuple(_saved_handle(handle, memo) for handle in unit.handles),
        arguments=without_groups,
        ranks=tuple(ranks),
        settings=settings,
        forward_methods=forward_methods,
        training=unit.module.training,
        buffer_masters={
            (memo[id(inner)], name): master.clone()
            for (inner, name), master in unit.buffer_masters.items()
        },
        rules=unit.dtype_rules.copied(memo),
        comm_hook=(unit.averaging.hook, unit.averaging.hook_state),
        gradient_divisor=unit.averaging.divisor,
        unshards_in_backward=unit.unshards_in_backward,
    )


def _saved_handle(handle: FlatParamHandle, memo: dict[int, Any]) -> _SavedHandle:
    params = handle.copied_params(memo)
    for managed in params:
        managed.param.data = managed.param.data.new_empty(0)  # the shard has the values
    return _SavedHandle(
        params=tuple(params),
        layout=handle.layout,
        pieces=handle.pieces,
        rank=handle.rank,
        shard=handle.shard.clone(),
        compute_dtype=handle.wanted_dtype,
        orig_mode=handle.orig_mode,
    )


def restore_unit(saved: SavedUnit) -> tuple[Unit, BuildArguments]:
    """The unit that ``saved`` is the record of, over this process's groups; inner wrappers are back already.

    Collective: none; every rank restores its own record.

    Raises:
        CheckpointError: If there are no such groups here, or this is another rank of them.
    """
    shard, replicate, whole = map(_group_of, saved.ranks)
    assert whole is not None
    axes = Axes(shard, replicate, whole)
    arguments = dataclasses.replace(saved.arguments, axes=axes)
    collectives = [collectives_for(group, arguments.device) for group in (shard, replicate)]
    for handle in saved.handles:
        if handle.rank != collectives[0].rank:
            raise CheckpointError(
                f"this model was pickled by rank {handle.rank} and is loaded by rank {collectives[0].rank}: load each "
                "rank's own file, or use fsdp.checkpoint."
            )
    make = handle_maker(arguments.cpu_offload, arguments.device)
    handles = [
        make(
            saved_handle.params,
            rank=saved_handle.rank,
            world_size=saved_handle.layout.world_size,
            device=arguments.device,
            compute_dtype=saved_handle.compute_dtype,
            orig_mode=saved_handle.orig_mode,
            copied_from=saved_handle,
        )
        for saved_handle in saved.handles
    ]
    unit = Unit(
        saved.module,
        handles,
        arguments.unit_config(),
        collectives[0],
        collectives[1],
        saved.modules,
        gates_of(axes),
    )
    unit.buffer_masters = dict(saved.buffer_masters)
    unit.dtype_rules = saved.rules
    if saved.rules.boundaries:
        unit.rule_casts = RuleCasts(unit, saved.rules.boundaries)
    unit.averaging.hook, unit.averaging.hook_state = saved.comm_hook
    unit.averaging.divisor = saved.gradient_divisor
    unit.unshard_in_backward(wanted=saved.unshards_in_backward)
    return unit, arguments


def _group_of(ranks: tuple[int, ...] | None) -> Any:
    if ranks is None:
        return None
    group = _torch.group_of_ranks(ranks) if dist.is_initialized() else None
    if group is None:
        raise CheckpointError(
            f"this model was pickled in a process group of ranks {list(ranks)}, which does not exist here: make it "
            "with torch.distributed.new_group first; in a world of another size use fsdp.checkpoint."
        )
    return group
