"""Modules that stay whole on every rank while their gradients are averaged: units of their own that shard nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from .. import _torch
from ..comm.topology import Axes
from ..config import ShardingStrategy
from ..errors import ConfigError, ConfigTypeError, UnsupportedError, describe, name_some
from ..plan.selection import is_never_called
from .ignored import Ignored

if TYPE_CHECKING:
    from .build import BuildArguments

__all__ = ["left_to_policy", "replicated_arguments", "resolve_replicated"]


def resolve_replicated(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
) -> list[nn.Module]:
    """The modules that become replicated units: those given, and the children of containers that are never called.

    Collective: none.

    Raises:
        ConfigTypeError: If ``modules`` is no iterable of modules.
        ConfigError: If one is the root, not below it, ignored, wrapped, or shares a parameter with a module outside.
    """
    if modules is None:
        return []
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise ConfigTypeError(
            f"replicated_modules is a {type(modules).__name__}: expected an iterable of modules."
        )
    names = {module: name for name, module in root.named_modules()}
    found: dict[nn.Module, None] = {}
    for module in modules:
        _check(module, names, ignored, is_wrapped)
        found.update(dict.fromkeys(_called(module)))
    inner = {child for module in found for child in module.modules() if child is not module}
    chosen = [module for module in found if module not in inner]
    _check_ties(root, chosen, names)
    return chosen


def _check(
    module: object,
    names: dict[nn.Module, str],
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(
            f"replicated_modules holds a {type(module).__name__}: expected modules."
        )
    kind = type(module).__name__
    if module not in names:
        raise ConfigError(f"replicated_modules holds a {kind} that is not in the wrapped module.")
    where = f"{names[module] or '<root>'!r} ({kind})"
    if not names[module]:
        raise ConfigError(
            f"replicated_modules holds {where}, the wrapped module itself: pass "
            "sharding_strategy=ShardingStrategy.NO_SHARD instead."
        )
    if module in ignored.modules:
        raise ConfigError(f"{where} is both ignored and in replicated_modules: choose one.")
    if any(is_wrapped(child) for child in module.modules()):
        raise ConfigError(
            f"replicated_modules holds {where}, which is or has a wrapper: wrap it with NO_SHARD."
        )


def _called(module: nn.Module) -> list[nn.Module]:
    """``module``, or what is in it where nothing ever calls it, so that its own hooks would not run."""
    if not is_never_called(module):
        return [module]
    return [inner for child in module.children() for inner in _called(child)]


def _check_ties(root: nn.Module, chosen: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    """Refuse parameters that a module outside uses too: they would belong to the unit around both."""
    for module in chosen:
        inside = set(module.modules())
        mine = {param: name for name, param in module.named_parameters()}
        tied = [
            f"{names[module]}.{mine[param]}"
            for other in root.modules()
            if other not in inside
            for param in _torch.parameter_table(other).values()
            if param is not None and param in mine
        ]
        if tied:
            raise ConfigError(
                describe(
                    f"replicated_modules holds parameters that modules outside use too: {name_some(tied)}",
                    unit=names[module],
                    fqn=tied[0],
                    remedy="Replicate the module that contains all of its users, or none.",
                ),
                fqn=tied[0],
                unit=names[module],
            )


def left_to_policy(ignored: Ignored, replicated: Iterable[nn.Module]) -> Ignored:
    """What a wrapping policy must leave alone: the ignored and the replicated."""
    below = {child for module in replicated for child in module.modules()}
    params = {param for module in below for param in module.parameters(recurse=False)}
    return dataclasses.replace(
        ignored, modules=ignored.modules | below, params=ignored.params | params
    )


def replicated_arguments(arguments: BuildArguments) -> BuildArguments:
    """The arguments of a replicated unit: whole parameters, shown as they are, averaged over every rank.

    Raises:
        UnsupportedError: With hybrid sharding over a part of the default group, which has no group of all ranks.
    """
    axes = arguments.axes
    whole = axes.whole
    if axes.shard is not None and axes.replicate is not None:
        whole = _torch.default_group()
        if axes.shard.size() * axes.replicate.size() != whole.size():
            raise UnsupportedError(
                "replicated_modules with hybrid sharding over a part of the default process group: wrap them with "
                "NO_SHARD over a process group of all ranks of the model."
            )
    return dataclasses.replace(
        arguments,
        strategy=ShardingStrategy.NO_SHARD,
        axes=Axes(None, whole, whole),
        use_orig_params=True,
    )
