"""``FullyShardedDataParallel``: the public face.  Arguments are folded once; every method is a short delegate."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from . import _torch
from .adapters import teach
from .comm.compression import Compression
from .comm.topology import resolve_axes
from .comm.watch import the_watch
from .config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
)
from .errors import (
    ConfigError,
    TrainingStateError,
    UnsupportedError,
    UsageError,
    describe,
)
from .flat.offloaded import home_on
from .init.arguments import check_offload, divisor_of, of_type, one_of, override, policy_named
from .init.build import (
    BuildArguments,
    build_units,
    check_not_wrapped,
    compute_device,
    plan_overrides,
)
from .init.communication import compress_units, register_hook
from .init.ignored import resolve_ignored, warn_of_trainable
from .init.replicated import resolve_replicated
from .init.tensor_parallel import check_tensor_parallel
from .init.ties import find_ties
from .names import (
    FSDP_WRAPPED_MODULE,
    clean_tensor_name,
    flat_param_name,
    join_names,
)
from .optim.clip import clip_units
from .optim.uneven import UnevenInputs, UnevenInputsHook, check_joinable, group_of_all
from .properties import WrapperProperties
from .report import Explanation, PrecisionReport, explain, precision_report, warn_of_wrapping
from .runtime.full_params import summon_units
from .runtime.offload import send_away, state_tensors
from .runtime.root import Root
from .runtime.unit import Unit
from .state.model import StateHooks
from .state.model_interface import ModelStateInterface, clean_incompatible_keys
from .state.optim_interface import OptimStateInterface
from .state.pickled import SAVING, SavedUnit, restore_unit, saved_unit
from .wrap import ParamExecOrderWrapPolicy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(
    ModelStateInterface, OptimStateInterface, WrapperProperties, Joinable
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
            and repetition (:class:`fsdp.plan.auto.AutoWrapPolicy`); None for none.
        backward_prefetch: When the next gather of the backward starts; None for when it is needed.
        mixed_precision: Dtypes of computation, reduction and buffers; nothing is cast if None.
        ignored_modules: Modules whose parameters and buffers are left alone: their gradients stay local.
        param_init_fn: Initialises one module that has meta tensors; its ``reset_parameters`` if None.
        device_id: Device to compute on; units are moved there one at a time.
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
        teach(FullyShardedDataParallel)
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
            device=compute_device(module, device_id, ignored),
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
        ties = find_ties(module, _outermost_units(module), _is_wrapped)
        built = build_units(module, overrides, ignored, _is_wrapped, ties)
        wrappers = {
            child: _wrap_child(type(self), child, unit, overrides[child])
            for child, unit in built.items()
            if child is not module
        }
        _put_wrappers_in_place(module, wrappers)
        self._adopt(module, built[module], arguments)
        _start_root(self)
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
        unit.on_new_handles = _calling(weakref.WeakMethod(self._follow_new_handles))
        self.register_load_state_dict_post_hook(clean_incompatible_keys)

    def _show_flat_params(self) -> None:
        table = _torch.parameter_table(self)
        table.clear()
        if not self._arguments.use_orig_params:
            for index, handle in enumerate(self._unit.handles):
                handle.register_flat_param(table, flat_param_name(index))

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
        """Attributes are set on the wrapper; but not instead of a parameter of the wrapped module.

        Collective: none.

        Raises:
            UsageError: If ``value`` is a tensor and the wrapped module has a parameter of this name, which it would go
                on using (``functional_call`` comes here).
        """
        if isinstance(value, torch.Tensor):
            wrapped = _torch.child_table(self).get(FSDP_WRAPPED_MODULE)
            if wrapped is not None and name in _torch.parameter_table(wrapped):
                raise UsageError(
                    describe(
                        f"{name!r} was set on a wrapper, by functional_call or by hand: the wrapped module would go on "
                        "with its own parameter",
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
        return wrapped(*args, **kwargs)

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

    def __deepcopy__(self, memo: dict[Any, Any]) -> FullyShardedDataParallel:
        """An independent wrapper, sharded in the same way over the same process groups.  Collective: none."""
        unit = self._unit
        unit.root.check_idle("copy.deepcopy")
        unit.root.tree.follow()
        unit.reshard()
        unit.follow_user_changes()
        outermost = memo.setdefault(_COPYING, self) is self
        if SAVING in memo:
            return self._record(memo)  # type: ignore[return-value]
        module = self._copied_module(memo)
        made = memo[id(self)] = _wrap_child(type(self), module, unit.copied(memo), self._arguments)
        made._exec_order_policy = self._exec_order_policy
        made._state_hooks.settings = self._state_hooks.settings
        for name in self._forward_methods:
            made.register_forward_method(name)
        if outermost:
            del memo[_COPYING]
            _start_root(made)
        return made

    def _copied_module(self, memo: dict[Any, Any]) -> nn.Module:
        """A deepcopy of the wrapped module without anything of ours on it."""
        unit = self._unit
        stale = _Stale()
        memo[id(unit)] = memo[id(self._state_hooks)] = stale
        if unit.rule_casts is not None:
            memo[id(unit.rule_casts)] = stale
        for handle in unit.handles:
            memo.update((id(stand_in), None) for stand_in in handle.stand_ins)
        module = copy.deepcopy(self._fsdp_wrapped_module, memo)
        for original in self._state_hooks.hooked:
            copied = copy.deepcopy(original, memo)  # there already, if it is still in the tree
            if isinstance(copied, nn.Module):  # an inner wrapper may be a record
                _torch.remove_hooks_of(copied, stale)
        for name in self._forward_methods:
            del vars(module)[name]
        return module

    def _record(self, memo: dict[Any, Any]) -> SavedUnit:
        module = self._copied_module(memo)
        saved = memo[id(self)] = saved_unit(
            self._unit,
            module,
            self._arguments,
            self._state_hooks.settings,
            tuple(self._forward_methods),
            memo,
        )
        return saved

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle this rank's shards and what it takes to be the same wrapper again in the same world.

        Every rank saves and loads its own: ``torch.save(model, f"model-{model.rank}.pt")``, later ``torch.load`` with
        ``weights_only=False`` once the process groups are there.  Collective: none.
        """
        memo: dict[Any, Any] = {SAVING: True}
        return _unpickled, (type(self), copy.deepcopy(self, memo))

    # -- the tree of units -----------------------------------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Every wrapper in ``module``, itself included, in ``modules()`` order; outermost ones only if asked.

        Collective: none.
        """
        found = [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]
        return [child for child in found if child.check_is_root()] if root_only else found

    def explain(self) -> Explanation:
        """What wrapping did: units, parameters, bytes, and the order of gathers; print it.

        Collective: none.

        Example::

            print(model.explain())
        """
        return explain(self._unit.root)

    def precision_report(self) -> PrecisionReport:
        """The dtypes every unit's parameters are stored, computed, reduced and updated in; print it.

        Collective: none.
        """
        return precision_report(self._unit.root)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient.  Collective: none."""
        return [param for param in self.parameters() if param.grad is not None]

    # -- training --------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate unsharded gradients, in the reduce dtype, without communication.

        The first backward outside reduces the sum of all.  Costs the memory of the unsharded gradients of this
        wrapper's units.  Collective: none.

        Raises:
            TrainingStateError: During forward or backward.
        """
        self._unit.root.check_idle("no_sync")
        units = _units_in(self)
        before = [unit.sync_gradients for unit in units]
        for unit in units:
            unit.sync_gradients = False
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.sync_gradients = value

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | torch.Tensor,
        norm_type: float | int = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale all gradients so that the norm of the unsharded gradient is at most ``max_norm``.

        Collective: every rank of every unit's process group.

        Args:
            max_norm: Upper bound of the norm.
            norm_type: Order of the norm; any number, ``inf`` included.
            error_if_nonfinite: Whether a norm that is infinite or not a number is an error that names the parameters.
                The host then waits for the norm; not inside ``Join``.

        Returns:
            The norm before clipping: 0-dimensional, on the compute device, equal on every rank.  The host does not
            wait for it.

        Raises:
            UsageError: If ``error_if_nonfinite`` and the norm is not finite; on a wrapper that is not the outermost
                one; if ``no_sync`` left gradients unreduced.
        """
        self._check_is_outermost("clip_grad_norm_")
        units = _units_in(self)
        waiting = [unit.name or "<root>" for unit in units if unit.accumulating]
        if waiting:
            raise UsageError(
                describe(
                    "clip_grad_norm_ was called while gradients of no_sync backwards are still unreduced",
                    unit=waiting[0],
                    remedy="Run the last backward of the accumulation outside no_sync.",
                )
            )
        uneven = self._unit.root.uneven
        if uneven is not None:
            if error_if_nonfinite:
                raise UsageError(
                    "error_if_nonfinite is not supported inside Join: look at the norm."
                )
            uneven.clip(float(max_norm), float(norm_type))
        return self._clip(float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)

    @torch.no_grad()
    def _clip(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        units = _units_in(self)
        managed = {param for unit in units for handle in unit.handles for param in handle.exposed}
        others = [param for param in self.parameters() if param not in managed]
        return clip_units(
            units,
            others,
            max_norm,
            norm_type,
            self.compute_device,
            error_if_nonfinite=error_if_nonfinite,
        )

    def register_forward_method(self, name: str) -> None:
        """Let the wrapped module's method ``name`` gather parameters as its forward does.

        For methods that use the module's own parameters without going through ``forward``: ``encode_text``,
        ``forward_features``, ...  Methods that only call submodules which are units need no registration, and
        ``generate`` is registered by itself.  Collective: none; calls of the method are, as calls of the module are.

        Raises:
            ConfigError: If the module has no such method.
        """
        module, unit = self._fsdp_wrapped_module, self._unit
        method = getattr(module, name, None)
        if not callable(method):
            raise ConfigError(f"{type(module).__name__} has no method {name!r} to register.")

        @functools.wraps(method)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            return unit.run_method(method, args, kwargs)

        vars(module)[name] = gathered
        self._forward_methods.append(name)

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """Divide summed gradients by ``divisor`` instead of by the number of ranks, from the next backward on.

        With a loss summed over tokens and the global number of tokens as divisor, gradients equal those of one big
        batch however tokens are spread over ranks.  None restores the mean, or what the constructor or a
        policy gave.  Communication hooks divide themselves.

        Collective: none; every rank sets the same.

        Raises:
            ConfigError: If ``divisor`` is not positive.
        """
        checked = divisor_of(divisor)
        for unit in _units_in(self):
            unit.gradient_divisor = checked

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards from now on average gradients over the replicas too, under hybrid sharding.

        For accumulation at less memory than in ``no_sync``: with False a backward sums gradients over the shard axis
        only and each rank keeps its shard of the sum, unpublished; the first backward with True adds what was left
        and sums it all over the replicas.  Nothing changes for units without replicas.

        Collective: none; every rank sets the same.

        Args:
            requires_all_reduce: Whether they do.
            recurse: Whether units inside this one's are set too.

        Raises:
            UnsupportedError: If a communication hook is registered, which averages by itself.

        Example::

            for number, batch in enumerate(micro_batches):
                model.set_requires_all_reduce(number == len(micro_batches) - 1)
                model(batch).loss.backward()
        """
        units = _units_in(self) if recurse else [self._unit]
        if any(unit.comm_hook is not None for unit in units):
            raise UnsupportedError(
                "set_requires_all_reduce does not know communication hooks, which average by themselves: accumulate in "
                "no_sync."
            )
        for unit in units:
            unit.requires_all_reduce = requires_all_reduce

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within the context, a rank that fails or stays away is an error on the ranks that wait for it.

        They learn of an exception that left the context on another rank within about a second, and of a rank that
        has not come for ``FSDP_ENTRY_TIMEOUT`` seconds (60 by default), instead of waiting for the backend's
        timeout.  The process group can not be used afterwards: restart from the last checkpoint.  Without a guard
        only ranks that wait for each other in a circle are an error, and ranks that are late a warning.  On CPU
        with gloo; NCCL has a watchdog of its own.  Collective: none; every rank enters.

        Example::

            with model.guard():
                for batch in batches:
                    train_step(model, batch)
        """
        watch = the_watch()
        if watch is None:
            yield
            return
        watch.enter_guard()
        try:
            yield
        except BaseException as error:
            watch.leave_guard(error)
            raise
        watch.leave_guard(None)

    def reset(self) -> None:
        """Forget a step that failed half way; gradients that were published stay.

        The next forward does so by itself.  Collective: none.
        """
        self._unit.root.reset()

    def offload(
        self,
        *optimizers: torch.optim.Optimizer,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Move parameters, gradients, buffers and the state of ``optimizers`` off the device, until :meth:`reload`.

        For phases in which something else needs the device (generation in reinforcement learning).  Values, and the
        identity of parameters, stay; tensors can be read, saved, loaded and stepped meanwhile, but a forward is an
        error.  Memory kept for steps is freed, torch's cache of the device included.  Costs the host memory, or the
        disk, of what moves.  Collective: none; every rank calls it between steps.

        Args:
            optimizers: Whose state to move along.
            folder: Move into files mapped from this folder instead of into (page-locked) host memory; on the CPU,
                that frees memory too.

        Raises:
            ConfigError: If ``folder`` is no folder that this rank can write to.
            TrainingStateError: During forward or backward.
            UsageError: If this is not the outermost wrapper, the model is offloaded already, ``no_sync`` has left
                gradients unreduced, or parameters are summoned.

        Example::

            model.offload(optimizer)
            rollouts = generate()
            model.reload()
        """
        self._check_is_outermost("offload")
        root = self._unit.root
        root.check_idle("offload()")
        if root.away is not None:
            raise UsageError(
                "offload() was called twice. Call reload() first, or keep it as it is."
            )
        home = home_on(folder, self.compute_device)
        for unit in root.units:
            unit.reshard()
        managed = {p for unit in root.units for handle in unit.handles for p in handle.exposed}
        others = [param for param in self.parameters() if param not in managed]
        root.away = send_away(root, home, [*others, *self.buffers()], state_tensors(optimizers))

    def reload(self) -> None:
        """Move back to the device what :meth:`offload` has moved.  Collective: none; every rank calls it.

        Raises:
            UsageError: If nothing is offloaded, or this is not the outermost wrapper.
        """
        self._check_is_outermost("reload")
        root = self._unit.root
        if root.away is None:
            raise UsageError("reload() was called but nothing is offloaded. Call offload() first.")
        away, root.away = root.away, None
        away.bring_back()
        for unit in root.units:
            unit.follow_new_leaves()

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Let ``hook`` reduce the gradients of every unit.

        It is called as ``hook(state, grad, output)`` where parameters are sharded, to leave this rank's slice of
        the mean in ``output``, and as ``hook(state, grad)`` under ``NO_SHARD``, to average ``grad`` in place.  See
        ``fsdp.comm.hooks``.  Collective: none; every rank registers the same hook.

        Raises:
            ConfigError: If ``hook`` is not callable.
            ConfigTypeError: If it can not be called with these arguments.
            TrainingStateError: If this is not the outermost wrapper, a hook or a compression is registered already,
                or a forward has run.
        """
        register_hook(_units_in(self), state, hook)

    def compress_communication(self, compression: Compression) -> None:
        """Send rounded parameters and gradients in a step; see ``docs/how-to/compress-communication.md``.

        State dicts and ``summon_full_params`` stay exact, and so does what the optimizer steps.

        Collective: every rank of the process group, with the same argument.

        Raises:
            ConfigTypeError: If ``compression`` is no ``Compression``.
            ConfigError: If ranks can not be divided into nodes as asked.
            TrainingStateError: If this is not the outermost wrapper, a hook or a compression is registered already,
                or a forward has run.
            UnsupportedError: Under ``NO_SHARD``; ``secondary_shard`` with ``allow_unused="any_rank"``.

        Example::

            model.compress_communication(Compression(weights="int8", gradients="int8"))
        """
        wrappers = FullyShardedDataParallel.fsdp_modules(self)
        axes = {wrapper._unit: wrapper._arguments.axes for wrapper in wrappers}
        compress_units(axes, compression)

    # -- uneven inputs ---------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``with Join([model])`` asks for, so that ranks may have different numbers of batches.

        Ranks without data follow the others: forwards, backwards, ``clip_grad_norm_`` and steps of the optimizers
        over the model's parameters, with the others' hyper-parameters.  Gradients are divided by the number of ranks
        that still have data.  Each forward may have one backward; evaluate under ``torch.no_grad()``.

        Collective: every rank of the process group enters the context.

        Args:
            kwargs: Of ``Join``: ``divide_by_initial_world_size=True`` divides by all ranks instead; ``optimizers``
                names the optimizers, which are otherwise found by themselves.

        Raises:
            UsageError: If this is not the outermost wrapper.
            UnsupportedError: If a communication hook is registered and gradients are not divided by all ranks.

        Example::

            with Join([model]):
                for batch in batches:  # more on some ranks than on others
                    model(batch).mean().backward()
                    model.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        """
        self._check_is_outermost("join_hook")
        root, by_all = self._unit.root, bool(kwargs.get("divide_by_initial_world_size", False))
        check_joinable(root, by_all=by_all)
        if root.uneven is not None:
            root.uneven.leave()
        root.uneven = UnevenInputs(
            root,
            self.join_process_group,
            self._notify_join,
            optimizers=kwargs.get("optimizers"),
            by_all=by_all,
        )
        return UnevenInputsHook(root.uneven, self._clip)

    def _notify_join(self) -> bool:
        """Tell ranks without data that something is to come; whether there is a context that can have such ranks."""
        enabled: bool = self._join_config.enable
        if enabled:
            Join.notify_join_context(self)
        return enabled

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` communicates.  Collective: none."""
        return self.compute_device

    @property
    def join_process_group(self) -> ProcessGroup:
        """All ranks that hold parts of the model.  Collective: none."""
        return group_of_all(self._unit.root, self.process_group)

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
        units = _units_in(module) if recurse else _own_unit(module)
        with summon_units(
            units,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

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


def _unpickled(cls: type[FullyShardedDataParallel], saved: SavedUnit) -> FullyShardedDataParallel:
    """The outermost wrapper that was pickled as ``saved``."""
    made = _restored(cls, saved, {})
    _start_root(made)
    return made


def _restored(
    cls: type[FullyShardedDataParallel],
    saved: SavedUnit,
    known: dict[int, FullyShardedDataParallel],
) -> FullyShardedDataParallel:
    """The wrapper that ``saved`` is the record of, inner ones first, each once."""
    for table in _tables_below(saved.module):
        for name, child in table.items():
            if isinstance(child, SavedUnit):
                if id(child) not in known:
                    known[id(child)] = _restored(cls, child, known)
                table[name] = known[id(child)]
    unit, arguments = restore_unit(saved)
    made = _wrap_child(cls, saved.module, unit, arguments)
    made._state_hooks.settings = saved.settings
    made.training = saved.training
    for name in saved.forward_methods:
        made.register_forward_method(name)
    return made


def _tables_below(module: nn.Module) -> list[dict[str, Any]]:
    """The child tables of ``module`` and of everything in it that no record holds."""
    tables: list[dict[str, Any]] = []
    todo: list[object] = [module]
    seen: set[nn.Module] = set()
    while todo:
        current = todo.pop()
        if isinstance(current, nn.Module) and current not in seen:
            seen.add(current)
            tables.append(_torch.child_table(current))
            todo.extend(_torch.child_table(current).values())
    return tables


_COPYING = "fsdp: the outermost wrapper that is being copied"


class _Stale:
    """Stands for a unit while its modules are copied, so that the copies of its hooks can be found and removed."""


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _units_in(module: nn.Module) -> list[Unit]:
    return [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(module)]


def _own_unit(module: nn.Module) -> list[Unit]:
    return [module._unit] if isinstance(module, FullyShardedDataParallel) else []


def _outermost_units(module: nn.Module) -> dict[nn.Module, Unit]:
    return {
        wrapper: wrapper._unit
        for wrapper in FullyShardedDataParallel.fsdp_modules(module, root_only=True)
    }


def _calling(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """A function that calls ``method`` as long as its object lives."""

    def call() -> None:
        bound = method()
        if bound is not None:
            bound()

    return call


def _wrap_child(
    cls: type[FullyShardedDataParallel],
    module: nn.Module,
    unit: Unit,
    arguments: BuildArguments,
) -> FullyShardedDataParallel:
    """The wrapper of a unit that the outer constructor has built."""
    wrapper = cls.__new__(cls)
    nn.Module.__init__(wrapper)
    wrapper._exec_order_policy = None
    wrapper._adopt(module, unit, arguments)
    wrapper.training = module.training
    return wrapper


def _put_wrappers_in_place(
    root: nn.Module, wrappers: Mapping[nn.Module, FullyShardedDataParallel]
) -> None:
    for parent in list(root.modules()):
        table = _torch.child_table(parent)
        for name, child in table.items():
            if child is not None and child in wrappers:
                table[name] = wrappers[child]


def _start_root(outer: FullyShardedDataParallel) -> None:
    """Build the runtime over every unit below ``outer``, those of wrappers made earlier included."""
    names = {
        child: clean_tensor_name(name)
        for name, child in outer.named_modules()
        if isinstance(child, FullyShardedDataParallel)
    }
    Root([wrapper._unit for wrapper in names], list(names.values()), outer)


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
