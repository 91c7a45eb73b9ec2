"""Enums and configuration values: what users choose.  Validated when built, readable when printed.

Pure: no process groups, no modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, ConfigTypeError

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]


class ShardingStrategy(Enum):
    """What is sharded, and when parameters are whole.

    Members:
        FULL_SHARD: Parameters, gradients, optimizer state; parameters are whole only while their unit runs (ZeRO-3).
        SHARD_GRAD_OP: The same, but parameters stay whole from forward to backward: one gather less, more memory.
        NO_SHARD: Everything on every rank; gradients are all-reduced (as DDP).
        HYBRID_SHARD: FULL_SHARD inside a group of ranks, replicas across groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a group of ranks, replicas across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When the next unit's gather starts in the backward.

    Members:
        BACKWARD_PRE: Before the current unit's gradients are computed: most overlap, one more unit in memory.
        BACKWARD_POST: After they are computed and the current unit is freed: less of both.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """What ``state_dict()`` returns.

    Members:
        FULL_STATE_DICT: Whole tensors under original names.
        LOCAL_STATE_DICT: Each unit's flat shards of this rank.
        SHARDED_STATE_DICT: Original names, each rank's part of each tensor.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """How an optimizer state dict names parameters: by name, or by position."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


class TrainingState(Enum):
    """What a tree of units is doing."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class _ShortRepr:
    """Prints only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)  # type: ignore[arg-type]
            if getattr(self, item.name) != item.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _check_float_dtype(where: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise ConfigTypeError(
            f"{where} is {value!r}, a {type(value).__name__}: expected a torch.dtype such as "
            "torch.bfloat16, or None."
        )
    if not value.is_floating_point:
        raise ConfigError(f"{where} is {value}: expected a floating-point dtype.")


def _check_flags(owner: object, *names: str) -> None:
    """Refuse what is not a truth value: the string ``"False"`` would count as true."""
    for name in names:
        value = getattr(owner, name)
        if value not in (0, 1):  # numpy's booleans are equal to these too
            raise ConfigTypeError(
                f"{type(owner).__name__}.{name} is {value!r}, a {type(value).__name__}: "
                "expected True or False."
            )


def _module_classes(owner: object, name: str) -> tuple[type[nn.Module], ...]:
    given = getattr(owner, name)
    classes = () if given is None else (given,) if isinstance(given, type) else tuple(given)
    for item in classes:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ConfigTypeError(
                f"{type(owner).__name__}.{name} holds {item!r}: expected classes of modules."
            )
    return classes


def _checked_rules(rules: object) -> dict[type[nn.Module] | str, torch.dtype] | None:
    """A copy of ``rules``, so that nothing changes a frozen policy from outside."""
    if rules is None:
        return None
    if not isinstance(rules, Mapping):
        raise ConfigTypeError(
            f"MixedPrecision.rules is a {type(rules).__name__}: expected a mapping from module classes or name "
            "patterns to dtypes."
        )
    for key, dtype in rules.items():
        if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
            raise ConfigTypeError(
                f"MixedPrecision.rules has the key {key!r}: expected a class of modules or a name pattern."
            )
        if dtype is None:
            raise ConfigTypeError(f"MixedPrecision.rules[{key!r}] is None: expected a torch.dtype.")
        _check_float_dtype(f"MixedPrecision.rules[{key!r}]", dtype)
    return dict(rules)


@dataclass(frozen=True, repr=False)
class MixedPrecision(_ShortRepr):
    """Dtypes of computation, reduction and buffers; None leaves the dtype as it is.

    Shards, and so the optimizer's state and checkpoints, keep the dtype the model was built with, unless
    ``master_dtype`` says otherwise.  Only floating-point tensors are ever cast.

    Attributes:
        param_dtype: Dtype of gathered parameters, of computation, and of the outermost unit's floating inputs.  Half
            the width halves the bytes of every gather, and costs a cast of the shard before it.
        reduce_dtype: Dtype in which gradients are accumulated and reduced; ``param_dtype`` if None.  A wider one
            costs bytes on the wire and keeps sums over many ranks exact.
        buffer_dtype: Dtype floating buffers are cast to before the first forward.  The originals are kept, so state
            dicts hold every bit of a buffer that the model has not changed.  Not implied by ``param_dtype``.
        keep_low_precision_grads: Leave ``.grad`` in ``param_dtype`` instead of the shard's dtype: half the memory of
            gradients, for optimizers that cast for themselves.
        cast_forward_inputs: Cast the floating inputs of every unit, not only of the outermost: for units whose
            ``param_dtype`` differs from that of the unit before them.
        cast_root_forward_inputs: Cast the floating inputs of the outermost unit.
        _module_classes_to_ignore: Modules of these classes become units that are not cast (with an
            ``auto_wrap_policy``; batch norms by default, whose statistics need full precision); floating inputs are
            cast to their dtype and outputs back.  Without a policy batch norms stay in their unit and compute in the
            dtype of their statistics.
        rules: Another dtype than ``param_dtype`` for some modules: by class, or by name in the wrapped module with
            ``*`` and ``?``; the first rule that matches holds for a module and everything in it.  The parameters stay
            in the unit they are in, and in its one gather; the module's floating inputs are cast to the dtype and its
            outputs back to that of the first input.
        output_dtype: Dtype of the floating outputs of the outermost unit (``float32`` for a loss in full precision).
        master_dtype: Dtype of the shards of trainable parameters that were built in a lower one: what the optimizer
            steps and checkpoints hold.  Computation stays in ``param_dtype``, or in the dtype they were built in.
            With None they are trained in the low dtype, of which a warning says how many; the low dtype itself
            as ``master_dtype`` says that this is meant.
        full_precision_in_eval: Gather and compute in the shards' dtype in forwards without gradients of a model in
            ``eval()`` mode.

    Raises:
        ConfigTypeError: If a dtype is no ``torch.dtype``, a flag no truth value, a class no module class, or a rule
            neither a class nor a name.
        ConfigError: If a dtype is not floating-point.

    Example:
        >>> MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
    rules: Mapping[type[nn.Module] | str, torch.dtype] | None = None
    output_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "master_dtype"):
            _check_float_dtype(f"{type(self).__name__}.{name}", getattr(self, name))
        _check_flags(
            self,
            "keep_low_precision_grads",
            "cast_forward_inputs",
            "cast_root_forward_inputs",
            "full_precision_in_eval",
        )
        classes = _module_classes(self, "_module_classes_to_ignore")
        object.__setattr__(self, "_module_classes_to_ignore", classes)
        object.__setattr__(self, "rules", _checked_rules(self.rules))

    def __hash__(self) -> int:
        shown = (getattr(self, item.name) for item in fields(self) if item.name != "rules")
        return hash((*shown, tuple((self.rules or {}).items())))


@dataclass(frozen=True, repr=False)
class CPUOffload(_ShortRepr):
    """Where shards rest between uses; see ``docs/how-to/offload.md``.

    Attributes:
        offload_params: Keep parameter shards and gradients on the CPU, where the optimizer then runs: device memory
            in exchange for a copy in and out of every unit, and for the slower optimizer.
        offload_optimizer: The same, but the device keeps a copy of its shard in the compute dtype: one copy to the
            device a forward instead of one a gather, for the memory of that copy.  What leaves the device is what
            the optimizer needs: the shards it steps, their gradients, its state.
        folder: Keep shards and gradients in files mapped from this folder, on a disk, for models larger than the
            host's memory; with :class:`fsdp.optim.PagedOptimizer` optimizer states too.

    Raises:
        ConfigTypeError: If a flag is no truth value, or ``folder`` no path.
        ConfigError: If both flags are set, or ``folder`` alone.
    """

    offload_params: bool = False
    offload_optimizer: bool = False
    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_flags(self, "offload_params", "offload_optimizer")
        if self.folder is not None and not isinstance(self.folder, str | os.PathLike):
            raise ConfigTypeError(
                f"CPUOffload.folder is a {type(self.folder).__name__}: expected a path or None."
            )
        if self.offload_params and self.offload_optimizer:
            raise ConfigError(
                "CPUOffload has both offload_params and offload_optimizer: offload_params takes the optimizer along "
                "already; set offload_optimizer alone to keep a copy of the shards on the device."
            )
        if self.folder is not None and not self.is_on:
            raise ConfigError(
                f"CPUOffload.folder is {str(self.folder)!r} but nothing is offloaded: set offload_params=True, or "
                "offload_optimizer=True."
            )

    @property
    def is_on(self) -> bool:
        """Whether shards rest on the host."""
        return bool(self.offload_params or self.offload_optimizer)


# The configs below are not frozen: accelerate and what is built on it assign to their fields between saves.


@dataclass(repr=False)
class StateDictConfig(_ShortRepr):
    """How ``state_dict()`` delivers.

    Attributes:
        offload_to_cpu: Move each tensor to the CPU as soon as its unit is gathered: the device holds one whole unit
            at a time, for the price of the copies.
    """

    offload_to_cpu: bool = False

    def __post_init__(self) -> None:
        _check_flags(self, *(item.name for item in fields(self)))


@dataclass(repr=False)
class FullStateDictConfig(StateDictConfig):
    """For ``FULL_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`StateDictConfig`.
        rank0_only: Only rank 0 of each unit's group keeps tensors; the others return an empty dict.  Every rank must
            still make the call.
    """

    rank0_only: bool = False


@dataclass(repr=False)
class LocalStateDictConfig(StateDictConfig):
    """For ``LOCAL_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`StateDictConfig`.
    """


@dataclass(repr=False)
class ShardedStateDictConfig(StateDictConfig):
    """For ``SHARDED_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`StateDictConfig`.
        _use_dtensor: Accepted for its name; values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass(repr=False)
class OptimStateDictConfig(_ShortRepr):
    """How ``optim_state_dict()`` delivers.

    Attributes:
        offload_to_cpu: Move state tensors to the CPU.
    """

    offload_to_cpu: bool = True

    def __post_init__(self) -> None:
        _check_flags(self, *(item.name for item in fields(self)))


@dataclass(repr=False)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For ``FULL_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`OptimStateDictConfig`.
        rank0_only: Only rank 0 of the group keeps state; the others return an empty dict.  Every rank must still
            make the call.
    """

    rank0_only: bool = False


@dataclass(repr=False)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For ``LOCAL_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`OptimStateDictConfig`; off by default here.
    """

    offload_to_cpu: bool = False


@dataclass(repr=False)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For ``SHARDED_STATE_DICT``.

    Attributes:
        offload_to_cpu: See :class:`OptimStateDictConfig`.
        _use_dtensor: Accepted for its name; values are always DTensors.
    """

    _use_dtensor: bool = False


@dataclass(repr=False)
class StateDictSettings(_ShortRepr):
    """What ``state_dict_type`` sets.

    Attributes:
        state_dict_type: What state dicts hold.
        state_dict_config: How model state dicts are delivered.
        optim_state_dict_config: How optimizer state dicts are delivered.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


def as_ours(value: Any, *kinds: type) -> Any:
    """``value`` as one of our ``kinds`` if it is torch's class of the same name; otherwise ``value`` itself.

    So that programs may hold torch's enums and configs beside our wrapper.  Collective: none.
    """
    given = type(value)
    for kind in kinds:
        if given is kind or given.__name__ != kind.__name__:
            continue
        if issubclass(kind, Enum) and isinstance(value, Enum):
            return kind[value.name]
        if is_dataclass(value):
            known = {item.name for item in fields(kind) if item.init}
            held = {item.name for item in fields(value)} & known
            return kind(**{name: getattr(value, name) for name in held})
    return value
