"""Optimizer state under original names, whole or by slices, from what each rank's optimizer holds.

The canonical form is ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``, where a tensor
of a parameter's shape is whole (or a DTensor of it) and everything else is as the optimizer keeps it for that
parameter.  A parameter without state stays without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.telling import tell_all
from ..errors import CheckpointError, FsdpError, describe
from ..flat.handle import FlatParamHandle
from ..flat.views import slot_view
from ..runtime.held import Held, held_params
from ..runtime.spread import partial_units
from ..runtime.unit import Unit
from .elsewhere import find_elsewhere
from .optim_elsewhere import completed_optim_state
from .optim_pieces import send_whole, slices_from_flats, to_keepers
from .optim_view import Form, LocalKey, OptimizerView, copy_of, view_of
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


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What is known of a state tensor everywhere: dtype, and its shape where that is not the parameter's piece."""

    dtype: torch.dtype
    shape: torch.Size | None = None


@dataclass(frozen=True, slots=True)
class _Description:
    """The state of one parameter on one rank: of each value a :class:`_Tensor`, or the value itself."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank tells the others before anything is gathered."""

    problem: FsdpError | None
    keep: bool
    states: list[_Description]


@dataclass(frozen=True, eq=False, slots=True)
class _Member:
    """One parameter of a unit, what state it has, and which rank has all of it, if one has."""

    item: Held
    description: _Description
    owner: tuple[int, int] | None


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
    if units:
        units[0].gate.enter("optim_state_dict")
    held = held_params(model, units)
    problem: FsdpError | None = None
    view = None
    local: dict[Held, _Description] = {}
    try:
        view = view_of(model, held, optimizer, state_dict)
        local = _describe_all(view)
    except FsdpError as error:
        problem = error
    state: dict[str, dict[str, Any]] = {}
    by_unit = _by_unit(held)
    partial = set(partial_units(units))
    is_divided = tensor_rank(units) is not None
    keeps = {
        unit: delivery.keep
        or ((unit in partial or is_divided) and unit.shard.rank == unit.replicate.rank == 0)
        for unit in by_unit
        if unit is not None
    }
    said = _agree(by_unit, local, problem, keeps)
    if problem is not None:
        raise problem
    assert view is not None
    elsewhere = find_elsewhere(model, units, [item.fqn for item in held])
    merged = {unit: _merge(unit, items, said[unit], view) for unit, items in by_unit.items()}
    values = _LocalValues(view)
    for unit, members in merged.items():
        if unit is None:
            state.update(_copied_values(members, values, to_cpu=delivery.to_cpu))
        else:
            its_own = replace(delivery, keep=keeps[unit])
            of_unit = _of_unit(unit, members, values, said[unit], its_own)
            state.update(of_unit if keeps[unit] else {})
    if is_divided:
        whole_optim_state(state, held, to_cpu=delivery.to_cpu)
    if not delivery.keep and elsewhere is None:
        return {}
    groups = [
        {**options, "params": list(names)}
        for options, names in zip(view.groups, view.group_names, strict=True)
    ]
    in_order = {item.fqn: state[item.fqn] for item in held if item.fqn in state}
    saved: dict[str, Any] = {"state": in_order, "param_groups": groups}
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


# -- what there is -----------------------------------------------------------------------------------------------------


def _describe_all(view: OptimizerView) -> dict[Held, _Description]:
    """What state each parameter has on this rank."""
    described = {}
    for key in view.keys:
        values = view.state.get(key.name)
        if values:
            description = _describe(key, values)
            described.update(dict.fromkeys(key.items, description))
    return described


def _describe(key: LocalKey, values: Mapping[str, Any]) -> _Description:
    described: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            described[name] = copy_of(value)
        elif value.dim() and (key.shape is None or value.shape == key.shape):
            described[name] = _Tensor(value.dtype, None if key.shape is not None else value.shape)
        elif value.numel() == 1:
            described[name] = value.detach().cpu().clone()
        else:
            fqn = key.items[0].fqn
            raise CheckpointError(
                describe(
                    f"the optimizer keeps {name!r} of shape {tuple(value.shape)}: expected the shape of what it "
                    f"steps, {tuple(key.shape or ())}, or a scalar",
                    fqn=fqn,
                    remedy="Use fsdp.optim.WholeParamOptimizer for optimizers that need whole parameters.",
                ),
                fqn=fqn,
            )
    return _Description(described)


def _by_unit(held: Sequence[Held]) -> dict[Unit | None, list[Held]]:
    members: dict[Unit | None, list[Held]] = {}
    for item in held:
        members.setdefault(item.unit, []).append(item)
    return members


def _agree(
    by_unit: Mapping[Unit | None, Sequence[Held]],
    local: Mapping[Held, _Description],
    problem: FsdpError | None,
    keeps: Mapping[Unit, bool],
) -> dict[Unit | None, list[list[_Said]]]:
    """What each rank ``[replica][shard rank]`` has of each unit's parameters; raises what any of them raised."""
    groups: dict[object, list[Unit]] = {}
    for unit in by_unit:
        if unit is not None:
            groups.setdefault(unit.group_key, []).append(unit)
    nothing = _Description()
    said: dict[Unit | None, list[list[_Said]]] = {
        None: [[_Said(problem, True, [local.get(item, nothing) for item in by_unit.get(None, ())])]]
    }
    for members in groups.values():
        items = [item for unit in members for item in by_unit[unit]]
        mine = _Said(problem, keeps[members[0]], [local.get(item, nothing) for item in items])
        device = members[0].config.device
        row = tell_all(members[0].shard, mine, device)
        table = tell_all(members[0].replicate, row, device)
        for told in (one for row in table for one in row):
            if told.problem is not None and problem is None:
                raise told.problem
        start = 0
        for unit in members:
            stop = start + len(by_unit[unit])
            said[unit] = [
                [_Said(None, one.keep, one.states[start:stop]) for one in row] for row in table
            ]
            start = stop
    return said


def _merge(
    unit: Unit | None, items: Sequence[Held], said: list[list[_Said]], view: OptimizerView
) -> list[_Member]:
    """One description a parameter: that of the ranks that hold some of it, which must agree."""
    members = []
    for at, item in enumerate(items):
        known = {
            (shard, replica): one.states[at]
            for replica, row in enumerate(said)
            for shard, one in enumerate(row)
        }
        if unit is None or item.fqn in view.wholes:
            with_state = [rank for rank, description in known.items() if description.values]
            if with_state:
                members.append(_Member(item, known[with_state[0]], with_state[0]))
            continue
        keepers = [rank for rank in known if not item.numel or item.span_on(rank[0]).numel]
        _check_equal(item, {rank: known[rank] for rank in keepers})
        description = known[keepers[0]]
        if description.values:
            members.append(_Member(item, description, None))
    return members


def _check_equal(item: Held, known: Mapping[tuple[int, int], _Description]) -> None:
    names = {rank: set(description.values) for rank, description in known.items()}
    first = next(iter(names.values()))
    differing = tuple(rank for rank, found in names.items() if found != first)
    if differing:
        raise CheckpointError(
            describe(
                f"ranks differ in what optimizer state the parameter has: {sorted(first)} on some, "
                f"{sorted(names[differing[0]])} on shard rank {differing[0][0]}",
                fqn=item.fqn,
                remedy="Load the same state and make the same steps on every rank.",
            ),
            fqn=item.fqn,
        )


# -- values ------------------------------------------------------------------------------------------------------------


class _LocalValues:
    """This rank's state tensors, found by parameter."""

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self._keys = {item: key for key in view.keys for item in key.items}

    def value(self, item: Held, name: str) -> torch.Tensor:
        """The tensor ``name`` that covers ``item``."""
        found = self._view.state[self._keys[item].name][name]
        assert isinstance(found, torch.Tensor)
        return found.detach()

    def shard(self, handle: FlatParamHandle, name: str, members: Sequence[_Member]) -> torch.Tensor:
        """``[shard_numel]`` of the state ``name`` of a whole handle; zeros where a parameter has none."""
        present = [
            member for member in members if isinstance(member.description.values.get(name), _Tensor)
        ]
        dtype = present[0].description.values[name].dtype
        key = self._keys.get(present[0].item)
        if key is not None and key.form is Form.FLAT and key.name in self._view.state:
            return self.value(present[0].item, name)
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.device)
        for member in present:
            if key is not None and key.form is not Form.FLAT and member.item.is_kept_here:
                piece = handle.pieces[member.item.index].in_shard
                target = member.item.shaped(shard[piece.start : piece.stop])
                value = self.value(member.item, name)
                target.copy_(value if value.shape == target.shape else value.view(target.shape))
        return shard


def _copied_values(
    members: Sequence[_Member], values: _LocalValues, *, to_cpu: bool
) -> dict[str, dict[str, Any]]:
    """The state of parameters that no unit manages, as it is."""
    return {
        member.item.fqn: {
            name: _copied(values.value(member.item, name), to_cpu=to_cpu)
            if isinstance(value, _Tensor)
            else value
            for name, value in member.description.values.items()
        }
        for member in members
    }


def _of_unit(
    unit: Unit,
    members: Sequence[_Member],
    values: _LocalValues,
    said: list[list[_Said]],
    delivery: Delivery,
) -> dict[str, dict[str, Any]]:
    """The state of one unit's parameters on this rank: whole, or its slices."""
    # Copied for each: parameters of one flat parameter share a description, and may not share its `step`.
    state = {
        member.item.fqn: {
            name: value if isinstance(value, _Tensor) else copy_of(value)
            for name, value in member.description.values.items()
        }
        for member in members
    }
    pieces = [member for member in members if member.owner is None]
    mesh = None if delivery.meshes is None else delivery.meshes[unit]
    wanted = _wanted(pieces)
    shards = [
        values.shard(handle, name, [m for m in pieces if m.item.handle is handle]).to(
            unit.config.device
        )
        for handle, name in wanted
    ]
    keepers = [rank for rank, one in enumerate(said[unit.replicate.rank]) if one.keep]
    parts: Iterable[Sequence[torch.Tensor]]
    if mesh is not None:
        parts = _slices(unit, wanted, shards, mesh)
    else:
        wholes = to_keepers(unit, shards, [handle for handle, _ in wanted], keepers)
        parts = (
            [slot_view(whole, slot) for slot in handle.layout.slots]
            for (handle, _), whole in zip(wanted, wholes, strict=False)
        )
    for (handle, name), tensors in zip(wanted, parts, strict=False):
        if delivery.keep:
            _store(state, pieces, handle, name, tensors, to_cpu=delivery.to_cpu)
    owned = [member for member in members if member.owner is not None]
    for member, name, whole in _from_owners(unit, owned, values):
        if mesh is not None and tuple(whole.shape) == member.item.shape:
            whole = _own_slices(member.item, whole, mesh)  # noqa: PLW2901
        state[member.item.fqn][name] = _copied(whole, to_cpu=delivery.to_cpu)
    return state


def _wanted(members: Sequence[_Member]) -> list[tuple[FlatParamHandle, str]]:
    """Which state tensors to move: each name of each handle once."""
    wanted: dict[tuple[FlatParamHandle, str], None] = {}
    for member in members:
        assert member.item.handle is not None
        for name, value in member.description.values.items():
            if isinstance(value, _Tensor):
                wanted[member.item.handle, name] = None
    return list(wanted)


def _store(
    state: dict[str, dict[str, Any]],
    members: Sequence[_Member],
    handle: FlatParamHandle,
    name: str,
    values: Sequence[torch.Tensor],
    *,
    to_cpu: bool,
) -> None:
    for member in members:
        value = member.description.values.get(name)
        if member.item.handle is handle and isinstance(value, _Tensor):
            state[member.item.fqn][name] = _copied(values[member.item.index], to_cpu=to_cpu)


def _copied(value: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    value = value.detach()
    return value.to("cpu", copy=True) if to_cpu else value.clone()


def _from_owners(
    unit: Unit, members: Sequence[_Member], values: _LocalValues
) -> Iterator[tuple[_Member, str, torch.Tensor]]:
    """The state tensors that one rank has whole, on every rank; one launch an owner and axis."""
    device = unit.config.device
    owners = dict.fromkeys(member.owner for member in members)
    for owner in owners:
        assert owner is not None
        tensors = []
        for member in members:
            for name, value in member.description.values.items():
                if member.owner == owner and isinstance(value, _Tensor):
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
