"""Which modules, parameters and buffers a wrapper leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.topology import Axes
from ..errors import ConfigError, ConfigTypeError, FsdpWarning, name_some

__all__ = ["Ignored", "resolve_ignored", "warn_of_trainable"]


@dataclass(frozen=True, slots=True)
class Ignored:
    """What is left alone, by identity.

    Attributes:
        modules: Ignored modules with everything below them, except what a wrapper below them manages.
        params: Their parameters, and parameters ignored one by one.
        buffers: Their buffers.
    """

    modules: set[nn.Module]
    params: set[nn.Parameter]
    buffers: set[torch.Tensor]


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    *,
    is_wrapped: Callable[[nn.Module], bool],
) -> Ignored:
    """Turn the two arguments into sets.

    Collective: none.

    Args:
        root: The module that is being wrapped.
        ignored_modules: The constructor's argument: any iterable of modules.
        ignored_states: The constructor's argument: any iterable of either modules or parameters.
        is_wrapped: Whether a module is a wrapper.

    Raises:
        ConfigTypeError: If an argument is not iterable, holds something else, or mixes parameters and modules.
        ConfigError: If both are given, or a wrapper is to be ignored.

    Warns:
        FsdpWarning: If ``root`` itself is ignored.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigError(
            "Cannot pass both ignored_modules and ignored_states at the same time: pass ignored_states alone."
        )
    name = "ignored_modules" if ignored_states is None else "ignored_states"
    listed = _listed(name, ignored_modules if ignored_states is None else ignored_states)
    params = [item for item in listed if isinstance(item, nn.Parameter)]
    modules = [item for item in listed if isinstance(item, nn.Module)]
    may_hold_params = name == "ignored_states"
    if len(modules) != len(listed) and not (may_hold_params and len(params) == len(listed)):
        kinds = sorted({type(item) for item in listed}, key=repr)
        expected = "all nn.Parameter or all nn.Module" if may_hold_params else "nn.Module"
        raise ConfigTypeError(f"{name} expects {expected} list elements but got types {kinds}.")
    for module in modules:
        if is_wrapped(module):
            raise ConfigError(f"`{name}` should not include FSDP modules.")
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            "parameters being ignored: none is sharded, and their gradients are not reduced.",
            FsdpWarning,
            stacklevel=3,  # where the user wraps
        )
    below: set[nn.Module] = set()
    for module in modules:
        _collect(module, below, is_wrapped)
    owned = {param for module in below for param in module.parameters(recurse=False)}
    buffers = {buffer for module in below for buffer in module.buffers(recurse=False)}
    return Ignored(below, owned | set(params), buffers)


def warn_of_trainable(root: nn.Module, ignored: Ignored, axes: Axes) -> None:
    """Say, once a model, that nobody averages the gradients of ignored parameters.  Collective: none."""
    groups = [group for group in (axes.shard, axes.replicate) if group is not None]
    several = any(group.size() > 1 for group in groups)
    if not several or root in ignored.modules or any(group.rank() for group in groups):
        return
    names = [
        name
        for name, param in root.named_parameters()
        if param in ignored.params and param.requires_grad
    ]
    if names:
        warnings.warn(
            f"ignored parameters are trainable, and their gradients are not averaged over ranks: {name_some(names)}. "
            "Freeze them, average their gradients yourself, or pass their modules as replicated_modules instead.",
            FsdpWarning,
            stacklevel=3,  # where the user wraps
        )


def _listed(name: str, items: Iterable[object] | None) -> list[object]:
    if items is None:
        return []
    if isinstance(items, torch.Tensor | str):  # iterable, but not over what is meant
        raise ConfigTypeError(f"`{name}` should be an iterable but got one {type(items).__name__}.")
    try:
        return list(items)
    except TypeError:
        raise ConfigTypeError(
            f"`{name}` should be an iterable but got {type(items).__name__}."
        ) from None


def _collect(
    module: nn.Module, found: set[nn.Module], is_wrapped: Callable[[nn.Module], bool]
) -> None:
    if module in found or is_wrapped(module):
        return
    found.add(module)
    for child in module.children():
        _collect(child, found, is_wrapped)
