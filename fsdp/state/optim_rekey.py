"""Optimizer state dicts of plain models, keyed by name or by number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..config import OptimStateKeyType, as_ours
from ..errors import CheckpointError, ConfigError, describe
from ..names import clean_tensor_name
from ..runtime.held import held_params, units_in
from .optim_view import copy_of, view_of

__all__ = ["rekey_optim_state"]


def rekey_optim_state(
    saved: Mapping[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    source: torch.optim.Optimizer | Iterable[Any],
) -> dict[str, Any]:
    """``saved`` keyed by name, or by the numbers an optimizer over the unwrapped ``model`` gives.

    Collective: none.  ``saved`` is not changed, and the result shares no memory with it.

    Args:
        saved: A state dict of either kind.
        key_type: What the result is keyed by.
        model: The unwrapped model, or the wrapped one.
        source: The optimizer, or its parameters (or groups of them): they say which number is which parameter.

    Raises:
        ConfigError: If ``key_type`` is no :class:`OptimStateKeyType`.
        CheckpointError: If ``saved`` mixes names and numbers, or has a key the optimizer has not; names it.
    """
    key_type = as_ours(key_type, OptimStateKeyType)
    if not isinstance(key_type, OptimStateKeyType):
        raise ConfigError(f"optim_state_key_type is {key_type!r}: expected an OptimStateKeyType.")
    keys = dict.fromkeys(
        [*saved["state"], *(key for group in saved["param_groups"] for key in group["params"])]
    )
    kinds = {isinstance(key, int) for key in keys}
    if len(kinds) > 1:
        name = next(key for key in keys if not isinstance(key, int))
        raise CheckpointError(
            describe("the optimizer state dict mixes names and numbers", fqn=str(name)),
            fqn=str(name),
        )
    by_number = key_type is OptimStateKeyType.PARAM_ID
    held = held_params(model, units_in(model))
    in_order = dict.fromkeys(
        fqn for group in view_of(model, held, source).group_names for fqn in group
    )
    names: dict[int | str, str] = dict(enumerate(in_order))
    new: Mapping[Any, Any] = {key: key for key in keys}
    if kinds == {not by_number}:
        numbers = {fqn: number for number, fqn in names.items()}
        for item in held:
            if item.fqn in numbers:
                numbers.update(dict.fromkeys(item.aliases, numbers[item.fqn]))
        new = numbers if by_number else names
    return {
        "state": {
            _found(new, key): {name: copy_of(value) for name, value in values.items()}
            for key, values in saved["state"].items()
        },
        "param_groups": [
            {
                **{name: copy_of(value) for name, value in group.items() if name != "params"},
                "params": _in_order(_found(new, key) for key in group["params"]),
            }
            for group in saved["param_groups"]
        ],
    }


def _in_order(keys: Iterable[Any]) -> list[Any]:
    """The keys of a group as they are loaded: numbers go up, since an optimizer counts its parameters through."""
    listed = list(keys)
    return sorted(listed) if all(isinstance(key, int) for key in listed) else listed


def _found(new: Mapping[Any, Any], key: Any) -> Any:
    clean = clean_tensor_name(key) if isinstance(key, str) else key
    if clean not in new:
        raise CheckpointError(
            describe(
                f"the optimizer state dict has {key!r}, which the optimizer of this model has not",
                fqn=key if isinstance(key, str) else None,
                remedy="Give the model and the parameters the state was saved from.",
            ),
            fqn=key if isinstance(key, str) else None,
        )
    return new[clean]
