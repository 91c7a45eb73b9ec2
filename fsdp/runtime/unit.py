"""One unit: a wrapped module and what its four hook points do with the flat parameters it owns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._pytree import iter_tensors
from ..comm.collectives import Collectives
from ..comm.entry import EntryGate
from ..config import BackwardPrefetch, ShardingStrategy
from ..errors import (
    FsdpError,
    ShardedParameterError,
    TrainingStateError,
    UsageError,
    describe,
)
from ..flat.handle import FlatParamHandle
from ..flat.sharing import ManagedParam
from ..names import join_names
from . import precision
from .arrivals import Arrivals
from .averaging import Averaging
from .entrances import Entrances
from .gradients import Gradients
from .guard import remember_left_behind
from .input_uses import InputUses
from .param_hooks import ParamHooks
from .residency import SHARDED, UNSHARDED, Residency, ResidentUnit, UnitConfig

__all__ = ["Residency", "Unit", "UnitConfig", "living_units"]

# As globals, as those of ``Residency``.
_BACKWARD_PRE, _BACKWARD_POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Unit(ResidentUnit):
    """A wrapped module and the handles of the parameters it owns; the hook points of one step.

    Attributes:
        module: The wrapped module.
        modules: It and the modules below it that belong to no other unit.
        handles: One a (dtype, requires_grad) among the parameters; may be empty.
        trained_handles: Those with any parameter that wants a gradient.
        config: What the unit was asked to be.
        gradients: Where its gradients are until they are reduced.
        shard: Collectives of the ranks that share the flat parameters; exact.
        step_shard: The same for the gathers and reductions of a step: what they send may be compressed.
        compression: How, and the nodes that it looks at, if it is.
        replicate: Collectives of the ranks that hold equal shards (one rank unless hybrid or NO_SHARD).
        world_size: Ranks whose gradients are averaged: those of both.
        tensor: Collectives of the ranks over which parameters are cut beforehand (tensor parallelism); one if none is.
        gate: Where the ranks of the group that users named meet before a collective call.
        gates: That, and where replicas meet.
        group_key: What identifies the ranks of the two axes: equal for units over the same groups.
        name: FQN of the module in the unwrapped model, ``""`` for the root.
        root: The runtime this unit belongs to; set by :class:`Root`.
        index: Place in ``root.units``.
        residency: What is in memory.
        unsharded_bytes: Size of the gathered parameters.
        gradient_bytes: Size of the unsharded gradients, in the dtypes they are reduced in.
        summoned: Whether the full original parameters are registered (``summon_full_params``).
        sync_gradients: False inside ``no_sync``.
        requires_all_reduce: Whether backwards sum gradients over the replicas, and not over the shard axis only.
        unshards_in_backward: Whether backwards gather the parameters, or do without their values.
        buffer_masters: The buffers that were cast, as they were before; by module and name.
        dtype_rules: Which modules compute in another dtype than the rest (``MixedPrecision.rules``).
        rule_casts: The hooks around them.
        offloaded: Whether the shards rest on the host.
        new_reduction: Makes the reduction of the unit's gradients.
        reducing: What errors of a reduction call it.
        in_full_precision: Whether leaves are in the shards' dtype now (``full_precision_in_eval``).
        guards: Writes that put stand-ins into modules' dictionaries, in front of users' parameters; mostly none.
        guarded: Whether they are there.
        arrivals: Counts the gradients that arrive on the leaves.
        unclaimed: Parameters of its modules that no unit owns yet (see ``init.ties``).
        lenders: Units around this one that own parameters of modules inside it.
        on_new_handles: Called when the unit has other handles than before.
        averaging: By what its gradients are divided.
        on_gradients: Called when reduced gradients of the unit are in place, in the current stream's order.
    """

    __slots__ = (
        "__weakref__",
        "_aliases",
        "_backward_task",
        "_entrances",
        "_input_uses",
        "_post_hook",
        "_pre_hook",
        "_trained",
        "arrivals",
        "averaging",
        "buffer_masters",
        "dtype_rules",
        "gate",
        "gates",
        "gradient_bytes",
        "group_key",
        "lenders",
        "on_gradients",
        "on_new_handles",
        "requires_all_reduce",
        "rule_casts",
        "sync_gradients",
        "unclaimed",
        "unshards_in_backward",
    )

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        config: UnitConfig,
        shard: Collectives,
        replicate: Collectives,
        modules: Sequence[nn.Module],
        gates: Sequence[EntryGate],
    ) -> None:
        super().__init__(module, handles, config, shard, replicate, modules)
        self.gates = tuple(gates)
        self.gate = self.gates[0]
        self.group_key = (id(self.gate), shard.size, replicate.size)
        _living.add(self)
        self.buffer_masters: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self.dtype_rules = precision.DtypeRules()
        self.rule_casts: precision.RuleCasts | None = None
        self.sync_gradients = True
        self.requires_all_reduce = True
        self.unshards_in_backward = True
        self.unclaimed: tuple[ManagedParam, ...] = ()
        self.lenders: tuple[Unit, ...] = ()
        self.on_new_handles: Callable[[], None] | None = None
        self.on_gradients: Callable[[], None] | None = None
        self.averaging = Averaging(self)
        self._backward_task: int | None = None
        self._aliases = 0
        self.gradients = Gradients(self)
        self.arrivals = Arrivals(self._all_arrived)
        self._param_hooks = ParamHooks(self)
        self._input_uses = InputUses(self._use_done)
        self._entrances = Entrances(module, self.modules, self._pre_backward, self._after_inside)
        self._entrances.leave_out(self.handles)
        self._prepare()
        remember_left_behind(
            (managed.param, managed.fqn)
            for handle in self.handles
            if not handle.orig_mode
            for managed in handle.params
        )
        self._pre_hook = module.register_forward_pre_hook(
            self._pre_forward, prepend=True, with_kwargs=True
        )
        self._post_hook = module.register_forward_hook(
            self._post_forward, with_kwargs=True, always_call=True
        )

    def take_handles(self, handles: Sequence[FlatParamHandle]) -> None:
        """Own ``handles`` instead of the present ones; before any forward.  Collective: none."""
        self.handles = tuple(handles)
        for handle in self.handles:
            handle.name_with(partial(join_names, self.name))
            handle.guard_with(self.root.guard)
        self._exchange_tables()
        self._entrances.leave_out(self.handles)
        self._prepare()
        if self.on_new_handles is not None:
            self.on_new_handles()

    def remove_hooks(self) -> None:
        """Take the unit's hooks off its module, for a module that is wrapped anew."""
        self._pre_hook.remove()
        self._post_hook.remove()

    def copied(self, memo: dict[int, Any]) -> Unit:
        """A unit of the same configuration and values over copied modules, which ``memo`` knows from a deepcopy."""
        modules = [memo[id(module)] for module in self.modules]
        handles = [handle.copied(memo) for handle in self.handles]
        made = Unit(
            memo[id(self.module)],
            handles,
            self.config,
            self.shard,
            self.replicate,
            modules,
            self.gates,
        )
        for (module, name), master in self.buffer_masters.items():
            made.buffer_masters[memo[id(module)], name] = master.clone()
        made.tensor = self.tensor
        made.dtype_rules = self.dtype_rules.copied(memo)
        if self.rule_casts is not None:
            made.rule_casts = self.rule_casts.copied(made, memo)
        made.averaging.copy_settings(self.averaging)
        if self.compression is not None:
            made.compress(*self.compression)
        made.unshard_in_backward(wanted=self.unshards_in_backward)
        return made

    def _prepare(self) -> None:
        """Everything that stays the same from step to step."""
        self.in_full_precision = False
        for handle in self.handles:
            handle.use_full_precision(wanted=False)
            handle.unsharded.follow_leaves(read_again=self.unshards_in_backward)
        self._param_hooks.watch(self.handles, reduced=self.world_size > 1)
        self.unguard()
        self.guards = tuple(handle.guards for handle in self.handles if handle.guards.some)
        self._plan_gather()
        self.averaging.follow(self.handles)
        self.trained_handles = [handle for handle in self.handles if handle.requires_grad]
        dtypes = self.averaging.reduce_dtypes
        self.gradient_bytes = sum(
            handle.layout.padded_numel * dtypes[handle].itemsize for handle in self.trained_handles
        )
        self._trained = [
            leaf
            for handle in self.handles
            for leaf in handle.unsharded.leaves
            if leaf.requires_grad
        ]
        self.arrivals.watch(self._trained)

    # -- forward ---------------------------------------------------------------------------------------------------

    @_torch.never_compiled
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        root = self.root
        if self in root.stack:
            root.recover()
        recomputing = _torch.backward_task() != _torch.NO_TASK
        is_outermost = not root.stack
        if is_outermost:
            root.begin_forward(self)
        root.stack.append(self)
        if self.summoned:
            self._check_summoned_forward()
        else:
            self._unshard_for_forward(recomputing=recomputing)
            self._entrances.follow_user_hooks()
            if self._reads_frozen and torch.is_grad_enabled():
                self._input_uses.hook((args, kwargs))
        return precision.cast_inputs(self, args, kwargs, entering=is_outermost and not recomputing)

    def _unshard_for_forward(self, *, recomputing: bool) -> None:
        if recomputing:
            self.start_unshard()
            self.wait_unshard()
            for lender in self.lenders:
                lender.lend()
        else:
            if self.residency is SHARDED:
                self.follow_user_changes()
            self.root.begin_unit(self)
            if self.residency is SHARDED:
                self.start_unshard()
            self.root.prefetch_forward(self)
            self.wait_unshard()
            self._follow_versions()
            if not self._left & (self._left + 1):  # the first, second, fourth, eighth ...
                self._remember_values()
            self._aliases = self._count_aliases()
        self._active += 1
        self._show_leaves()

    def lend(self) -> None:
        """Have the parameters ready for a unit inside that is run again (see ``runtime.lenders``)."""
        self.start_unshard()
        self.wait_unshard()
        self._offer_leaves()

    @_torch.never_compiled
    def _post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        root = self.root
        if not root.stack or root.stack[-1] is not self:
            return None  # the forward failed before our own pre-forward hook ran
        root.stack.pop()
        recomputing = _torch.backward_task() != _torch.NO_TASK
        if self._active:
            self._active -= 1
            if not self._active and not recomputing:
                self._leave()
            self._after_use(output, recomputing=recomputing)
            if torch.is_grad_enabled():
                self._entrances.hook_what_inputs_hold(args, kwargs)
        if not root.stack:
            root.end_forward(self)
            if not recomputing:
                return precision.cast_output(self, output)
        return None

    def _after_use(self, output: Any, *, recomputing: bool) -> None:
        """Free the parameters, or keep them for the backward that will want them soon."""
        root = self.root
        tensors = iter_tensors(output)
        if torch.is_grad_enabled():
            self._graphs += not recomputing
            opaque = output is not None
            keep = self._is_awaited(tensors, opaque=opaque, recomputing=recomputing)
        else:
            # Reentrant checkpointing runs the forward without grad inside one with grad.
            inside = not recomputing and bool(root.stack) and root.entered_with_grad
            keep = inside and not root.reshards_after_forward(self)
        if not keep and not self._active and not self._hands_out_leaves(tensors):
            self.release()

    def _is_awaited(
        self, tensors: Sequence[torch.Tensor], *, opaque: bool, recomputing: bool
    ) -> bool:
        """Whether the parameters stay for the backward of a forward that has ended, with gradients.

        Args:
            tensors: In its output.
            opaque: Whether the output might hold other tensors, too.
            recomputing: Whether the forward ran inside a backward.
        """
        hooked = self._entrances.hook_outputs(tensors)
        if recomputing:
            return True
        if hooked:
            if self.unshards_in_backward or self.root.lockstep.on:
                self.root.order.finish(self.index)
            return not self.root.reshards_after_forward(self)
        return opaque and self.trains  # nothing will tell when whatever it holds is wanted

    def _hands_out_leaves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an output shares the gathered parameters' memory (a codebook's weight, say)."""
        for tensor in tensors:
            address = _torch.address_of(tensor)
            for handle in self._gathered:
                if handle.unsharded.covers(address):
                    return True
        return False

    def _after_inside(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._entrances.hook_inside((args, output))

    def _use_done(self) -> None:
        """Free a unit with frozen parameters once the gradients of the inputs of its last use are computed."""
        is_last = self._awaits_inputs if self.trains else not self._input_uses.open
        if is_last and self.residency is UNSHARDED and not self._active:
            self.release()

    def _check_summoned_forward(self) -> None:
        if torch.is_grad_enabled() and self.trains:
            remedy = "Leave summon_full_params first, or run the forward under torch.no_grad()."
            raise self._refuse_summoned("forward ran with gradients enabled", remedy)

    def _refuse_summoned(self, what: str, remedy: str) -> TrainingStateError:
        message = f"{what} while the full parameters are summoned"
        return TrainingStateError(describe(message, unit=self.name, remedy=remedy), unit=self.name)

    def run_method(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method of the module as if it were its forward: gathered, exposed, hooked and freed.

        Collective: every rank of the shard group.
        """
        if self.summoned:  # whole as they are; forwards of units inside check by themselves
            return method(*args, **kwargs)
        return self._run(method, args, kwargs)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the unit's module, or ``module``, which somebody has put in its place or around it.

        Collective: every rank of the shard group.
        """
        if module is self.module and _torch.runs_only(module, self._pre_hook, self._post_hook):
            return self._run(module.forward, args, kwargs)
        if _torch.SET_BY_ITS_WRAPPERS in vars(module):
            raise self.refuse_torchs_wrapper()
        return module(*args, **kwargs)

    def refuse_torchs_wrapper(self) -> UsageError:
        """The error where torch shards what the unit shards already."""
        return UsageError(
            describe(
                "torch's fully_shard, or its FullyShardedDataParallel, was applied to a module that is wrapped "
                "already: it has taken the shards for parameters",
                unit=self.name,
                remedy="Apply one of the two, to modules that the other is not around.",
            ),
            unit=self.name,
        )

    def _run(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``method`` between our two hooks, the second one also where it fails, as torch does."""
        try:
            changed = self._pre_forward(self.module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
            output = method(*args, **kwargs)
        except Exception as error:
            try:
                self._post_forward(self.module, args, kwargs, None)
            except (FsdpError, RuntimeError) as another:
                error.add_note(f"After that: {another}")
            raise
        cast = self._post_forward(self.module, args, kwargs, output)
        return output if cast is None else cast

    # -- backward --------------------------------------------------------------------------------------------------

    def unshard_in_backward(self, *, wanted: bool) -> None:
        """Set whether backwards gather the parameters.  Collective: none; every rank sets the same."""
        self.unshards_in_backward = wanted
        for handle in self.handles:
            handle.unsharded.follow_leaves(read_again=wanted)

    def _pre_backward(self, *_: Any, inside: bool = False) -> None:
        """A backward reaches an output of the unit, or something ``inside`` it.

        Where the outputs have been reached already the latter changes nothing: a user's hook may be on one rank only.
        """
        if self.summoned:
            raise self._refuse_summoned("backward ran", "Leave summon_full_params first.")
        root = self.root
        task = _torch.backward_task()
        begins = task != root.backward_task and root.enter_backward(task)
        if root.differentiable:
            root.read_again[self] = None
        if inside and not begins and (self.residency is UNSHARDED or root.is_done(self)):
            return
        self._backward_task = task
        if not self.arrivals.armed:
            self._await_gradients()
        # What is gathered now has been looked at before (see `_check_unchanged`).
        stayed = self.residency is UNSHARDED or len(self._gathered) < len(self.handles)
        if self.residency is SHARDED and (self.unshards_in_backward or root.lockstep.on):
            self.start_unshard()
        if self.config.backward_prefetch is _BACKWARD_PRE:
            root.prefetch_backward(self)
        if self.residency is not SHARDED:
            self.wait_unshard()
            if stayed:
                self._follow_versions()
            self._offer_to_inside()

    def _offer_to_inside(self) -> None:
        """Checkpointed layers inside the unit run their forwards again now, below the unit's own hooks."""
        self._offer_leaves()
        for lender in self.lenders:
            if lender.unshards_in_backward:
                lender.lend()

    def _await_gradients(self) -> None:
        """Count those that come; none of an earlier use in this backward shall be taken for one of them."""
        if self.root.lockstep.on:
            self._check_unchanged()
        if self.index in self.root.done:
            self.root.reductions.start_due()
        self._awaits_inputs = False  # of a use that a reentrant checkpoint has finished
        self.arrivals.arm()

    def gather_again(self) -> None:
        """Start gathering between forward and backward, for a graph that reads the parameters past every hook.

        Collective: every rank of the shard group.
        """
        if self.residency is SHARDED:
            self.follow_user_changes()
            self.start_unshard()
        self._follow_versions()

    def _all_arrived(self) -> None:
        """Every leaf has its gradient; or one has, and none was expected."""
        arrivals = self.arrivals
        if not arrivals.armed:
            self._unawaited()
        # Reentrant checkpoints inside the unit bring gradients in backwards of their own, perhaps several for one
        # leaf; the unit may then be finished at the end.
        is_whole = self._backward_task in (None, _torch.backward_task())
        if is_whole and not arrivals.missing and arrivals.look(self._trained):
            self.finish_backward()

    def _unawaited(self) -> None:
        """A gradient has arrived past everything that would have announced it.

        Right if the parameters were whole all the time, or their gradients have come once in this backward already.

        Raises:
            ShardedParameterError: If what computed the gradient has read freed memory.
        """
        root = self.root
        task = _torch.backward_task()
        if task != root.backward_task and root.backward_was_lost():
            root.reset()
        if self._gathers and self.residency is SHARDED and not root.is_done(self):
            fqn = self.handles[0].fqns[0]
            raise ShardedParameterError(
                describe(
                    "a backward started at a tensor from inside the unit that was kept where nobody looks (in a "
                    "closure, say), and came to the unit's parameters while they were sharded",
                    unit=self.name,
                    fqn=fqn,
                    remedy="Return the tensor from a module's forward, leave it on a module, or put it into a list or "
                    "dictionary that is an argument.",
                ),
                fqn=fqn,
            )
        if root.backward_task is None:
            root.begin_backward(task)
        self.arrivals.arm()
        self.arrivals.missing -= 1

    def finish_backward(self) -> None:
        """Reduce what has arrived (or keep it, inside ``no_sync``) and free the parameters.

        Collective: every rank of the unit's groups, unless inside ``no_sync``.
        """
        root = self.root
        if root.backward_task is None:
            root.begin_backward(_torch.backward_task())
        was_reached = self.arrivals.armed  # or what earlier backwards have left is reduced
        self.arrivals.disarm()
        self._backward_task = None
        if was_reached and self._graphs and not _torch.keeps_graph():
            self._graphs -= 1
        if self._reads_frozen or self._is_read_later():
            # Where no input wants a gradient, the end of the backward frees them.
            self._awaits_inputs = self.residency is not SHARDED
        else:
            self.release()  # first, so that parameters and the buffer of their gradients are not held together
        if self.sync_gradients:
            root.reduce(self)
        else:
            root.done.add(self.index)
            self.gradients.keep()
        if self.config.backward_prefetch is _BACKWARD_POST:
            root.prefetch_backward(self)

    def _is_read_later(self) -> bool:
        """Whether the backward will read parameters that get no gradient from it: ``x * self.scale.detach()``.

        What it has read it has let go, unless it was asked to keep the graph.
        """
        return self._aliases < self._count_aliases() and not _torch.keeps_graph()

    # -- gradients -------------------------------------------------------------------------------------------------

    @property
    def writes_to_whole(self) -> bool:
        """Whether a reduction may write into the unsharded gradient."""
        return self.averaging.writes_to_whole or self.is_compressed

    @property
    def is_sharded(self) -> bool:
        """Whether the strategy shards parameters, over however many ranks."""
        return self.config.strategy is not ShardingStrategy.NO_SHARD

    @property
    def trains(self) -> bool:
        """Whether any parameter of the unit wants a gradient."""
        return self.arrivals.expected > 0

    @property
    def accumulating(self) -> bool:
        """Whether earlier backwards have left gradients that are not reduced over all ranks yet."""
        return bool(self.gradients.kept or self.gradients.partial_sums)

    @property
    def owes_all_reduce(self) -> bool:
        """Whether sums over the shard axis wait for a sum over the replicas, which is wanted now."""
        return self.requires_all_reduce and bool(self.gradients.partial_sums)

    # -- recovery --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget a step that failed half way: gradients on the leaves, exposure, gathered parameters."""
        self._active = 0
        self._before = None
        self.arrivals.disarm()
        self.gradients.reset()
        self.unguard()
        if not self.summoned:
            self._show_sharded()
        self.reshard()


_living: weakref.WeakSet[Unit] = weakref.WeakSet()


def living_units() -> list[Unit]:
    """Every unit of the process that is still in use, in no order.  Collective: none."""
    return list(_living)
