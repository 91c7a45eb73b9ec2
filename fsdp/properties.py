"""What programs ask a wrapper: its configuration, its groups, its flat parameters.

The names with an underscore are those under which tools and tests of the reference look for the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState
from .errors import TrainingStateError, UsageError, describe
from .flat.handle import FlatParamHandle
from .flat.parameter import FlatParameter
from .init.build import BuildArguments
from .runtime.unit import Unit
from .wrap import ParamExecOrderWrapPolicy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

    from .state.model import StateHooks

__all__ = ["WrapperProperties", "own_unit", "units_in", "wrappers_in"]


class WrapperProperties(nn.Module):
    """What every wrapper inherits: read-only views of its arguments and of its unit."""

    _fsdp_wrapped_module: nn.Module
    _unit: Unit
    _arguments: BuildArguments
    _exec_order_policy: ParamExecOrderWrapPolicy | None
    _state_hooks: StateHooks
    _forward_methods: list[str]
    _reasons: Mapping[str, str] = MappingProxyType({})  # why "auto" made each unit one, by name

    def check_is_root(self) -> bool:
        """Whether this wrapper is the outermost one.  Collective: none."""
        return self._unit.index == 0

    @property
    def training_state(self) -> TrainingState:
        """Whether a forward or backward is running, or parameters are summoned.  Collective: none."""
        return self._unit.root.training_state

    @property
    def process_group(self) -> ProcessGroup:
        """The group this unit is sharded over.  Collective: none."""
        return self._arguments.axes.whole

    @property
    def rank(self) -> int:
        """This rank in :attr:`process_group`.  Collective: none."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Ranks in :attr:`process_group`.  Collective: none."""
        return self.process_group.size()

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """What is sharded.  Collective: none."""
        return self._arguments.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Dtypes of computation, reduction and buffers.  Collective: none."""
        return self._arguments.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Where shards rest.  Collective: none."""
        return self._arguments.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the next gather of the backward starts.  Collective: none."""
        return self._arguments.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """As given; gathers of the forward always start early.  Collective: none."""
        return self._arguments.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """As given; gathers are always bounded.  Collective: none."""
        return self._arguments.limit_all_gathers

    @property
    def compute_device(self) -> torch.device:
        """Where the unit computes.  Collective: none."""
        return self._arguments.device

    @property
    def params(self) -> list[FlatParameter]:
        """The unit's flat parameters.  Collective: none."""
        return [handle.flat_param for handle in self._unit.handles]

    @property
    def _handles(self) -> list[FlatParamHandle]:
        return list(self._unit.handles)

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._unit.handles[0] if self._unit.handles else None

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._handle.flat_param if self._handle is not None else None

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _is_root(self) -> bool:
        return self.check_is_root()

    @property
    def _use_orig_params(self) -> bool:
        return self._arguments.use_orig_params

    @property
    def _comm_hook(self) -> Callable[..., None] | None:
        return self._unit.averaging.hook

    @_comm_hook.setter
    def _comm_hook(self, hook: Callable[..., None] | None) -> None:
        self._unit.averaging.hook = hook

    @property
    def _comm_hook_state(self) -> Any:
        return self._unit.averaging.hook_state

    @property
    def _inter_node_pg(self) -> ProcessGroup | None:
        return self._arguments.axes.replicate

    def _use_param_exec_order_policy(self) -> bool:
        """Whether :class:`ParamExecOrderWrapPolicy` was given."""
        return self._exec_order_policy is not None

    def _is_param_exec_order_prep_stage(self) -> bool:
        """Whether no iteration has been recorded yet."""
        return self._use_param_exec_order_policy() and not self._unit.root.order.last_forward

    @property
    def _fsdp_params_exec_order(self) -> list[FlatParameter]:
        """Flat parameters in the order the last complete iteration used them."""
        root = self._unit.root
        units = [root.units[index] for index in root.order.last_forward or root.order.forward]
        return [handle.flat_param for unit in units for handle in unit.handles]

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raise unless the wrapper is in one of the given states; tests of the reference call this."""
        wanted = state if isinstance(state, list) else [state]
        if self.training_state not in wanted:
            raise TrainingStateError(
                f"expected to be in states {wanted} but current state is {self.training_state}."
            )

    def _check_is_outermost(self, method: str) -> None:
        if not self.check_is_root():
            raise UsageError(
                describe(
                    f"`{method}` should only be called on the root FSDP instance",
                    unit=self._unit.name,
                    remedy="Call it on the outermost wrapper.",
                ),
                unit=self._unit.name,
            )


def wrappers_in(module: nn.Module, root_only: bool = False) -> list[WrapperProperties]:
    """Every wrapper in ``module``, itself included, in ``modules()`` order; outermost ones only if asked."""
    found = [child for child in module.modules() if isinstance(child, WrapperProperties)]
    return [wrapper for wrapper in found if not root_only or wrapper.check_is_root()]


def units_in(module: nn.Module) -> list[Unit]:
    """The units of those wrappers."""
    return [wrapper._unit for wrapper in wrappers_in(module)]


def own_unit(module: nn.Module) -> list[Unit]:
    """The unit of ``module``, if it is a wrapper."""
    return [module._unit] if isinstance(module, WrapperProperties) else []
