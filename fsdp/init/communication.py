"""Changes to how units communicate, made once between construction and the first forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..comm.compression import Compression
from ..comm.topology import Axes, NodeGroups, node_groups
from ..errors import ConfigError, ConfigTypeError, TrainingStateError, UnsupportedError, describe
from ..runtime.spread import partial_units
from ..runtime.unit import Unit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["compress_units", "register_hook"]


def register_hook(units: Sequence[Unit], state: object, hook: Callable[..., None]) -> None:
    """Let ``hook`` reduce the gradients of ``units``, outermost first.

    Collective: none.
    """
    if not callable(hook):
        raise ConfigError(f"The communication hook must be callable but got {hook!r}.")
    _check_open("register_comm_hook", units)
    partial = partial_units(units)
    if partial:
        raise UnsupportedError(
            describe(
                "a communication hook has one state, and so one process group, but this model has units over several",
                unit=partial[0].name,
                remedy="Use compress_communication, which compresses over each unit's own group.",
            ),
            unit=partial[0].name,
        )
    for unit in units:
        _check_arguments(hook, unit)
    for unit in units:
        unit.averaging.hook = hook
        unit.averaging.hook_state = state


def compress_units(axes: Mapping[Unit, Axes], compression: Compression) -> None:
    """Compress what the units send, outermost first.

    Collective: every rank of their groups.
    """
    if not isinstance(compression, Compression):
        raise ConfigTypeError(
            f"compression is a {type(compression).__name__}: expected a fsdp.comm.compression.Compression."
        )
    units = list(axes)
    _check_open("compress_communication", units)
    for unit in units:
        _check_compressible(unit, compression)
    nodes: dict[ProcessGroup, NodeGroups] = {}
    for unit, (group, size) in {
        unit: (axes[unit].shard, unit.shard.size) for unit in units
    }.items():
        of_group = None
        if compression.needs_nodes and group is not None and size > 1:
            if group not in nodes:
                unit.gate.enter("compress_communication")
                nodes[group] = node_groups(group, compression.ranks_per_node)
            of_group = nodes[group]
        unit.compress(compression, of_group)


def _check_open(call: str, units: Sequence[Unit]) -> None:
    """Raise unless ``units`` are a whole tree that has not communicated yet and nothing is registered."""
    first = units[0]
    if first.index != 0:
        raise TrainingStateError(f"{call} can only be called on a root instance.")
    if any(unit.averaging.hook is not None for unit in units):
        raise TrainingStateError("A communication hook is already registered")
    if first.compression is not None:
        raise TrainingStateError(f"{call}: the communication of this model is compressed already.")
    if first.root.started:
        raise TrainingStateError(f"Call {call} before the first forward.")


def _check_arguments(hook: Callable[..., Any], unit: Unit) -> None:
    """Raise if ``hook`` can not be called as ``unit`` will call it."""
    try:
        signature = inspect.signature(hook)
    except ValueError:  # written in C
        return
    if next(iter(signature.parameters), None) == "self":
        return  # a method that is not bound: the reference's users register such, and the first call tells
    names = ("state", "grad", "output") if unit.is_sharded else ("state", "grad")
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ConfigTypeError(
            describe(
                f"the communication hook takes {signature}, but under {unit.config.strategy.name} it is called as "
                f"hook({', '.join(names)}): {error}",
                unit=unit.name,
                remedy="See fsdp.comm.hooks for both forms; output may have the default None to serve both.",
            )
        ) from error


def _check_compressible(unit: Unit, compression: Compression) -> None:
    if not unit.is_sharded:
        raise UnsupportedError(
            describe(
                "compress_communication has nothing to work on under NO_SHARD: parameters are not gathered",
                unit=unit.name,
                remedy="Register a communication hook, fsdp.comm.hooks.bf16_compress_hook for example.",
            )
        )
    if compression.secondary_shard and unit.config.any_rank:
        raise UnsupportedError(
            describe(
                "secondary_shard=True needs all ranks to gather a unit in the same phase, which "
                "allow_unused='any_rank' does not promise",
                unit=unit.name,
                remedy="Leave one of them out.",
            )
        )
