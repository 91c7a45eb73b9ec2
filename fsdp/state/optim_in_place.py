"""Optimizer state under original names as it lies on this rank: for whoever can take pieces of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..flat.handle import FlatParamHandle
from ..runtime.unit import Unit
from .elsewhere import Elsewhere
from .optim_described import LocalValues, Member, StateTensor, known_state
from .optim_elsewhere import completed_optim_state, scalars_of_all
from .optim_view import copy_of

__all__ = ["StateInPlace", "optim_state_in_place"]

_Place = tuple[str, str]


@dataclass(eq=False, slots=True)
class StateInPlace:
    """An optimizer's state on this rank; tensors are views of it, by the names of the parameter and of the state.

    Attributes:
        pieces: Of tensors of a parameter's shape: its handle, its index there, and this rank's elements ``[n]``, in the
            order of its slot.
        wholes: Tensors of any shape that only this rank has.
        copies: Tensors of any shape that every rank has alike.
        others: What is no tensor, or of no dimensions, for every parameter of the model that has state, by its name.
        groups: The parameter groups of the model, by original names.
    """

    pieces: dict[_Place, tuple[FlatParamHandle, int, torch.Tensor]] = field(default_factory=dict)
    wholes: dict[_Place, torch.Tensor] = field(default_factory=dict)
    copies: dict[_Place, torch.Tensor] = field(default_factory=dict)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def optim_state_in_place(
    model: nn.Module,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer,
    elsewhere: Elsewhere | None,
) -> StateInPlace:
    """What this rank has of the optimizer's state.

    Collective: every rank of both axes of every unit; they exchange small descriptions, no tensors.

    Args:
        model: What the optimizer trains; a wrapper or a module that contains some.
        units: The units in it.
        optimizer: Holds the exposed parameters.
        elsewhere: What other ranks hold of the model.

    Raises:
        UsageError: If the optimizer holds parameters that are not the model's.
        CheckpointError: If a state tensor has neither its parameter's shape nor one element, or ranks differ in what
            state a parameter has.  On every rank.
    """
    known = known_state(model, units, optimizer, None, dict.fromkeys(units, True))
    found = StateInPlace(groups=known.groups)
    for member in (member for members in known.members.values() for member in members):
        _put(found, member, known.values)
    if elsewhere is not None:
        canonical = {"state": found.others, "param_groups": found.groups}
        found.groups = completed_optim_state(
            canonical, elsewhere, whole=False, keep=True, to_cpu=False
        )["param_groups"]
        found.others |= scalars_of_all(found.others, elsewhere)
    return found


def _put(found: StateInPlace, member: Member, values: LocalValues) -> None:
    """Add the state of one parameter."""
    item = member.item
    others = found.others[item.fqn] = {}
    for name, value in member.description.values.items():
        place = (item.fqn, name)
        if isinstance(value, torch.Tensor) and value.dim():
            found.copies[place] = value
        elif not isinstance(value, StateTensor):
            others[name] = copy_of(value)  # parameters of one flat parameter share a description
        elif item.unit is None:
            found.copies[place] = values.value(item, name)
        elif member.owner == (item.unit.shard.rank, item.unit.replicate.rank):
            found.wholes[place] = values.value(item, name)
        elif member.owner is None and item.is_kept_here:
            assert item.handle is not None
            piece = values.piece(item, name).to(value.dtype)
            found.pieces[place] = (item.handle, item.index, piece)
