"""The optimizer-state methods of ``FullyShardedDataParallel``: each checks its arguments and delegates."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..config import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictSettings,
    StateDictType,
)
from ..errors import CheckpointError, ConfigError, FsdpWarning, UsageError, describe
from ..runtime.unit import Unit
from .model import StateHooks
from .optim_load import optim_state_to_load
from .optim_local import local_optim_state, local_optim_state_to_load
from .optim_rekey import rekey_optim_state
from .optim_save import Delivery, save_optim_state
from .optim_scatter import scatter_optim_state
from .sharded import axes_mesh
from .tensor_parallel import tensor_rank
from .types import common_settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..init.build import BuildArguments

__all__ = ["OptimStateInterface"]


class OptimStateInterface:
    """What every wrapper inherits: static methods that take the model, wrapped or holding wrappers, first."""

    _unit: Unit
    _state_hooks: StateHooks
    _arguments: BuildArguments

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state, keyed by names in the unwrapped model, as the current state-dict type asks.

        ``FULL_STATE_DICT``: whole tensors, for any world size, wrapping, exposure, or the unwrapped model.
        ``SHARDED_STATE_DICT``: a DTensor of this rank's slices in place of each, for torch.distributed.checkpoint.
        ``LOCAL_STATE_DICT``: the optimizer's own state dict, without communication, for the same wrapping and world
        size only.

        Collective: every rank of every unit's process group (none for ``LOCAL_STATE_DICT``); one launch a unit.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_state_dict: ``optim.state_dict()``, if it was changed.  Without ``param_groups`` the result has none.
            group: Whose first rank keeps the result, with ``rank0_only``; that of the outermost unit if None.

        Returns:
            ``{"state": {fqn: {...}}, "param_groups": [...]}``; an empty dict on ranks that the current
            ``optim_state_dict_config`` leaves out.

        Raises:
            UsageError: If the optimizer holds parameters that the model does not have.
            CheckpointError: If a state tensor has neither its parameter's shape nor one element.
        """
        settings = _settings_of(model)
        config = settings.optim_state_dict_config
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return local_optim_state(optim, optim_state_dict, to_cpu=config.offload_to_cpu)
        if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            _warn_without_state(optim)
        units = _units_in(model)
        return save_optim_state(
            model, units, optim, optim_state_dict, _delivery(model, settings, config, group)
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """This rank's part of an optimizer state, to be given to ``optim.load_state_dict``.

        Collective: none; with DTensors every rank of every unit's process group, one launch a unit; with
        ``rank0_only`` every rank of ``group``.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_state_dict: As :meth:`optim_state_dict` returns it (of any type but ``LOCAL_STATE_DICT``, unless that
                is the current one), or the state dict of a plain optimizer over the unwrapped model; the same on every
                rank.  If the current config is ``FullOptimStateDictConfig(rank0_only=True)``, ranks but the first of
                ``group`` may give an empty dict or None.  It is not changed.  Without ``param_groups`` the result has
                none either: the caller adds them.
            is_named_optimizer: Whether ``optim`` keys its own state dict by the names in ``model.named_parameters()``.
            load_directly: Also load it into ``optim``.
            group: Where ``rank0_only`` looks for the first rank; that of the outermost unit if None.

        Raises:
            CheckpointError: If the dict does not fit; it names the parameter.
        """
        settings = _settings_of(model)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            local = local_optim_state_to_load(optim, optim_state_dict or {})
        elif _is_rank0_only(settings) and not _all_have(
            optim_state_dict, among := group or _group_of_all(model)
        ):
            units = _units_in(model)
            local = scatter_optim_state(model, units, optim, optim_state_dict or None, among)
        else:
            local = _to_load(model, optim, optim_state_dict)
        if is_named_optimizer:
            local = _by_exposed_name(model, optim, local)
        if load_directly:
            optim.load_state_dict(local)
        return local

    # -- the older interfaces --------------------------------------------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """As :meth:`optim_state_dict` with ``FULL_STATE_DICT``, on the CPU, whatever the current type.

        Collective: every rank of every unit's process group.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_input: Deprecated and not needed: what ``optim`` was built from.
            rank0_only: Whether ranks but the first of ``group`` get an empty dict.
            group: That of the outermost unit if None.
        """
        _warn_of_input(optim_input)
        keep = not rank0_only or _is_first(model, group)
        return save_optim_state(model, _units_in(model), optim, None, Delivery(keep=keep))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """As :meth:`optim_state_dict` with ``SHARDED_STATE_DICT``, whatever the current type.

        Collective: every rank of every unit's process group.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_input: Deprecated and not needed: what ``optim`` was built from.
            group: Accepted for its name: the units' own groups take part.
        """
        _warn_of_input(optim_input)
        delivery = Delivery(to_cpu=False, meshes=_meshes(model))
        return save_optim_state(model, _units_in(model), optim, None, delivery)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a whole state that every rank has, to be given to ``optim.load_state_dict``.

        Parameters that no wrapper manages and the state does not name are left out: add their numbers, and state if
        there is any, before loading; ``optim.load_state_dict`` refuses the dict without.

        Collective: none.

        Args:
            full_optim_state_dict: As :meth:`full_optim_state_dict` returns it, on every rank; not changed.
            model: A wrapper, or a module that contains some.
            optim_input: Deprecated: what the optimizer is built from; ``model.parameters()`` if ``optim`` is None too.
            optim: The optimizer to load into.

        Raises:
            CheckpointError: If the dict does not fit; it names the parameter.
        """
        source = _source(model, optim_input, optim)
        return _to_load(model, source, full_optim_state_dict, caller_completes=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: Mapping[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a state of DTensors, to be given to ``optim.load_state_dict``.

        Parameters that no wrapper manages are left out as by :meth:`shard_full_optim_state_dict`.

        Collective: every rank of every unit's process group; one launch a unit.

        Args:
            sharded_optim_state_dict: As :meth:`sharded_optim_state_dict` returns it; not changed.
            model: A wrapper, or a module that contains some.
            optim_input: Deprecated: what the optimizer is built from; ``model.parameters()`` if ``optim`` is None too.
            optim: The optimizer to load into.

        Raises:
            CheckpointError: If the dict does not fit; it names the parameter.
        """
        source = _source(model, optim_input, optim)
        return _to_load(model, source, sharded_optim_state_dict, caller_completes=True)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """As :meth:`shard_full_optim_state_dict`, where only the first rank of ``group`` has the state.

        It needs memory for one rank's pieces of one unit beyond the state itself; the other ranks need what they keep.

        Collective: every rank of ``group``.

        Args:
            full_optim_state_dict: The whole state on the first rank; None on the others.
            model: A wrapper, or a module that contains some.
            optim_input: Deprecated: what the optimizer is built from; ``model.parameters()`` if ``optim`` is None too.
            optim: The optimizer to load into.
            group: That of the outermost unit if None; the default group with hybrid sharding.

        Raises:
            CheckpointError: If the first rank has no state or it does not fit; on every rank.
        """
        source = _source(model, optim_input, optim)
        return scatter_optim_state(
            model,
            _units_in(model),
            source,
            full_optim_state_dict,
            group or _group_of_all(model),
            caller_completes=True,
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Mapping[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """A state dict of an optimizer, keyed by original names or by the numbers an unwrapped model's optimizer has.

        Groups keep their order, and so do names in a group; numbers go up, as an optimizer counts.  Collective: none.

        Args:
            optim_state_dict: Keyed either way; not changed.
            optim_state_key_type: What the result is keyed by.
            model: The unwrapped model, or the wrapped one.
            optim_input: Deprecated: what the optimizer is built from; ``model.parameters()`` if ``optim`` is None too.
            optim: Optimizer over ``model``, which says which number is which parameter.

        Raises:
            CheckpointError: If a key is not the optimizer's; it names the parameter.
        """
        source = _source(model, optim_input, optim)
        return rekey_optim_state(optim_state_dict, optim_state_key_type, model, source)


# -- what the model says -----------------------------------------------------------------------------------------------


def _wrappers_in(model: nn.Module) -> list[OptimStateInterface]:
    return [child for child in model.modules() if isinstance(child, OptimStateInterface)]


def _units_in(model: nn.Module) -> list[Unit]:
    return [wrapper._unit for wrapper in _wrappers_in(model)]


def _settings_of(model: nn.Module) -> StateDictSettings:
    return common_settings([wrapper._state_hooks.settings for wrapper in _wrappers_in(model)])


def _meshes(model: nn.Module) -> dict[Unit, DeviceMesh]:
    """The mesh of each unit's axes.  Collective: as ``axes_mesh``."""
    return {
        wrapper._unit: axes_mesh(wrapper._arguments.axes, wrapper._unit.config.device)
        for wrapper in _wrappers_in(model)
    }


def _to_load(
    model: nn.Module,
    source: torch.optim.Optimizer | Iterable[Any],
    saved: Mapping[str, Any] | None,
    *,
    caller_completes: bool = False,
) -> dict[str, Any]:
    if saved is None:
        raise CheckpointError(
            describe(
                "the optimizer state dict must have 'state' and 'param_groups' but is None",
                remedy="Pass the state on every rank, or set FullOptimStateDictConfig(rank0_only=True).",
            )
        )
    saved = _with_dtensors(saved)
    meshes = _meshes(model) if _has_dtensors(saved) else None
    return optim_state_to_load(
        model, _units_in(model), source, saved, meshes, caller_completes=caller_completes
    )


def _with_dtensors(saved: Any) -> Any:
    """``saved`` with DTensors in place of ShardedTensors, which ``load_sharded_optimizer_state_dict`` reads."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return saved
    state = {
        fqn: {name: _torch.as_dtensor(value) for name, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for fqn, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _has_dtensors(saved: Any) -> bool:
    """Whether any value is more than this rank's own; a plain class check would import torch's DTensor."""
    states = saved.get("state", {}) if isinstance(saved, Mapping) else {}
    return any(
        isinstance(value, torch.Tensor) and callable(getattr(value, "full_tensor", None))
        for values in states.values()
        for value in values.values()
    )


def _delivery(
    model: nn.Module,
    settings: StateDictSettings,
    config: OptimStateDictConfig,
    group: ProcessGroup | None,
) -> Delivery:
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return Delivery(to_cpu=config.offload_to_cpu, meshes=_meshes(model))
    keep = not _is_rank0_only(settings) or _is_first(model, group)
    return Delivery(keep=keep, to_cpu=config.offload_to_cpu)


def _is_rank0_only(settings: StateDictSettings) -> bool:
    config = settings.optim_state_dict_config
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only


def _all_have(saved: Mapping[str, Any] | None, group: ProcessGroup) -> bool:
    """Whether every rank was given a state.  Collective: every rank of ``group``."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, bool(saved), group)
    return all(told)


def _is_first(model: nn.Module, group: ProcessGroup | None) -> bool:
    """Whether this rank is the first of ``group``, or of the ranks of the outermost unit."""
    units = _units_in(model)
    if group is not None or not units:
        return (group or _torch.default_group()).rank() == 0
    is_first_of_data = units[0].shard.rank == units[0].replicate.rank == 0
    return is_first_of_data and not tensor_rank(units)


def _group_of_all(model: nn.Module) -> ProcessGroup:
    """The ranks of the outermost unit: its one group, or the default one where it has two."""
    for wrapper in _wrappers_in(model):
        unit = wrapper._unit
        if unit.shard.size == 1 or unit.replicate.size == 1:
            return wrapper._arguments.axes.whole
        break
    return _torch.default_group()


def _warn_without_state(optim: torch.optim.Optimizer) -> None:
    """Say that a dict without state is no template: torch.distributed.checkpoint loads what the dict has."""
    groups = optim.param_groups
    is_stateless = all(group.get("momentum") == 0 and "dampening" in group for group in groups)
    if not optim.state and not is_stateless:
        warnings.warn(
            "optim_state_dict of an optimizer that has no state yet: if torch.distributed.checkpoint.load is to fill "
            "this dict, it loads nothing. Make the state first, with torch.distributed.checkpoint.state_dict."
            "get_optimizer_state_dict(model, optim), or load with fsdp.checkpoint.",
            FsdpWarning,
            stacklevel=3,
        )


# -- arguments ---------------------------------------------------------------------------------------------------------


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None and not _torch.is_process_group(optim_input):
        warnings.warn(
            "The `optim_input` argument is deprecated: pass the optimizer itself as `optim`.",
            FutureWarning,
            stacklevel=4,
        )


def _source(
    model: nn.Module, optim_input: Any, optim: torch.optim.Optimizer | None
) -> torch.optim.Optimizer | Iterable[Any]:
    """What says which parameters the optimizer has.

    An optimizer in the place of ``optim_input`` is one: callers of torch's later signatures pass it third.
    """
    if isinstance(optim_input, torch.optim.Optimizer) and optim is None:
        return optim_input
    _warn_of_input(optim_input)
    if optim is not None and optim_input is not None:
        raise ConfigError("optim and optim_input were both given: pass optim alone.")
    if optim is not None:
        return optim
    return model.parameters() if optim_input is None else optim_input


def _by_exposed_name(
    model: nn.Module, optim: torch.optim.Optimizer, local: Mapping[str, Any]
) -> dict[str, Any]:
    """``local`` keyed as an optimizer of named parameters keys it."""
    names = {param: name for name, param in model.named_parameters()}
    params = list(dict.fromkeys(p for group in optim.param_groups for p in group["params"]))
    unnamed = [param for param in params if param not in names]
    if unnamed:
        raise UsageError(
            f"is_named_optimizer=True, but {len(unnamed)} parameters of the optimizer have no name in the model."
        )
    named: dict[str, Any] = {
        "state": {names[params[number]]: values for number, values in local["state"].items()}
    }
    if "param_groups" in local:
        named["param_groups"] = [
            {**group, "params": [names[params[number]] for number in group["params"]]}
            for group in local["param_groups"]
        ]
    return named
