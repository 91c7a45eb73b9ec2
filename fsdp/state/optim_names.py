"""Saved optimizer states brought to canonical names, and their groups matched with an optimizer's; plain dicts only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import CheckpointError, describe, name_some
from ..names import clean_tensor_name
from ..runtime.held import Held
from .optim_view import OptimizerView, copy_of

__all__ = [
    "SavedState",
    "groups_to_load",
    "in_canonical_names",
    "is_elementwise",
    "without_unmanaged",
]

_NOT_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state under the names the model has.

    Attributes:
        state: The state of each parameter that has some.
        groups: The parameter groups, with names; None if it was saved without.
        counters: Names of values that are one number a parameter, whatever its shape (``step``, say).
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]] | None
    counters: frozenset[str]


def in_canonical_names(
    held: Sequence[Held], view: OptimizerView, saved: Mapping[str, Any] | None
) -> SavedState:
    """``saved`` keyed by each parameter's first name, checked against the model and the optimizer.

    Collective: none.  ``saved`` is not changed.

    Raises:
        CheckpointError: If it is malformed, mixes names and numbers, numbers other parameters than the optimizer's,
            names one the model has not, or leaves out one the optimizer trains.  Names the parameter.
    """
    if not isinstance(saved, Mapping) or not _has_content(saved):
        what = f"is a {type(saved).__name__}" if not isinstance(saved, Mapping) else "lacks one"
        raise CheckpointError(
            f"the optimizer state dict must have 'state' and 'param_groups' (or some state, by name) but {what}. Pass "
            "what optim_state_dict or torch.optim.Optimizer.state_dict returned."
        )
    names = _names_of_keys(held, view, saved)
    primary = {alias: item.fqn for item in held for alias in item.aliases}
    primary.update((item.fqn, item.fqn) for item in held)
    unknown = [name for name in names.values() if name not in primary]
    if unknown:
        raise CheckpointError(
            describe(
                "the optimizer state dict has state or groups for parameters the model does not have: "
                f"{name_some(unknown)}",
                fqn=unknown[0],
                remedy="Load it into the model it was saved from.",
            ),
            fqn=unknown[0],
        )
    state = {primary[names[key]]: values for key, values in saved["state"].items()}
    if "param_groups" not in saved:
        return SavedState(state, None, _counters(held, state))
    groups = [
        {**group, "params": [primary[names[key]] for key in group["params"]]}
        for group in saved["param_groups"]
    ]
    _check_complete(held, view, groups)
    return SavedState(state, groups, _counters(held, state))


def without_unmanaged(
    held: Sequence[Held], view: OptimizerView, saved: Mapping[str, Any] | None
) -> OptimizerView:
    """The optimizer without the parameters that no wrapper manages and ``saved``, keyed by name, does not name.

    What is made for such a view is for the caller to complete: the optimizer itself refuses it as it is.
    """
    if not isinstance(saved, Mapping) or not _has_content(saved):
        return view
    keys = {key for group in saved.get("param_groups", ()) for key in group["params"]}
    keys.update(saved["state"])
    named = {clean_tensor_name(key) for key in keys if isinstance(key, str)}
    out = {
        item.fqn
        for item in held
        if item.unit is None and named.isdisjoint([item.fqn, *item.aliases])
    }
    if len(named) < len(keys) or not out:
        return view
    absent = {key.name for key in view.keys if key.items[0].fqn in out}
    return replace(
        view,
        keys=tuple(key for key in view.keys if key.name not in absent),
        group_keys=[[key for key in keys if key not in absent] for keys in view.group_keys],
        group_names=[[name for name in names if name not in out] for names in view.group_names],
    )


def _has_content(saved: Mapping[str, Any]) -> bool:
    """Whether there are both parts, or the state of some parameter without groups."""
    return "state" in saved and ("param_groups" in saved or bool(saved["state"]))


def _names_of_keys(
    held: Sequence[Held], view: OptimizerView, saved: Mapping[str, Any]
) -> dict[Any, str]:
    """The name each key of ``saved`` stands for."""
    groups = saved.get("param_groups", ())
    keys = dict.fromkeys([key for group in groups for key in group["params"]])
    keys.update(dict.fromkeys(saved["state"]))
    numbers = [key for key in keys if isinstance(key, int)]
    if not numbers:
        return {key: clean_tensor_name(key) for key in keys}
    if len(numbers) < len(keys):
        name = next(key for key in keys if not isinstance(key, int))
        raise CheckpointError(
            describe(
                f"the optimizer state dict mixes key types: names and numbers, {numbers[0]} among them",
                fqn=str(name),
                remedy="Bring it to one with rekey_optim_state_dict.",
            ),
            fqn=str(name),
        )
    order = [key for group in groups for key in group["params"]]
    names = dict(zip(order, _names_in_order(held, view, groups), strict=True))
    stray = [key for key in saved["state"] if key not in names]
    if stray:
        raise CheckpointError(
            f"the optimizer state dict has state number {stray[0]}, which is in none of its groups."
        )
    return names


def _names_in_order(
    held: Sequence[Held], view: OptimizerView, groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The names of numbered parameters, group by group, as an optimizer over the unwrapped model has them."""
    sizes = [len(group["params"]) for group in groups]
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        return [clean_tensor_name(name) for group in groups for name in group["param_names"]]
    if sizes == [len(names) for names in view.group_names]:
        return [name for names in view.group_names for name in names]
    every = [item.fqn for item in held]
    trained = [item.fqn for item in held if item.key.requires_grad]
    for candidates in (every, trained):
        if len(groups) == 1 and sizes[0] == len(candidates):
            return candidates
    raise CheckpointError(
        f"the optimizer state dict numbers its parameters, in groups of {sizes}: expected "
        f"{[len(names) for names in view.group_names]} as the optimizer has, or one group of all {len(every)} "
        f"parameters from {every[0] if every else ''!r} on. Rekey it by name first (rekey_optim_state_dict)."
    )


def _check_complete(
    held: Sequence[Held], view: OptimizerView, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a state that leaves out a parameter the optimizer trains."""
    saved = {name for group in groups for name in group["params"]}
    frozen = {item.fqn for item in held if not item.key.requires_grad}
    missing = [
        name
        for names in view.group_names
        for name in names
        if name not in saved and name not in frozen
    ]
    if missing:
        raise CheckpointError(
            describe(
                f"the optimizer trains parameters that the optimizer state dict does not name: {name_some(missing)}",
                fqn=missing[0],
                remedy="Load the state of the same model; for a new parameter add its name to the saved group it "
                "belongs to, and it starts without state.",
            ),
            fqn=missing[0],
        )


def _counters(held: Sequence[Held], state: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Which values are one number for parameters of several elements, and so for those without dimensions too."""
    found = {"step"}
    for item in held:
        if item.shape:
            found.update(
                name
                for name, value in state.get(item.fqn, {}).items()
                if not (isinstance(value, torch.Tensor) and value.dim())
            )
    return frozenset(found)


def is_elementwise(item: Held, name: str, value: Any, counters: Collection[str]) -> bool:
    """Whether a saved value has one element for each of the parameter's, so that it is cut as the parameter is.

    A tensor without dimensions of a parameter without dimensions is, unless it is one of ``counters``.

    Raises:
        CheckpointError: If it is a tensor of another shape, of more than one element.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if tuple(value.shape) == item.shape:
        return bool(value.dim()) or name not in counters
    if value.numel() == 1:
        return False
    raise CheckpointError(
        describe(
            f"optimizer state {name!r} has shape {tuple(value.shape)}: expected {item.shape}",
            fqn=item.fqn,
            remedy="Load the state of the same model and the same kind of optimizer.",
        ),
        fqn=item.fqn,
    )


def groups_to_load(view: OptimizerView, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyper-parameters ``saved`` has for each of the optimizer's groups, with its own keys as ``params``.

    Groups are found by the names in them; one without parameters takes the saved one at its place, if that is free.

    Raises:
        CheckpointError: If a group's parameters come from several saved ones, or from those of another optimizer.
    """
    group_of = {name: at for at, group in enumerate(saved) for name in group["params"]}
    sources: list[int | None] = []
    for number, names in enumerate(view.group_names):
        found: dict[int, str] = {}
        for name in names:
            if name in group_of:
                found.setdefault(group_of[name], name)
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise CheckpointError(
                describe(
                    f"parameters of group {number} come from several groups of the saved optimizer, {first!r} from "
                    f"another than {second!r}",
                    fqn=second,
                    remedy="Give the optimizer the same groups; where they divide one flat parameter, wrap with "
                    "use_orig_params=True.",
                ),
                fqn=second,
            )
        sources.append(next(iter(found), None))
    taken = set(sources)
    numbered = []
    for number, source in enumerate(sources):
        is_free = source is None and number < len(saved) and number not in taken
        chosen = number if is_free else source
        if chosen is None:
            options = dict(view.groups[number])
        else:
            group = saved[chosen]
            options = {
                name: copy_of(value) for name, value in group.items() if name not in _NOT_OPTIONS
            }
            _check_same_kind(view, options, number)
        numbered.append({**options, "params": list(view.group_keys[number])})
    return numbered


def _check_same_kind(view: OptimizerView, options: Mapping[str, Any], number: int) -> None:
    """Refuse hyper-parameters that lack what the optimizer reads, beyond what it fills in for older versions."""
    if view.optimizer is None:
        return
    defaults = getattr(view.optimizer, "defaults", {})  # an optimizer around another may have none
    expected = defaults or view.groups[number]
    needed = [name for name in expected if name not in options]
    if not needed:
        return
    # As torch does on loading: the class itself knows what to add to states of its earlier versions.
    probe = type(view.optimizer).__new__(type(view.optimizer))
    group = {**options, "params": []}
    with contextlib.suppress(Exception):
        probe.__setstate__({"defaults": dict(defaults), "state": {}, "param_groups": [group]})
    missing = [name for name in needed if name not in group]
    if missing:
        fqn = next(iter(view.group_names[number]), None)
        raise CheckpointError(
            describe(
                f"the saved state is of another optimizer class: {type(view.optimizer).__name__} needs "
                f"{name_some(missing)}, the saved group has {name_some(options)}",
                fqn=fqn,
                remedy="Build the optimizer that was saved.",
            ),
            fqn=fqn,
        )
