"""The optimizer-state methods of ``FullyShardedDataParallel``: each checks its arguments and delegates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import FullOptimStateDictConfig
from ..runtime.unit import Unit
from .model import StateHooks
from .optim import full_optim_state, optim_state_to_load
from .types import common_settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["OptimStateInterface"]


class OptimStateInterface:
    """What every wrapper inherits: static methods that take the model, wrapped or holding wrappers, first."""

    _unit: Unit
    _state_hooks: StateHooks

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state with whole tensors, keyed by names in the unwrapped model.

        It can be loaded at any world size, wrapping and exposure, and into an optimizer of the unwrapped model.

        Collective: every rank of ``group`` and of every unit's process group; one gather a unit.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_state_dict: ``optim.state_dict()``, if it was changed.
            group: Ranks that take part; the default group if None.

        Returns:
            ``{"state": {fqn: {...}}, "param_groups": [...]}``; an empty dict on ranks that the current
            ``optim_state_dict_config`` leaves out.

        Raises:
            UsageError: If the optimizer holds parameters that the model does not have.
            CheckpointError: If a state tensor has neither its parameter's shape nor one element.
        """
        config = common_settings(
            [wrapper._state_hooks.settings for wrapper in _wrappers_in(model)]
        ).optim_state_dict_config
        rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        return full_optim_state(
            model,
            _units_in(model),
            optim,
            optim_state_dict,
            keep=not rank0_only or dist.get_rank(group) == 0,
            to_cpu=config.offload_to_cpu,
            group=group,
        )

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """As :meth:`optim_state_dict`; an empty dict on all ranks but the first of ``group`` if ``rank0_only``.

        Collective: every rank of ``group`` and of every unit's process group.
        """
        keep = not rank0_only or dist.get_rank(group) == 0
        return full_optim_state(model, _units_in(model), optim, keep=keep, group=group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a whole optimizer state, to be given to ``optim.load_state_dict``.

        Collective: none.

        Args:
            model: A wrapper, or a module that contains some.
            optim: Optimizer over the model's parameters.
            optim_state_dict: As :meth:`optim_state_dict` returns it, or the state dict of a plain optimizer over the
                unwrapped model; the same on every rank.  It is not changed.
            is_named_optimizer: Accepted for its name.
            load_directly: Also load it into ``optim``.
            group: Accepted for its name.

        Raises:
            CheckpointError: If the dict does not fit; it names the parameter.
        """
        local = optim_state_to_load(model, _units_in(model), optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(local)
        return local


def _wrappers_in(model: nn.Module) -> list[OptimStateInterface]:
    return [child for child in model.modules() if isinstance(child, OptimStateInterface)]


def _units_in(model: nn.Module) -> list[Unit]:
    return [wrapper._unit for wrapper in _wrappers_in(model)]
