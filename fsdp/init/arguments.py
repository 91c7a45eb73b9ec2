"""The constructor's arguments: checked one by one, and changed for single units as policies say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..comm.topology import Axes, resolve_axes
from ..config import MixedPrecision, ShardingStrategy, as_ours
from ..errors import ConfigError, ConfigTypeError
from ..flat.offloaded import handle_maker
from ..plan.auto import AutoWrapPolicy, efficient_bytes
from .build import BuildArguments

__all__ = ["check_offload", "divisor_of", "of_type", "one_of", "override", "policy_named"]


def of_type(name: str, value: Any, wanted: type, default: Any) -> Any:
    """``value`` if it is a ``wanted`` (torch's class of that name is converted), ``default`` if it is None.

    Raises:
        ConfigTypeError: Otherwise.
    """
    if value is None:
        return default
    value = as_ours(value, wanted)
    if not isinstance(value, wanted):
        raise ConfigTypeError(
            f"{name} is a {type(value).__name__}: expected {wanted.__name__} or None."
        )
    return value


def policy_named(name: str, arguments: BuildArguments) -> AutoWrapPolicy:
    """The policy that a string stands for.

    Raises:
        ConfigTypeError: If it is not ``"auto"``.
    """
    if name != "auto":
        raise ConfigTypeError(
            f"auto_wrap_policy is the string {name!r}: expected a policy, a set of module classes, or 'auto'."
        )
    ranks = 1 if arguments.axes.shard is None else arguments.axes.shard.size()
    return AutoWrapPolicy(efficient_bytes(ranks, on_cpu=arguments.device.type == "cpu"))


def one_of(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """``value`` if it is among ``choices``.

    Raises:
        ConfigError: Otherwise.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} is {value!r}: expected one of {listed}.")
    return value


def divisor_of(value: Any) -> float | None:
    """``value`` as a gradient divisor.

    Raises:
        ConfigError: If it is not a positive number or None.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0:
        raise ConfigError(f"the gradient divisor is {value!r}: expected a positive number or None.")
    return number


def check_offload(arguments: BuildArguments) -> None:
    """Refuse a folder that shards can not rest in, before anything is changed.

    Raises:
        ConfigError: If it is no folder that this rank can write to.
    """
    handle_maker(arguments.cpu_offload, arguments.device)


_OVERRIDABLE = {
    "sharding_strategy": "strategy",
    "cpu_offload": "cpu_offload",
    "backward_prefetch": "backward_prefetch",
    "mixed_precision": "mixed_precision",
    "forward_prefetch": "forward_prefetch",
    "limit_all_gathers": "limit_all_gathers",
    "use_orig_params": "use_orig_params",
    "param_init_fn": "param_init_fn",
    "sync_module_states": "sync_module_states",
}


def override(arguments: BuildArguments, extra: Mapping[str, Any]) -> BuildArguments:
    """One unit's arguments: the outer ones with what its policy gave instead."""
    changes: dict[str, Any] = {}
    for name, value in extra.items():
        if name in ("process_group", "device_mesh"):
            strategy = extra.get("sharding_strategy", arguments.strategy)
            changes["axes"] = resolve_axes(
                strategy, extra.get("process_group"), extra.get("device_mesh")
            )
        elif name == "gradient_divisor":
            changes[name] = divisor_of(value)
        elif name in _OVERRIDABLE:
            changes[_OVERRIDABLE[name]] = value
        else:
            known = {*_OVERRIDABLE, "process_group", "device_mesh", "gradient_divisor"}
            raise ConfigError(
                f"a policy gave the argument {name!r} for one unit: expected one of {sorted(known)}."
            )
    if changes.get("mixed_precision", arguments.mixed_precision) is None:
        changes["mixed_precision"] = MixedPrecision()
    if "strategy" in changes and "axes" not in changes:
        changes["axes"] = axes_for(changes["strategy"], arguments)
    return dataclasses.replace(arguments, **changes)


def axes_for(strategy: ShardingStrategy, arguments: BuildArguments) -> Axes:
    """The axes of another strategy over the same ranks."""
    group = arguments.axes.whole
    return resolve_axes(strategy, group, None) if strategy != arguments.strategy else arguments.axes
