"""This rank's part of a canonical optimizer state (see :mod:`fsdp.state.optim_save`), as its optimizer takes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError, describe
from ..runtime.held import Held, held_params
from ..runtime.unit import Unit
from .elsewhere import find_elsewhere
from .optim_elsewhere import without_elsewhere
from .optim_names import (
    SavedState,
    groups_to_load,
    in_canonical_names,
    is_elementwise,
    without_unmanaged,
)
from .optim_pieces import flats_from_slices
from .optim_view import Form, LocalKey, OptimizerView, copy_of, view_of
from .sharded import local_part, placements_of, whole_tensor
from .tensor_parallel import joint_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["LoadPlan", "Parts", "optim_state_to_load", "plan_load"]

Parts = Mapping[tuple[Held, str], torch.Tensor]
"""This rank's part of state tensors, by parameter and name: a piece ``[n]``, or the whole where that is stepped."""


def optim_state_to_load(
    model: nn.Module,
    units: Sequence[Unit],
    source: torch.optim.Optimizer | Iterable[Any],
    saved: Mapping[str, Any],
    meshes: Mapping[Unit, DeviceMesh] | None = None,
    *,
    caller_completes: bool = False,
) -> dict[str, Any]:
    """This rank's part of a canonical state, in the form ``optimizer.load_state_dict`` takes.

    Also takes the state dict of an optimizer over the unwrapped model, keyed by number.

    Collective: none, unless values are DTensors: then every rank of every unit's shard group, one launch a unit; with
    units over fewer ranks than the rest, every rank of the widest, two small exchanges.

    Args:
        model: A wrapper, or a module that contains some.
        units: The units in it.
        source: The optimizer, or the parameters (or groups) it would be built from.
        saved: The state; the same on every rank; not changed.
        meshes: For each unit the mesh of its axes; DTensors on others are gathered one by one.
        caller_completes: Leave out what no wrapper manages and ``saved`` does not name, instead of refusing it.

    Raises:
        CheckpointError: If it does not fit; names the parameter.
    """
    held = held_params(model, units)
    view = view_of(model, held, source)
    elsewhere = find_elsewhere(model, units, [item.fqn for item in held])
    if elsewhere is not None:
        saved = without_elsewhere(saved, elsewhere)
    if caller_completes:
        view = without_unmanaged(held, view, saved)
    named = in_canonical_names(held, view, saved)
    plan = plan_load(held, view, named)
    return plan.cut(_parts_from_slices(held, view, named.state, meshes or {}))


@dataclass(frozen=True, eq=False, slots=True)
class _Tensors:
    """A state tensor to be cut: the value of each parameter that has one."""

    name: str
    values: Sequence[tuple[Held, torch.Tensor]]


@dataclass(frozen=True, eq=False, slots=True)
class LoadPlan:
    """What goes where, all checks made.

    Attributes:
        entries: For each key of the optimizer's state dict, its values; those to be cut are not cut yet.
        groups: The ``param_groups`` to load; None where the saved state has none.
    """

    entries: Sequence[tuple[LocalKey, Mapping[str, Any]]]
    groups: list[dict[str, Any]] | None

    def cut(self, parts: Parts) -> dict[str, Any]:
        """The state dict for the optimizer; ``parts`` says what is not to be cut out of the saved values themselves."""
        state = {
            key.name: {
                name: _cut(key, value, parts) if isinstance(value, _Tensors) else copy_of(value)
                for name, value in values.items()
            }
            for key, values in self.entries
        }
        return (
            {"state": state}
            if self.groups is None
            else {"state": state, "param_groups": self.groups}
        )


def plan_load(held: Sequence[Held], view: OptimizerView, saved: SavedState) -> LoadPlan:
    """Check that a saved state fits the optimizer, and find what each of its keys takes.

    Collective: none.  Tensors are only looked at, so they may be on the meta device.

    Raises:
        CheckpointError: If a tensor has the wrong shape, a flat parameter would need several values of one name (those
            of parameters that were never stepped do not count), or groups do not match; names the parameter.
    """
    for item in held:
        if item.handle is not None and item.fqn not in view.wholes:
            for name, value in saved.state.get(item.fqn, {}).items():
                is_elementwise(
                    item, name, value, saved.counters
                )  # on every rank, also where it keeps nothing
    entries = []
    for key in view.keys:
        values = _values_for(key, saved)
        if values:
            entries.append((key, values))
    return LoadPlan(entries, None if saved.groups is None else groups_to_load(view, saved.groups))


def _values_for(key: LocalKey, saved: SavedState) -> Mapping[str, Any]:
    """The values one key of the optimizer takes; none where it has no state, or nothing of the parameter is here."""
    present = [(item, saved.state[item.fqn]) for item in key.items if item.fqn in saved.state]
    if not present or (key.form is Form.PIECE and not key.items[0].is_kept_here):
        return {}
    if key.form is Form.WHOLE:
        item, whole = present[0]
        return {
            name: _Tensors(name, [(item, value)]) if isinstance(value, torch.Tensor) else value
            for name, value in whole.items()
        }
    values: dict[str, Any] = {}
    unstepped = {item for item, found in present if _is_unstepped(item, found, saved.counters)}
    for name in dict.fromkeys(name for _, found in present for name in found):
        given = [(item, found[name]) for item, found in present if name in found]
        if all(is_elementwise(item, name, value, saved.counters) for item, value in given):
            values[name] = _Tensors(name, given)
        else:
            stepped = [(item, value) for item, value in given if item not in unstepped]
            values[name] = _only_value(name, stepped or given)
    return values


def _is_unstepped(item: Held, found: Mapping[str, Any], counters: Collection[str]) -> bool:
    """Whether a parameter has the state that its optimizer began with, as Adagrad's have from its constructor on.

    Every step of a flat parameter counts for all that lies in it, so such a parameter joins with the counters of its
    neighbours: what it has where it has always lain with them, and what it gets where it has no state at all.
    """
    step = found.get("step")
    if not isinstance(step, int | float | torch.Tensor):
        return False
    return not is_elementwise(item, "step", step, counters) and bool(step == 0)


def _only_value(name: str, given: Sequence[tuple[Held, Any]]) -> Any:
    """The one value of a state that is not elementwise; a flat parameter can not keep several."""
    item, first = given[0]
    for other, value in given[1:]:
        if not _same(first, value):
            raise CheckpointError(
                describe(
                    f"optimizer state {name!r} differs between {item.fqn!r} ({first}) and {other.fqn!r} ({value}), "
                    "which lie in one flat parameter",
                    fqn=other.fqn,
                    remedy="Load it into a model wrapped with use_orig_params=True, or in which they lie in units of "
                    "their own.",
                ),
                fqn=other.fqn,
            )
    return first


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    return bool(left == right)


def _cut(key: LocalKey, wanted: _Tensors, parts: Parts) -> torch.Tensor:
    """This rank's part of one state tensor: of one parameter, or the whole shard of a flat one, zero where absent."""
    item, value = wanted.values[0]
    if key.form is Form.WHOLE:
        whole = parts.get((item, wanted.name))
        return value.detach().clone() if whole is None else whole
    if key.form is Form.PIECE:
        piece = _piece(item, wanted.name, value, parts)
        return item.shaped(piece) if key.shape == item.key.shape else piece
    handle = item.handle
    assert handle is not None
    shard = torch.zeros(handle.layout.shard_numel, dtype=value.dtype, device=handle.device)
    for member, given in wanted.values:
        if member.is_kept_here:
            place = handle.pieces[member.index].in_shard
            shard[place.start : place.stop].copy_(_piece(member, wanted.name, given, parts))
    return shard


def _piece(item: Held, name: str, value: torch.Tensor, parts: Parts) -> torch.Tensor:
    part = parts.get((item, name))
    return item.piece_of(value) if part is None else part


# -- slices ------------------------------------------------------------------------------------------------------------


def _parts_from_slices(
    held: Sequence[Held],
    view: OptimizerView,
    state: Mapping[str, Mapping[str, Any]],
    meshes: Mapping[Unit, DeviceMesh],
) -> Parts:
    """This rank's part of every DTensor.

    Collective: every rank of every unit's shard group, where there are DTensors; one launch a unit for those that
    hold this rank's slices, one each for others.
    """
    parts: dict[tuple[Held, str], torch.Tensor] = {}
    by_unit: dict[Unit, list[tuple[Held, str, torch.Tensor]]] = {}
    for item in held:
        stays_whole = item.unit is None or item.fqn in view.wholes
        for name, value in state.get(item.fqn, {}).items():
            if not _is_distributed(value):
                continue
            if stays_whole:
                parts[item, name] = whole_tensor(value)
            elif _holds_slices(item, value, meshes):
                assert item.unit is not None
                by_unit.setdefault(item.unit, []).append((item, name, local_part(value)))
            else:
                parts[item, name] = item.piece_of(whole_tensor(value))
    for unit, found in by_unit.items():
        wanted = []
        for item, _, local in found:
            assert item.handle is not None
            memory = _in_order_of(item, local.detach()).to(unit.config.device)
            wanted.append((item.handle.layout, item.index, memory))
        for (item, name, _), piece in zip(found, flats_from_slices(unit, wanted), strict=True):
            parts[item, name] = piece.to(item.key.device)
    return parts


def _is_distributed(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _holds_slices(item: Held, value: DTensor, meshes: Mapping[Unit, DeviceMesh]) -> bool:
    """Whether each rank of the parameter's shard group holds its slices of ``value``."""
    assert item.unit is not None
    assert item.handle is not None
    mesh = meshes.get(item.unit)
    slot = item.handle.layout.slots[item.index]
    if mesh is None or not slot.shape:
        return False
    placements = placements_of(slot, mesh)
    if item.tensor_shard is not None:
        placements = [item.tensor_shard.placement, *placements]
        mesh = joint_mesh(mesh, item.tensor_shard)
    return (
        tuple(value.placements) == tuple(placements)
        and value.device_mesh.mesh.tolist() == mesh.mesh.tolist()
    )


def _in_order_of(item: Held, local: torch.Tensor) -> torch.Tensor:
    """A slice ``[n]`` in the order the parameter's elements have in memory."""
    assert item.handle is not None
    stride = item.handle.layout.slots[item.index].stride
    ordered = torch.empty_strided(local.shape, stride, dtype=local.dtype, device=local.device)
    return ordered.copy_(local).as_strided((local.numel(),), (1,))
