"""``FullyShardedDataParallel``: the public face.  Arguments are folded once; every method is a short delegate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from . import _torch
from .adapters import teach
from .assembly import put_wrappers_in_place, start_root, wrap_child
from .comm.topology import resolve_axes
from .config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
)
from .copies import CopiedWrapper
from .errors import (
    TrainingStateError,
    UsageError,
    describe,
)
from .flat.shown import show_flat_params
from .init.arguments import check_offload, divisor_of, of_type, one_of, override, policy_named
from .init.build import (
    BuildArguments,
    build_units,
    check_not_wrapped,
    compute_device,
    plan_overrides,
)
from .init.foreign import check_foreign
from .init.ignored import resolve_ignored, warn_of_trainable
from .init.renormed import check_renormed
from .init.replicated import resolve_replicated
from .init.tensor_parallel import check_tensor_parallel
from .init.ties import find_ties
from .joined import JoinedWrapper
from .names import (
    FSDP_WRAPPED_MODULE,
    clean_tensor_name,
    join_names,
)
from .optim.clip import clip_pieces
from .plan.auto import AutoWrapPolicy, reads_nothing_in_backward
from .properties import own_unit, units_in, wrappers_in
from .report import Explanation, PrecisionReport, explain, precision_report, warn_of_wrapping
from .runtime.full_params import summon_units
from .runtime.unit import Unit
from .state.model import StateHooks
from .state.model_interface import ModelStateInterface, clean_incompatible_keys
from .state.optim_interface import OptimStateInterface
from .wrap import ParamExecOrderWrapPolicy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(
    ModelStateInterface, OptimStateInterface, CopiedWrapper, JoinedWrapper
):
    """Shard a module's parameters, gradients and optimizer state over ranks; gather parameters just in time.

    The module is wrapped in place: parameters are flattened, each rank keeps its shard, and the module's own
    forward gathers what it needs, however it is called.  Training equals one process on the whole batch.  Gradients
    are averaged over ranks.

    Collective: every rank of the process group builds the same wrapper.

    Args:
        module: What to wrap, on one device or on the meta device.
        process_group: Ranks to shard over; the default group if None.  With hybrid sharding a pair
            ``(shard_group, replicate_group)``.
        sharding_strategy: ``FULL_SHARD`` if None.
        cpu_offload: Where shards rest; on the device if None.
        auto_wrap_policy: Which submodules become units of their own (see ``fsdp.wrap``); ``"auto"`` chooses by sizes
            and repetition (:class:`fsdp.plan.auto.AutoWrapPolicy`), and gathers an embedding for the forward only;
            None for none.
        backward_prefetch: When the next gather of the backward starts; None for when it is needed.
        mixed_precision: Dtypes of computation, reduction and buffers; nothing is cast if None.
        ignored_modules: Modules whose parameters and buffers are left alone: their gradients stay local.
        param_init_fn: Initialises one module that has meta tensors; its ``reset_parameters`` if None.
        device_id: Device to compute on; units are moved there one at a time.  If it is None, where the parameters are;
            from the CPU to the current accelerator if the process group only communicates there (NCCL).
        sync_module_states: Give every rank the first rank's parameters and buffers.
        forward_prefetch: Accepted for its name: the next gather of the forward always starts early, in the order of the
            last iteration.
        limit_all_gathers: Accepted for its name: gathers in flight are always bounded, without blocking the host.
        use_orig_params: Show users their own parameters (over this rank's pieces) instead of one flat parameter.
        ignored_states: Parameters or modules to leave alone; excludes ``ignored_modules``.
        device_mesh: Instead of ``process_group``: 1-D, or 2-D ``(replicate, shard)`` with hybrid sharding.
        allow_unused: ``"any_rank"`` if ranks may use different parameters or units in a step, or in another order; what
            a rank did not use counts as a zero gradient.  Parameters then stay whole from forward to backward.  With
            None such a step is an error.  What no rank uses never gets a gradient either way.
        replicated_modules: Modules to keep whole on every rank: their gradients are averaged, they are clipped, saved
            and stepped with the rest, and their parameters keep their shapes.  For small modules whose code uses
            its parameters in ways of its own; costs their memory on every rank.
        gradient_divisor: What summed gradients are divided by, if not by the number of ranks: for units whose gradients
            sum over more data than their ranks' (experts, see ``docs/how-to/mixture-of-experts.md``).  Policies may
            give one for single units.

    Raises:
        ConfigError: If an argument is wrong or contradicts another, before anything is changed.

    Example::

        model = FSDP(GPT(config), auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        model(tokens).loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()

    Source: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (PyTorch FSDP).
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        allow_unused: str | None = None,
        replicated_modules: Iterable[nn.Module] | None = None,
        gradient_divisor: float | None = None,
    ) -> None:
        super().__init__()
        teach(FullyShardedDataParallel, clip_pieces)
        check_not_wrapped(module, _is_wrapped)
        for unit in _outermost_units(module).values():
            unit.root.tree.follow()
        strategy = of_type(
            "sharding_strategy", sharding_strategy, ShardingStrategy, ShardingStrategy.FULL_SHARD
        )
        axes = resolve_axes(strategy, process_group, device_mesh)
        ignored = resolve_ignored(module, ignored_modules, ignored_states, is_wrapped=_is_wrapped)
        replicated = resolve_replicated(module, replicated_modules, ignored, _is_wrapped)
        self._exec_order_policy = (
            auto_wrap_policy if isinstance(auto_wrap_policy, ParamExecOrderWrapPolicy) else None
        )
        if self._exec_order_policy is not None:
            auto_wrap_policy = self._exec_order_policy.init_policy
            forward_prefetch = True
        arguments = BuildArguments(
            axes=axes,
            strategy=strategy,
            cpu_offload=of_type("cpu_offload", cpu_offload, CPUOffload, CPUOffload()),
            backward_prefetch=of_type(
                "backward_prefetch", backward_prefetch, BackwardPrefetch, None
            ),
            mixed_precision=of_type(
                "mixed_precision", mixed_precision, MixedPrecision, MixedPrecision()
            ),
            param_init_fn=param_init_fn,
            device=compute_device(module, device_id, ignored, axes.whole),
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            allow_unused=one_of("allow_unused", allow_unused, (None, "any_rank")),
            gradient_divisor=divisor_of(gradient_divisor),
        )
        check_offload(arguments)
        if isinstance(auto_wrap_policy, str):
            auto_wrap_policy = policy_named(auto_wrap_policy, arguments)
        overrides = plan_overrides(
            module, auto_wrap_policy, arguments, ignored, _is_wrapped, override, replicated
        )
        warn_of_trainable(module, ignored, axes)
        check_tensor_parallel(module, ignored, axes)
        check_renormed(module, ignored, axes)
        check_foreign(module, ignored)
        ties = find_ties(module, _outermost_units(module), _is_wrapped)
        is_auto = isinstance(auto_wrap_policy, AutoWrapPolicy)
        lean = {child for child in module.modules() if is_auto and reads_nothing_in_backward(child)}
        built = build_units(module, overrides, ignored, _is_wrapped, ties)
        for child in lean & built.keys():
            built[child].unshard_in_backward(wanted=False)
        wrappers = {
            child: wrap_child(type(self), child, unit, overrides[child])
            for child, unit in built.items()
            if child is not module
        }
        put_wrappers_in_place(module, wrappers)
        self._adopt(module, built[module], arguments)
        if isinstance(auto_wrap_policy, AutoWrapPolicy):
            self._reasons = auto_wrap_policy.reasons
        start_root(self)
        if auto_wrap_policy is not None:
            warn_of_wrapping(self._unit.root)
        if callable(getattr(module, "generate", None)):
            self.register_forward_method("generate")

    def _adopt(self, module: nn.Module, unit: Unit, arguments: BuildArguments) -> None:
        """Become the wrapper of ``module``, whose unit is ``unit``."""
        self._fsdp_wrapped_module = module
        self._unit = unit
        self._arguments = arguments
        self._state_hooks = StateHooks(unit, arguments.axes)
        self._forward_methods: list[str] = []
        Joinable.__init__(self)
        self._show_flat_params()
        me = weakref.ref(self)

        def follow() -> None:
            wrapper = me()
            if wrapper is not None:
                wrapper._follow_new_handles()

        unit.on_new_handles = follow
        self.register_load_state_dict_post_hook(clean_incompatible_keys)

    def _show_flat_params(self) -> None:
        if not self._arguments.use_orig_params:
            show_flat_params(self._unit.handles, self._fsdp_wrapped_module, self)

    def _follow_new_handles(self) -> None:
        """The unit has given up parameters: see ``init.ties``."""
        before = self._state_hooks
        for module in before.hooked:
            _torch.remove_hooks_of(module, before)
        self._state_hooks = StateHooks(self._unit, self._arguments.axes)
        self._state_hooks.settings = before.settings
        self._show_flat_params()

    # -- the module ------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module.  Collective: none."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper has not are the wrapped module's.  Collective: none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are set on the wrapper; but not instead of a parameter or submodule of the wrapped module.

        Collective: none.

        Raises:
            UsageError: If ``value`` is a tensor or module and the wrapped module has a parameter or submodule of this
                name, which it would go on using (``functional_call`` comes here); or if torch's ``fully_shard`` says
                that it has taken the wrapper's parameters.
        """
        if name == _torch.SET_BY_ITS_WRAPPERS:
            raise self._unit.refuse_torchs_wrapper()
        if isinstance(value, torch.Tensor | nn.Module):
            wrapped = _torch.child_table(self).get(FSDP_WRAPPED_MODULE)
            if wrapped is not None and (
                name in _torch.parameter_table(wrapped) or name in _torch.child_table(wrapped)
            ):
                raise UsageError(
                    describe(
                        f"{name!r} was set on a wrapper, by functional_call or by hand: the wrapped module would go on "
                        "with its own",
                        unit=self._unit.name,
                        fqn=join_names(self._unit.name, name),
                        remedy="Set it on `.module`; call functional_call on the unwrapped module.",
                    ),
                    fqn=join_names(self._unit.name, name),
                )
        super().__setattr__(name, value)

    def __getitem__(self, key: int | slice) -> Any:
        """Index the wrapped module, if it is a container.  Collective: none."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward, whose own hooks gather and free parameters.

        Collective: every rank of the process group.
        """
        # The attribute would be found by __getattr__ alone, after two misses.
        wrapped: Any = _torch.child_table(self)[FSDP_WRAPPED_MODULE]
        return self._unit.call(wrapped, args, kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every submodule while its unit's whole parameters are registered; changes are kept.

        Collective: every rank of the process group.

        Raises:
            TrainingStateError: During forward, backward or ``summon_full_params``.
        """
        state = self.training_state
        if state is not TrainingState.IDLE:
            raise TrainingStateError(
                f"apply() expected to be in states [{TrainingState.IDLE}] but current state is {state}. "
                "Call it between steps, outside summon_full_params."
            )
        with summon_units([self._unit]):
            for child in self.children():
                _apply(child, fn)
            fn(self)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FullyShardedDataParallel:
        """Follow ``.to()``, ``.half()`` and the like."""
        self._unit.root.check_idle("module.to()")
        self._unit.reshard()
        super()._apply(fn, recurse)
        self._unit.follow_user_changes()
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the unwrapped model, the same set on every rank.

        With ``use_orig_params`` these are the original parameters, each over this rank's piece (1-D, possibly
        empty), otherwise the flat ones.  Collective: none.
        """
        self._unit.root.recover()
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean_tensor_name(name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers under the names they have in the unwrapped model.  Collective: none."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_tensor_name(name), buffer

    # -- the tree of units -----------------------------------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Every wrapper in ``module``, itself included, in ``modules()`` order; outermost ones only if asked.

        Collective: none.
        """
        found = wrappers_in(module, root_only)
        return [wrapper for wrapper in found if isinstance(wrapper, FullyShardedDataParallel)]

    def explain(self) -> Explanation:
        """What wrapping did: units, why ``"auto"`` chose them, parameters, bytes, the order of gathers; print it.

        Collective: none.

        Example::

            print(model.explain())
        """
        return explain(self._unit.root, self._reasons)

    def precision_report(self) -> PrecisionReport:
        """The dtypes every unit's parameters are stored, computed, reduced and updated in; print it.

        Collective: none.
        """
        return precision_report(self._unit.root)

    # -- whole parameters ------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Register the whole original parameters, in full precision, for the duration of the context.

        Collective: every rank of every unit's process group.

        Args:
            module: A wrapper, or any module that contains some.
            recurse: Whether units inside ``module``'s own are summoned too.
            writeback: Whether changes are kept; each rank keeps those in its own shard.
            rank0_only: Whether only rank 0 of each group gets to see them.
            offload_to_cpu: Whether the whole parameters are on the CPU.
            with_grads: Whether ``.grad`` is whole as well.

        Raises:
            UnsupportedError: For ``writeback`` together with ``rank0_only``.
            TrainingStateError: During forward or backward.
        """
        units = units_in(module) if recurse else own_unit(module)
        with summon_units(
            units,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _outermost_units(module: nn.Module) -> dict[nn.Module, Unit]:
    return {wrapper: wrapper._unit for wrapper in wrappers_in(module, root_only=True)}


def _apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """``module.apply(fn)``; nested wrappers' own ``apply`` would refuse, since this one has summoned."""
    if isinstance(module, FullyShardedDataParallel):
        with summon_units([module._unit]):
            for child in module.children():
                _apply(child, fn)
            fn(module)
        return
    for child in module.children():
        _apply(child, fn)
    fn(module)
