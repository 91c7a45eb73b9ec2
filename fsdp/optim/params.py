"""The arguments of ZeroRedundancyOptimizer: what they may be, and how errors name what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .. import _torch
from ..errors import ConfigError, ConfigTypeError, describe
from ..runtime.guard import NEEDS_ALL_PARAMETERS, NOT_ELEMENTWISE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = [
    "check_dense",
    "check_group",
    "check_optimizer",
    "group_label",
    "materialize",
    "name_parameters",
]

_PARTITIONS = ("parameter", "element")


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


def check_group(process_group: Any) -> ProcessGroup:
    """The group that was named, or the default one.  Collective: none."""
    if process_group is None:
        return _torch.default_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigTypeError(
            f"process_group is a {type(process_group).__name__}: expected a ProcessGroup that this rank belongs to."
        )
    return process_group


def check_optimizer(optimizer_class: Any, partition: str, world_size: int) -> None:
    """Check that the optimizer exists as a class of torch's kind and can work on a part of the parameters."""
    if partition not in _PARTITIONS:
        raise ConfigError(f"partition={partition!r}: expected 'parameter' or 'element'.")
    if not callable(optimizer_class) or (
        isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
    ):
        raise ConfigTypeError(
            f"optimizer_class is {optimizer_class!r}: expected a subclass of torch.optim.Optimizer. "
            "Functional optimizers are not needed: with overlap_with_ddp=True any optimizer steps bucket by bucket."
        )
    if world_size == 1:
        return
    refused = NEEDS_ALL_PARAMETERS if partition == "parameter" else NOT_ELEMENTWISE
    made = getattr(optimizer_class, "func", optimizer_class)  # of a functools.partial
    for base in made.__mro__ if isinstance(made, type) else ():
        if any(name in base.__name__.lower() for name in refused):
            why = (
                "looks at all parameters at once and cannot be sharded"
                if partition == "parameter"
                else "does not update elements alone; use partition='parameter'"
            )
            raise ConfigError(f"optimizer_class {made.__name__} {why}.")


def check_dense(group: Mapping[str, Any], label: str) -> None:
    """Check that a parameter group holds no sparse parameter."""
    for position, param in enumerate(group["params"]):
        if param.layout is not torch.strided:
            names = group.get("param_names")
            raise ConfigError(
                describe(
                    f"{label}: parameter {position} is sparse ({param.layout})",
                    fqn=names[position] if names else None,
                    remedy="ZeroRedundancyOptimizer takes dense parameters of any dtype only.",
                )
            )
