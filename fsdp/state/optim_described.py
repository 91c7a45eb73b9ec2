"""What state every rank's optimizer has of each parameter: told by all, and checked, before any of it is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..comm.telling import tell_all
from ..errors import CheckpointError, FsdpError, describe
from ..flat.handle import FlatParamHandle
from ..runtime.held import Held, held_params
from ..runtime.unit import Unit
from .loading import in_memory_order
from .optim_view import Form, LocalKey, OptimizerView, copy_of, view_of

__all__ = ["KnownState", "LocalValues", "Member", "StateTensor", "known_state"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """What is known of a state tensor everywhere: dtype, and its shape where that is not the parameter's piece."""

    dtype: torch.dtype
    shape: torch.Size | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """The state of one parameter on one rank: of each value a :class:`StateTensor`, or the value itself."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank tells the others before anything is gathered."""

    problem: FsdpError | None
    keep: bool
    states: list[Description]


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """One parameter of a unit, what state it has, and which rank has all of it, if one has."""

    item: Held
    description: Description
    owner: tuple[int, int] | None


class LocalValues:
    """This rank's state tensors, found by parameter."""

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self._keys = {item: key for key in view.keys for item in key.items}

    def value(self, item: Held, name: str) -> torch.Tensor:
        """The tensor ``name`` that covers ``item``."""
        found = self._view.state[self._keys[item].name][name]
        assert isinstance(found, torch.Tensor)
        return found.detach()

    def piece(self, item: Held, name: str) -> torch.Tensor:
        """This rank's piece ``[n]`` of the state ``name``, in memory order: a view, unless it lies in another order."""
        assert item.handle is not None
        value = self.value(item, name)
        if self._keys[item].form is Form.FLAT:
            span = item.handle.pieces[item.index].in_shard
            return value[span.start : span.stop]
        if value.dim() == 1:
            return value.contiguous()
        return in_memory_order(value, item.handle.layout.slots[item.index])

    def shard(self, handle: FlatParamHandle, name: str, members: Sequence[Member]) -> torch.Tensor:
        """``[shard_numel]`` of the state ``name`` of a whole handle; zeros where a parameter has none."""
        present = [
            member
            for member in members
            if isinstance(member.description.values.get(name), StateTensor)
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


@dataclass(frozen=True, eq=False, slots=True)
class KnownState:
    """What is known on every rank.

    Attributes:
        view: The optimizer on this rank.
        held: The model's parameters.
        members: Those with state, by unit; None for what no unit manages.
        keepers: By unit the ranks of this rank's shard group that keep the result.
        values: The tensors that this rank has.
    """

    view: OptimizerView
    held: list[Held]
    members: dict[Unit | None, list[Member]]
    keepers: dict[Unit, list[int]]
    values: LocalValues

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, by original names."""
        return [
            {**options, "params": list(names)}
            for options, names in zip(self.view.groups, self.view.group_names, strict=True)
        ]


def known_state(
    model: nn.Module,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    keeps: Mapping[Unit, bool],
) -> KnownState:
    """Tell the other ranks what state the optimizer has here, and hear what it has there.

    Collective: every rank of both axes of every unit; one exchange of small descriptions a group.

    Args:
        model: What the optimizer trains; a wrapper or a module that contains some.
        units: The units in it.
        optimizer: Holds the exposed parameters.
        state_dict: The optimizer's own state dict, if it is not ``optimizer.state_dict()``.
        keeps: Whether this rank keeps the result, for each unit.

    Raises:
        UsageError: If the optimizer holds parameters that are not the model's.
        CheckpointError: If a state tensor has neither its parameter's shape nor one element, or ranks differ in what
            state a parameter has.  On every rank.
    """
    for gate in units[0].gates if units else ():
        gate.enter("optim_state_dict")
    held = held_params(model, units)
    problem: FsdpError | None = None
    view = None
    local: dict[Held, Description] = {}
    try:
        view = view_of(model, held, optimizer, state_dict)
        local = _describe_all(view)
    except FsdpError as error:
        problem = error
    by_unit = _by_unit(held)
    said = _agree(by_unit, local, problem, keeps)
    if problem is not None:
        raise problem
    assert view is not None
    members = {unit: _merge(unit, items, said[unit], view) for unit, items in by_unit.items()}
    keepers = {
        unit: [rank for rank, one in enumerate(said[unit][unit.replicate.rank]) if one.keep]
        for unit in by_unit
        if unit is not None
    }
    return KnownState(view, held, members, keepers, LocalValues(view))


def _describe_all(view: OptimizerView) -> dict[Held, Description]:
    """What state each parameter has on this rank."""
    described = {}
    for key in view.keys:
        values = view.state.get(key.name)
        if values:
            description = _describe(key, values)
            described.update(dict.fromkeys(key.items, description))
    return described


def _describe(key: LocalKey, values: Mapping[str, Any]) -> Description:
    described: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            described[name] = copy_of(value)
        elif value.dim() and (key.shape is None or value.shape == key.shape):
            described[name] = StateTensor(
                value.dtype, None if key.shape is not None else value.shape
            )
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
    return Description(described)


def _by_unit(held: Sequence[Held]) -> dict[Unit | None, list[Held]]:
    members: dict[Unit | None, list[Held]] = {}
    for item in held:
        members.setdefault(item.unit, []).append(item)
    return members


def _agree(
    by_unit: Mapping[Unit | None, Sequence[Held]],
    local: Mapping[Held, Description],
    problem: FsdpError | None,
    keeps: Mapping[Unit, bool],
) -> dict[Unit | None, list[list[_Said]]]:
    """What each rank ``[replica][shard rank]`` has of each unit's parameters; raises what any of them raised."""
    groups: dict[object, list[Unit]] = {}
    for unit in by_unit:
        if unit is not None:
            groups.setdefault(unit.group_key, []).append(unit)
    nothing = Description()
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
) -> list[Member]:
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
                members.append(Member(item, known[with_state[0]], with_state[0]))
            continue
        keepers = [rank for rank in known if not item.numel or item.span_on(rank[0]).numel]
        _check_equal(item, {rank: known[rank] for rank in keepers})
        description = known[keepers[0]]
        if description.values:
            members.append(Member(item, description, None))
    return members


def _check_equal(item: Held, known: Mapping[tuple[int, int], Description]) -> None:
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
