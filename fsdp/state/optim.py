"""Optimizer state under original names: gathered a unit at a time, cut into shards again on load.

The canonical form is ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``, where a tensor
of a parameter's shape is whole and everything else is as the optimizer keeps it for that parameter.  A parameter
without state stays without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..errors import CheckpointError, UsageError, describe, name_some
from ..flat.handle import FlatParamHandle
from ..flat.views import slot_view
from ..names import clean_tensor_name
from ..runtime.full_params import gather_flat
from ..runtime.unit import Unit

__all__ = ["full_optim_state", "optim_state_to_load"]


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """Where the optimizer's state of one original parameter is.

    Attributes:
        fqn: Name in the unwrapped model.
        key: The parameter the optimizer holds: the original one, or the flat one it lies in.
        unit: The unit that owns it, None for a parameter no unit manages.
        handle: Its handle, likewise.
        index: Its place in the handle.
    """

    fqn: str
    key: nn.Parameter
    unit: Unit | None = None
    handle: FlatParamHandle | None = None
    index: int = 0


def _held_params(model: nn.Module, units: Sequence[Unit]) -> list[_Held]:
    """Every parameter of the unwrapped model, in the order of units, unmanaged ones last.

    Collective: none.
    """
    held = []
    prefixes = {module: clean_tensor_name(name) for name, module in model.named_modules()}
    for unit in units:
        prefix = prefixes[unit.module]
        for handle in unit.handles:
            for index, managed in enumerate(handle.params):
                key = managed.param if handle.orig_mode else handle.flat_param
                fqn = f"{prefix}.{managed.fqn}" if prefix else managed.fqn
                held.append(_Held(fqn, key, unit, handle, index))
    managed_params = {item.key for item in held}
    for name, param in model.named_parameters():
        if param not in managed_params:
            held.append(_Held(clean_tensor_name(name), param))
    return held


# -- save --------------------------------------------------------------------------------------------------------------


def full_optim_state(
    model: nn.Module,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None = None,
    *,
    keep: bool = True,
    to_cpu: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """The optimizer's state in the canonical form.

    Collective: every rank of ``group`` (the default group if None) and of every unit's shard group; one exchange of
    small objects, and one gather a unit however many tensors its state has.

    Args:
        model: What the optimizer trains; a wrapper or a module that contains some.
        units: The units in it.
        optimizer: Holds the exposed parameters.
        state_dict: The optimizer's own state dict, if it is not ``optimizer.state_dict()``.
        keep: Whether this rank keeps the result; it takes part either way.
        to_cpu: Whether tensors are moved to the CPU as they come.
        group: Ranks to agree with on which parameters have state.

    Returns:
        The canonical form, or an empty dict where ``keep`` is False.

    Raises:
        UsageError: If the optimizer holds parameters that are not the model's.
        CheckpointError: If a state tensor has neither its parameter's shape nor one element.
    """
    if units:
        units[0].gate.enter("optim_state_dict")
    held = _held_params(model, units)
    ids, groups = _by_id(optimizer, state_dict)
    _check_known(optimizer, held)
    local = _local_state(optimizer, state_dict, ids)
    described = _agree([_describe(item, local.get(item.key, {})) for item in held], group)
    state: dict[str, dict[str, Any]] = {}
    for unit, members in _by_unit(held, described):
        gathered = _gather_unit(unit, members, local, to_cpu=to_cpu, keep=keep)
        if keep:
            state.update(gathered)
    if not keep:
        return {}
    return {"state": state, "param_groups": _named_groups(groups, ids, held)}


def _by_id(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None
) -> tuple[dict[nn.Parameter, int], list[dict[str, Any]]]:
    """The id of each parameter in the optimizer's own state dict, and its groups."""
    ids: dict[nn.Parameter, int] = {}
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            ids.setdefault(param, len(ids))
    groups = (state_dict or optimizer.state_dict())["param_groups"]
    return ids, groups


def _local_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    ids: Mapping[nn.Parameter, int],
) -> dict[nn.Parameter, dict[str, Any]]:
    if state_dict is None:
        return {
            cast("nn.Parameter", param): dict(state) for param, state in optimizer.state.items()
        }
    return {
        param: dict(state_dict["state"][i]) for param, i in ids.items() if i in state_dict["state"]
    }


def _check_known(optimizer: torch.optim.Optimizer, held: Sequence[_Held]) -> None:
    known = {item.key for item in held}
    strange = sum(
        param not in known for group in optimizer.param_groups for param in group["params"]
    )
    if strange:
        raise UsageError(
            describe(
                f"the optimizer holds {strange} parameters that the model does not have",
                remedy="Build the optimizer from model.parameters() after wrapping, or wrap with "
                "use_orig_params=True.",
            )
        )


@dataclass(frozen=True, slots=True)
class _Description:
    """What state a parameter has on one rank: dtypes of sharded tensors, and all other values as they are."""

    tensors: dict[str, torch.dtype]
    others: dict[str, Any]


def _describe(item: _Held, state: Mapping[str, Any]) -> _Description:
    tensors: dict[str, torch.dtype] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            others[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        elif item.handle is None or value.shape == item.key.shape:
            tensors[name] = value.dtype
        elif value.numel() == 1:
            others[name] = value.detach().cpu()
        else:
            raise CheckpointError(
                describe(
                    f"the optimizer keeps {name!r} of shape {tuple(value.shape)}: expected the parameter's own shape "
                    f"{tuple(item.key.shape)} or a scalar",
                    fqn=item.fqn,
                    remedy="Optimizers that need whole matrices do not fit flat shards.",
                ),
                fqn=item.fqn,
            )
    return _Description(tensors, others)


def _agree(local: list[_Description], group: Any) -> list[_Description]:
    """For each parameter the state any rank has of it (a rank without a piece may have none)."""
    if dist.get_world_size(group) == 1:
        return local
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, local, group=group)
    merged = []
    for per_rank in zip(*everyone, strict=True):
        tensors: dict[str, torch.dtype] = {}
        others: dict[str, Any] = {}
        for description in per_rank:
            for name, dtype in description.tensors.items():
                tensors.setdefault(name, dtype)
            for name, value in description.others.items():
                others.setdefault(name, value)
        merged.append(_Description(tensors, others))
    return merged


def _by_unit(
    held: Sequence[_Held], described: Sequence[_Description]
) -> Iterable[tuple[Unit | None, list[tuple[_Held, _Description]]]]:
    units: dict[Unit | None, list[tuple[_Held, _Description]]] = {}
    for item, description in zip(held, described, strict=True):
        units.setdefault(item.unit, []).append((item, description))
    return units.items()


def _gather_unit(
    unit: Unit | None,
    members: Sequence[tuple[_Held, _Description]],
    local: Mapping[nn.Parameter, Mapping[str, Any]],
    *,
    to_cpu: bool,
    keep: bool,
) -> dict[str, dict[str, Any]]:
    """The state of one unit's parameters, whole."""
    state: dict[str, dict[str, Any]] = {
        item.fqn: dict(description.others)
        for item, description in members
        if description.tensors or description.others
    }
    if unit is None:
        for item, description in members:
            for name in description.tensors:
                state[item.fqn][name] = _copied(local[item.key][name], to_cpu=to_cpu)
        return state
    wanted = _wanted_flats(members)
    shards = [_shard_of(handle, name, dtype, local) for handle, name, dtype in wanted]
    wholes = gather_flat(unit, shards, [handle for handle, _, _ in wanted])
    if keep:
        for (handle, name, _), whole in zip(wanted, wholes, strict=True):
            for item, description in members:
                if item.handle is handle and name in description.tensors:
                    view = slot_view(whole, handle.layout.slots[item.index])
                    state[item.fqn][name] = _copied(view, to_cpu=to_cpu)
    return state


def _wanted_flats(
    members: Sequence[tuple[_Held, _Description]],
) -> list[tuple[FlatParamHandle, str, torch.dtype]]:
    """Which state tensors to gather: each name of each handle once."""
    wanted: dict[tuple[FlatParamHandle, str], torch.dtype] = {}
    for item, description in members:
        assert item.handle is not None
        for name, dtype in description.tensors.items():
            wanted.setdefault((item.handle, name), dtype)
    return [(handle, name, dtype) for (handle, name), dtype in wanted.items()]


def _shard_of(
    handle: FlatParamHandle,
    name: str,
    dtype: torch.dtype,
    local: Mapping[nn.Parameter, Mapping[str, Any]],
) -> torch.Tensor:
    """This rank's state tensor ``name`` of a whole handle, ``[shard_numel]``; zeros where there is none."""
    shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.device)
    for param, view in zip(handle.exposed, handle.split_shard(shard), strict=True):
        value = local.get(param, {}).get(name)
        if value is not None:
            view.copy_(value)
    return shard


def _copied(value: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    value = value.detach()
    return value.to("cpu", copy=True) if to_cpu else value.clone()


def _named_groups(
    groups: Sequence[Mapping[str, Any]], ids: Mapping[nn.Parameter, int], held: Sequence[_Held]
) -> list[dict[str, Any]]:
    names: dict[int, list[str]] = {}
    for item in held:
        if item.key in ids:
            names.setdefault(ids[item.key], []).append(item.fqn)
    return [
        {**group, "params": [fqn for i in group["params"] for fqn in names.get(i, ())]}
        for group in groups
    ]


# -- load --------------------------------------------------------------------------------------------------------------


def optim_state_to_load(
    model: nn.Module,
    units: Sequence[Unit],
    optimizer: torch.optim.Optimizer,
    full: Mapping[str, Any],
) -> dict[str, Any]:
    """This rank's part of a canonical state, in the form ``optimizer.load_state_dict`` takes.

    Also takes the plain state dict of an optimizer over the unwrapped model's ``parameters()`` (ids instead of names).

    Collective: none.

    Raises:
        CheckpointError: If the dict is malformed, names parameters the model does not have, or gives one flat
            parameter contradicting values.
    """
    if "state" not in full or "param_groups" not in full:
        raise CheckpointError("the optimizer state dict lacks 'state' or 'param_groups'.")
    held = _held_params(model, units)
    full = _by_name(model, held, full)
    _check_names(held, full)
    ids, _ = _by_id(optimizer, None)
    by_key: dict[nn.Parameter, list[_Held]] = {}
    for item in held:
        by_key.setdefault(item.key, []).append(item)
    state: dict[int, dict[str, Any]] = {}
    for param, number in ids.items():
        local = _cut(by_key.get(param, []), full["state"])
        if local:
            state[number] = local
    return {"state": state, "param_groups": _numbered_groups(optimizer, ids, by_key, full)}


def _by_name(model: nn.Module, held: Sequence[_Held], full: Mapping[str, Any]) -> Mapping[str, Any]:
    """``full`` keyed by name, if it is the dict of a plain optimizer keyed by position."""
    if not any(isinstance(key, int) for group in full["param_groups"] for key in group["params"]):
        return full
    order = _original_order(model, held)
    numbers = sorted({key for group in full["param_groups"] for key in group["params"]})
    if numbers != list(range(len(order))):
        raise CheckpointError(
            f"the optimizer state dict numbers {len(numbers)} parameters: expected {len(order)}, those of the "
            "unwrapped model in order. Rekey it by name first."
        )
    return {
        "state": {order[number]: value for number, value in full["state"].items()},
        "param_groups": [
            {**group, "params": [order[number] for number in group["params"]]}
            for group in full["param_groups"]
        ],
    }


def _original_order(model: nn.Module, held: Sequence[_Held]) -> list[str]:
    """Names in the order ``parameters()`` of the unwrapped model has."""
    place: dict[str, tuple[int, int]] = {}
    modules = {module: index for index, (_, module) in enumerate(model.named_modules())}
    for item in held:
        if item.handle is None:
            owner, _, name = item.fqn.rpartition(".")
            found = next(
                module
                for path, module in model.named_modules()
                if clean_tensor_name(path) == owner and name in _torch.parameter_table(module)
            )
            siblings = list(_torch.parameter_table(found))
            place[item.fqn] = (modules[found], siblings.index(name))
        else:
            site = item.handle.params[item.index].sites[0]
            place[item.fqn] = (modules[site.module], site.siblings.index(site.name))
    return sorted(place, key=lambda fqn: place[fqn])


def _check_names(held: Sequence[_Held], full: Mapping[str, Any]) -> None:
    known = {item.fqn for item in held}
    for item in held:
        if item.handle is not None:
            prefix = item.fqn.removesuffix(item.handle.params[item.index].fqn)
            known.update(prefix + site.fqn for site in item.handle.params[item.index].sites)
    unknown = [fqn for fqn in full["state"] if fqn not in known]
    if unknown:
        raise CheckpointError(
            f"the optimizer state dict has state for parameters the model does not have: {name_some(unknown)}."
        )


def _cut(items: Sequence[_Held], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one parameter the optimizer holds, from the whole state of what lies in it."""
    present = [(item, state[item.fqn]) for item in items if item.fqn in state]
    if not present:
        return {}
    handle = items[0].handle
    if handle is None:
        return {name: _cloned(value) for name, value in present[0][1].items()}
    local: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, values in present for name in values):
        tensors = [(item, values[name]) for item, values in present if name in values]
        first = tensors[0][1]
        if (
            isinstance(first, torch.Tensor) and first.dim() > 0 and _is_shaped(*tensors[0])
        ) or _is_scalar_param(*tensors[0], name):
            local[name] = _cut_tensor(handle, name, tensors)
        else:
            local[name] = _only_value(name, tensors)
    return local


def _is_shaped(item: _Held, value: Any) -> bool:
    assert item.handle is not None
    return (
        isinstance(value, torch.Tensor)
        and tuple(value.shape) == item.handle.layout.slots[item.index].shape
    )


def _is_scalar_param(item: _Held, value: Any, name: str) -> bool:
    """Whether a 0-dimensional value is the elementwise state of a 0-dimensional parameter, not a counter."""
    return _is_shaped(item, value) and name != "step"


def _cut_tensor(
    handle: FlatParamHandle, name: str, tensors: Sequence[tuple[_Held, Any]]
) -> torch.Tensor:
    """This rank's part of state ``name``: of one piece in orig mode, of the whole shard in flat mode."""
    first = tensors[0][1]
    shard = torch.zeros(handle.layout.shard_numel, dtype=first.dtype, device=handle.device)
    for item, value in tensors:
        if not _is_shaped(item, value):
            raise CheckpointError(
                describe(
                    f"optimizer state {name!r} has shape {tuple(getattr(value, 'shape', ()))}: expected "
                    f"{handle.layout.slots[item.index].shape}",
                    fqn=item.fqn,
                ),
                fqn=item.fqn,
            )
        handle.cut_whole(item.index, value, out=shard)
    if handle.orig_mode:
        return handle.split_shard(shard)[tensors[0][0].index].clone()
    return shard


def _only_value(name: str, tensors: Sequence[tuple[_Held, Any]]) -> Any:
    """The one value of a state that is not elementwise; a flat parameter can not keep several."""
    item, first = tensors[0]
    for other, value in tensors[1:]:
        if not _same(first, value):
            raise CheckpointError(
                describe(
                    f"optimizer state {name!r} differs between {item.fqn!r} and {other.fqn!r}, which lie in one flat "
                    "parameter",
                    fqn=other.fqn,
                    remedy="Load it into a model wrapped with use_orig_params=True.",
                ),
                fqn=other.fqn,
            )
    return _cloned(first)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _numbered_groups(
    optimizer: torch.optim.Optimizer,
    ids: Mapping[nn.Parameter, int],
    by_key: Mapping[nn.Parameter, Sequence[_Held]],
    full: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The saved hyper-parameters of each of the optimizer's groups, found by the names in it."""
    saved = full["param_groups"]
    group_of = {fqn: index for index, group in enumerate(saved) for fqn in group["params"]}
    numbered = []
    for index, group in enumerate(optimizer.param_groups):
        names = [item.fqn for param in group["params"] for item in by_key.get(param, ())]
        sources = dict.fromkeys(group_of[name] for name in names if name in group_of)
        if len(sources) > 1:
            raise CheckpointError(
                describe(
                    f"parameters of group {index} come from several groups of the saved optimizer "
                    f"({sorted(sources)})",
                    fqn=names[0],
                    remedy="Give the optimizer the same groups; with several groups use use_orig_params=True.",
                ),
                fqn=names[0],
            )
        source = next(iter(sources), index if index < len(saved) else None)
        options = dict(saved[source]) if source is not None else dict(group)
        options["params"] = [ids[param] for param in group["params"]]
        numbered.append(options)
    return numbered
