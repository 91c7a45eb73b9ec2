"""Optimizer state under original names, whole or by slices, from what each rank's optimizer holds.

The canonical form is ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``, where a tensor
of a parameter's shape is whole (or a DTensor of it) and everything else is as the optimizer keeps it for that
parameter.  A parameter without state stays without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..flat.handle import FlatParamHandle
from ..flat.views import slot_view
from ..runtime.held import Held
from ..runtime.spread import partial_units
from ..runtime.unit import Unit
from .elsewhere import find_elsewhere
from .optim_described import KnownState, LocalValues, Member, StateTensor, known_state
from .optim_elsewhere import completed_optim_state
from .optim_pieces import send_whole, slices_from_flats, to_keepers
from .optim_view import copy_of
from .sharded import slice_span, slice_tensor
from .tensor_parallel import tensor_rank, whole_optim_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Delivery", "save_optim_state"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Who gets what.

    Attributes:
        keep: Whether this rank keeps the result; it takes part either way.
        to_cpu: Whether tensors are moved to the CPU as they come.
        meshes: For each unit the mesh of its axes, if every rank gets its slices as DTensors; None for whole tensors.
    """

    keep: bool = True
    to_cpu: bool = True
    meshes: Mapping[Unit, DeviceMesh] | None = None


def save_optim_state(
    model: nn.Module,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    delivery: Delivery,
) -> dict[str, Any]:
    """The optimizer's state in the canonical form.

    Collective: every rank of both axes of every unit.  One exchange of small descriptions a group, then one launch a
    unit however many tensors its state has; whole tensors that one rank keeps travel to that rank alone.

    Args:
        model: What the optimizer trains; a wrapper or a module that contains some.
        units: The units in it.
        optimizer: Holds the exposed parameters.
        state_dict: The optimizer's own state dict, if it is not ``optimizer.state_dict()``.
        delivery: Who gets what.

    Returns:
        The canonical form, without ``param_groups`` if ``state_dict`` has none; an empty dict where ``delivery.keep``
        is False.

    Raises:
        UsageError: If the optimizer holds parameters that are not the model's.
        CheckpointError: If a state tensor has neither its parameter's shape nor one element, or ranks differ in what
            state a parameter has.  On every rank.
    """
    partial = set(partial_units(units))
    is_divided = tensor_rank(units) is not None
    keeps = {
        unit: delivery.keep
        or ((unit in partial or is_divided) and unit.shard.rank == unit.replicate.rank == 0)
        for unit in units
    }
    known = known_state(model, units, optimizer, state_dict, keeps)
    held = known.held
    elsewhere = find_elsewhere(model, units, [item.fqn for item in held])
    state: dict[str, dict[str, Any]] = {}
    for unit, members in known.members.items():
        if unit is None:
            state.update(_copied_values(members, known.values, to_cpu=delivery.to_cpu))
        else:
            its_own = replace(delivery, keep=keeps[unit])
            of_unit = _of_unit(unit, members, known, its_own)
            state.update(of_unit if keeps[unit] else {})
    if is_divided:
        whole_optim_state(state, held, to_cpu=delivery.to_cpu)
    if not delivery.keep and elsewhere is None:
        return {}
    in_order = {item.fqn: state[item.fqn] for item in held if item.fqn in state}
    saved: dict[str, Any] = {"state": in_order, "param_groups": known.groups}
    if elsewhere is not None:
        saved = completed_optim_state(
            saved,
            elsewhere,
            whole=delivery.meshes is None,
            keep=delivery.keep,
            to_cpu=delivery.to_cpu,
        )
    if state_dict is not None and "param_groups" not in state_dict:
        saved.pop("param_groups", None)
    return saved


# -- values ------------------------------------------------------------------------------------------------------------


def _copied_values(
    members: Sequence[Member], values: LocalValues, *, to_cpu: bool
) -> dict[str, dict[str, Any]]:
    """The state of parameters that no unit manages, as it is."""
    return {
        member.item.fqn: {
            name: _copied(values.value(member.item, name), to_cpu=to_cpu)
            if isinstance(value, StateTensor)
            else value
            for name, value in member.description.values.items()
        }
        for member in members
    }


def _of_unit(
    unit: Unit,
    members: Sequence[Member],
    known: KnownState,
    delivery: Delivery,
) -> dict[str, dict[str, Any]]:
    """The state of one unit's parameters on this rank: whole, or its slices."""
    # Copied for each: parameters of one flat parameter share a description, and may not share its `step`.
    state = {
        member.item.fqn: {
            name: value if isinstance(value, StateTensor) else copy_of(value)
            for name, value in member.description.values.items()
        }
        for member in members
    }
    pieces = [member for member in members if member.owner is None]
    mesh = None if delivery.meshes is None else delivery.meshes[unit]
    wanted = _wanted(pieces)
    shards = [
        known.values.shard(handle, name, [m for m in pieces if m.item.handle is handle]).to(
            unit.config.device
        )
        for handle, name in wanted
    ]
    parts: Iterable[Sequence[torch.Tensor]]
    if mesh is not None:
        parts = _slices(unit, wanted, shards, mesh)
    else:
        wholes = to_keepers(unit, shards, [handle for handle, _ in wanted], known.keepers[unit])
        parts = (
            [slot_view(whole, slot) for slot in handle.layout.slots]
            for (handle, _), whole in zip(wanted, wholes, strict=False)
        )
    for (handle, name), tensors in zip(wanted, parts, strict=False):
        if delivery.keep:
            _store(state, pieces, handle, name, tensors, to_cpu=delivery.to_cpu)
    owned = [member for member in members if member.owner is not None]
    for member, name, whole in _from_owners(unit, owned, known.values):
        if mesh is not None and tuple(whole.shape) == member.item.shape:
            whole = _own_slices(member.item, whole, mesh)  # noqa: PLW2901
        state[member.item.fqn][name] = _copied(whole, to_cpu=delivery.to_cpu)
    return state


def _wanted(members: Sequence[Member]) -> list[tuple[FlatParamHandle, str]]:
    """Which state tensors to move: each name of each handle once."""
    wanted: dict[tuple[FlatParamHandle, str], None] = {}
    for member in members:
        assert member.item.handle is not None
        for name, value in member.description.values.items():
            if isinstance(value, StateTensor):
                wanted[member.item.handle, name] = None
    return list(wanted)


def _store(
    state: dict[str, dict[str, Any]],
    members: Sequence[Member],
    handle: FlatParamHandle,
    name: str,
    values: Sequence[torch.Tensor],
    *,
    to_cpu: bool,
) -> None:
    for member in members:
        value = member.description.values.get(name)
        if member.item.handle is handle and isinstance(value, StateTensor):
            state[member.item.fqn][name] = _copied(values[member.item.index], to_cpu=to_cpu)


def _copied(value: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    value = value.detach()
    return value.to("cpu", copy=True) if to_cpu else value.clone()


def _from_owners(
    unit: Unit, members: Sequence[Member], values: LocalValues
) -> Iterator[tuple[Member, str, torch.Tensor]]:
    """The state tensors that one rank has whole, on every rank; one launch an owner and axis."""
    device = unit.config.device
    owners = dict.fromkeys(member.owner for member in members)
    for owner in owners:
        assert owner is not None
        tensors = []
        for member in members:
            for name, value in member.description.values.items():
                if member.owner == owner and isinstance(value, StateTensor):
                    if owner == (unit.shard.rank, unit.replicate.rank):
                        whole = values.value(member.item, name).contiguous()
                    else:
                        assert value.shape is not None
                        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
                    tensors.append((member, name, whole))
        if tensors:
            send_whole(unit, [whole for _, _, whole in tensors], owner, device)
            yield from tensors


# -- slices ------------------------------------------------------------------------------------------------------------


def _slices(
    unit: Unit,
    wanted: Sequence[tuple[FlatParamHandle, str]],
    shards: Sequence[torch.Tensor],
    mesh: DeviceMesh,
) -> Iterator[list[torch.Tensor]]:
    """For each state tensor this rank's slices of each parameter, as DTensors."""
    layouts = [handle.layout for handle, _ in wanted]
    slices = slices_from_flats(unit, list(zip(layouts, shards, strict=True)))
    for layout, parts in zip(layouts, slices, strict=True):
        yield [
            slice_tensor(layout, unit.shard.rank, index, part, mesh)
            for index, part in enumerate(parts)
        ]


def _own_slices(item: Held, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's slices of a tensor of a parameter's shape, as a DTensor."""
    assert item.handle is not None
    layout, rank = item.handle.layout, item.handle.rank
    slot = layout.slots[item.index]
    ordered = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype, device=whole.device)
    memory = ordered.copy_(whole).as_strided((slot.span.numel,), (1,))
    span = slice_span(slot, layout.world_size, rank)
    return slice_tensor(layout, rank, item.index, memory[span.start : span.stop], mesh)
