"""The ``params`` argument of an optimizer: what it may be, and how errors name what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError, ConfigTypeError

__all__ = ["group_label", "materialize", "name_parameters"]


def group_label(index: int) -> str:
    """How errors name a group."""
    return f"params[{index}] (a parameter group)"


def materialize(params: Any) -> list[Any]:
    """``params`` as a list of tensors, of ``(name, tensor)`` pairs or of groups, each iterable read once.

    Raises:
        ConfigTypeError: If it is a tensor, no iterable, or holds anything else or a mixture.
        ConfigError: If it is empty.
    """
    if isinstance(params, torch.Tensor):
        raise ConfigTypeError(
            "params is a single Tensor: expected an iterable of Tensors or dicts."
        )
    if not isinstance(params, Iterable):
        raise ConfigTypeError(
            f"params is a {type(params).__name__}: expected an iterable of Tensors or dicts."
        )
    given = list(params)
    if not given:
        raise ConfigError("params is empty: ZeroRedundancyOptimizer got an empty parameter list.")
    kinds = [_kind(item) for item in given]
    for index, kind in enumerate(kinds):
        if kind is None:
            raise ConfigTypeError(
                f"params[{index}] is a {type(given[index]).__name__}: expected Tensors, (name, Tensor) pairs or dicts."
            )
        if kind != kinds[0]:
            raise ConfigTypeError(
                f"params[0] is a {kinds[0]} and params[{index}] a {kind}: expected all of one kind."
            )
    return given


def _kind(item: Any) -> str | None:
    if isinstance(item, torch.Tensor):
        return "Tensor"
    if isinstance(item, dict):
        return "dict"
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor):
        return "(name, Tensor) pair"
    return None


def name_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, str]:
    """A name for each parameter: the one it was given with, or its place."""
    names: dict[torch.Tensor, str] = {}
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{number}]['params'][{position}]"
            names[param] = group["param_names"][position] if "param_names" in group else place
    return names
