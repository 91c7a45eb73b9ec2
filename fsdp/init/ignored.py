"""Which modules, parameters and buffers a wrapper leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError, FsdpWarning

__all__ = ["Ignored", "resolve_ignored"]


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
        ConfigTypeError: If an argument is not iterable or holds something else.
        ConfigError: If both are given, kinds are mixed, or a wrapper is to be ignored.

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
    if len(params) + len(modules) != len(listed) or (params and name == "ignored_modules"):
        kinds = sorted({type(item).__name__ for item in listed})
        raise ConfigTypeError(
            f"{name} should be an iterable of torch.nn.Module's"
            f"{' or of torch.nn.Parameter' if name == 'ignored_states' else ''} but got {kinds}."
        )
    if params and modules:
        raise ConfigError("ignored_states should hold either parameters or modules, not both.")
    for module in modules:
        if is_wrapped(module):
            raise ConfigError(f"`{name}` should not include FSDP modules.")
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself: all of its parameters "
            "stay as they are.",
            FsdpWarning,
            stacklevel=3,  # where the user wraps
        )
    below: set[nn.Module] = set()
    for module in modules:
        _collect(module, below, is_wrapped)
    owned = {param for module in below for param in module.parameters(recurse=False)}
    buffers = {buffer for module in below for buffer in module.buffers(recurse=False)}
    return Ignored(below, owned | set(params), buffers)


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
