"""What a unit holds: its handles, whether their parameters are gathered, and what modules see meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import _torch
from ..comm.collectives import Collectives, Gather, Work
from ..comm.compression import Compression, compressed
from ..comm.entry import raise_named
from ..comm.loopback import Loopback
from ..comm.topology import NodeGroups
from ..config import BackwardPrefetch, MixedPrecision, ShardingStrategy
from ..errors import UnsupportedError, UsageError, describe
from ..flat.handle import FlatParamHandle
from ..flat.offloaded import OffloadedHandle
from ..flat.silent import keep_silent_writes
from ..flat.tables import Pending
from ..flat.views import Writes
from ..names import join_names
from .gradients import Gradients
from .offload import ReadAhead
from .param_hooks import ParamHooks
from .reduction import OffloadedReduction, Reduction
from .streams import capturing

if TYPE_CHECKING:
    from .root import Root

__all__ = ["GATHERING", "SHARDED", "UNSHARDED", "Residency", "ResidentUnit", "UnitConfig"]


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """What a unit was asked to be; one object for all units that share it.

    Attributes:
        strategy: Sharding strategy.
        mixed_precision: Dtypes; all None where nothing is cast.
        backward_prefetch: When the next gather of the backward starts; None for never.
        forward_prefetch: Kept for its name; the next gather of the forward is always started early.
        limit_all_gathers: Kept for its name; gathers are always bounded (see Note [Stream order]).
        orig_mode: ``use_orig_params``.
        any_rank: ``allow_unused="any_rank"``: ranks may use different parts of the unit, or none.
        device: Where the unit computes.
        gradient_divisor: What summed gradients are divided by; the number of ranks if None.
        reshard_after_forward: Whether parameters are freed between forward and backward.
    """

    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    orig_mode: bool
    any_rank: bool
    device: torch.device
    gradient_divisor: float | None = None
    reshard_after_forward: bool = field(init=False)

    def __post_init__(self) -> None:
        frees = self.strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        object.__setattr__(self, "reshard_after_forward", frees)


class Residency(Enum):
    """What a unit holds.

    ::

        SHARDED --start_unshard--> GATHERING --wait_unshard--> UNSHARDED --reshard--> SHARDED
    """

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


# Python 3.11 looks members up ten times more slowly than globals.
SHARDED, GATHERING, UNSHARDED = Residency


class ResidentUnit(ABC):
    """The half of a unit that gathers, exposes and frees parameters; see :class:`Unit` for its attributes.

    Slots, here and in handles, because CPython finds no method or attribute fast on an object that has more than 30.
    """

    __slots__ = (
        "_active",
        "_awaits_inputs",
        "_before",
        "_gathered",
        "_gathering",
        "_gathers",
        "_graphs",
        "_launch",
        "_left",
        "_param_hooks",
        "_pending",
        "_readable",
        "_reads_frozen",
        "_recast",
        "_shows_leaves",
        "_work",
        "_writes_silently",
        "compression",
        "config",
        "gradients",
        "guarded",
        "guards",
        "handles",
        "in_full_precision",
        "index",
        "module",
        "modules",
        "name",
        "new_reduction",
        "offloaded",
        "reducing",
        "replicate",
        "residency",
        "root",
        "shard",
        "step_shard",
        "summoned",
        "tensor",
        "trained_handles",
        "unsharded_bytes",
        "world_size",
    )

    root: Root
    gradients: Gradients
    trained_handles: list[FlatParamHandle]
    _param_hooks: ParamHooks

    def __init__(
        self,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        config: UnitConfig,
        shard: Collectives,
        replicate: Collectives,
        modules: Sequence[nn.Module],
    ) -> None:
        self.module = module
        self.modules = tuple(modules)
        self.handles = tuple(handles)
        self.config = config
        self.shard = shard
        self.replicate = replicate
        self.world_size = shard.size * replicate.size
        self.name = ""
        self.index = 0
        self.residency = SHARDED
        self.summoned = False
        self.in_full_precision = False
        self.compression: tuple[Compression, NodeGroups | None] | None = None
        self.step_shard = shard
        self._active = 0
        self._shows_leaves = False
        self._pending = Pending(self._show_pending)
        self._work: Work | None = None
        self.guarded = False
        self.guards: tuple[Writes, ...] = ()
        self._awaits_inputs = False
        self._left = 0
        self._graphs = 0  # forwards whose graphs no backward is known to have used up; one too many costs time only
        self._before: list[torch.Tensor] | None = None
        self._writes_silently = False
        self._recast = False
        self.tensor: Collectives = Loopback()
        self._choose_ways()
        self._exchange_tables()

    @abstractmethod
    def _prepare(self) -> None:
        """Everything that stays the same from step to step."""

    def _choose_ways(self) -> None:
        """How parameters come from where they rest, and gradients go there."""
        self.offloaded = any(isinstance(handle, OffloadedHandle) for handle in self.handles)
        self.new_reduction = OffloadedReduction if self.offloaded else Reduction
        self._launch: Callable[[], Work] = self._launch_gather
        if ReadAhead.is_for(self.handles):
            self._launch = ReadAhead(self, self._launch_gather)

    def join_root(self, root: Root, index: int, name: str) -> None:
        """Become unit number ``index`` of ``root``, called ``name`` in messages."""
        self.root = root
        self.index = index
        self.name = name
        said = name or "<root>"
        self._gathering = f"gathering the parameters of unit {said!r}"
        self.reducing = f"reducing the gradients of unit {said!r}"
        self.shard.name_for_messages(name)
        self.replicate.name_for_messages(name)
        for handle in self.handles:
            handle.name_with(partial(join_names, name))
            handle.guard_with(root.guard)

    def _exchange_tables(self) -> None:
        for handle in self.handles:
            inside = [module for module in self.modules if module is not self.module]
            handle.exchange_tables(inside, self._pending)

    def compress(self, compression: Compression, nodes: NodeGroups | None) -> None:
        """Compress what a step sends over the shard axis.  Collective: none; every rank calls it."""
        self.compression = (compression, nodes)
        if self.shard.size > 1:
            device = self.config.device
            self.step_shard = compressed(self.shard, compression, nodes, device)
            self.step_shard.name_for_messages(self.name)

    @property
    def is_compressed(self) -> bool:
        """Whether what a step sends over the shard axis is rounded."""
        return self.step_shard is not self.shard

    def start_unshard(self) -> None:
        """Start gathering the unit's parameters; does nothing if that has begun already.

        Collective: every rank of the shard group.
        """
        if self.residency is SHARDED:
            root = self.root
            if self._recast:
                self.see_recast()
            if self.in_full_precision is not root.in_full_precision:
                self._switch_precision()
            if root.lockstep.on:
                root.lockstep.gather_before(self)
            in_backward = _torch.backward_task() != _torch.NO_TASK
            # A backward inside the forward (of a slope, say) finds the values that this forward computes with.
            # In lockstep units are gathered for other ranks, too: one that is reached here looks itself.
            if in_backward and not root.guard.on and not root.lockstep.on:
                self._check_unchanged()
            self.residency = GATHERING
            if self._gathers:
                self._work = root.streams.run_gather(self._launch)
                if in_backward:
                    for storage in self._readable:
                        storage.refuse_reads()

    def wait_unshard(self) -> None:
        """Wait until the gathered parameters may be used by the host (CPU) or the current stream."""
        if self.residency is GATHERING:
            if self._work is not None:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    raise_named(self._gathering, error)
                self._work = None
                for handle in self._gathered:
                    handle.unsharded.filled()
            self.residency = UNSHARDED

    def reshard(self) -> None:
        """Free the gathered parameters.  Collective: none."""
        if self.residency is SHARDED:
            return
        if not self._active and (self._shows_leaves or self._pending.on):
            # In a checkpointed layer's forward; but what is reduced may have been stepped by now.
            rewritten = self._writes_silently and _torch.in_backward()
            if rewritten and not self.root.is_done(self):
                self._keep_silent_writes()
            self._show_sharded()
        if self.residency is GATHERING:
            self.wait_unshard()
        self._awaits_inputs = False
        self.residency = SHARDED
        if self._gathers:
            self.root.streams.released()
            for handle in self.handles:
                handle.unsharded.free()

    def release(self) -> None:
        """Free the gathered parameters, unless ranks that use different units must keep them (see ``Lockstep``)."""
        if not self.root.lockstep.on and not self.root.differentiable:
            self.reshard()

    def _show_leaves(self) -> None:
        if not self._shows_leaves:
            self._shows_leaves = True
            self._pending.on = False
            if self.guarded:
                self.unguard()
            for handle in self.handles:
                handle.expose_leaves()

    def _offer_leaves(self) -> None:
        """Let module code that runs in a backward find the leaves; mostly none does (see Note [Tables])."""
        if self.root.has_compiled:
            self._show_leaves()
        elif not self._shows_leaves and not self._pending.on:
            self._pending.on = True
            if self.guarded:
                self.unguard()
            for handle in self.handles:
                handle.expose_leaf_entries()

    def _show_pending(self) -> None:
        """Somebody reads a table: exchange them all.  What functional_call, say, has put elsewhere meanwhile stays."""
        self._shows_leaves = True
        for handle in self.handles:
            handle.expose_leaf_tables()

    def _remember_values(self) -> None:
        """The module's own forward begins: copy what it is about to see, if this is one to look at."""
        if self._left > 1 and not self.root.streams.host_synchronous:
            return
        is_new = not (self._writes_silently or self.is_compressed)
        if is_new and not self._active and not self._captures:
            self._before = [handle.unsharded.own.clone() for handle in self._gathered]

    def _leave(self) -> None:
        """The module's own forward has ended: keep what it wrote into its parameters, and show them sharded."""
        self._left += 1
        look = self._writes_silently or self._before is not None
        for handle in self.handles:
            look = look or handle.leaves_elsewhere
        if look:
            self._keep_silent_writes()
            self._before = None
        self._show_sharded()

    def _keep_silent_writes(self) -> None:
        """See Note [Silent writes] in ``flat.silent``."""
        shown = self.residency is UNSHARDED and (self._shows_leaves or self._pending.on)
        if shown and not (self.is_compressed or self._captures):
            before = dict(zip(self._gathered, self._before or (), strict=False))
            for handle in self.handles:
                known = self._writes_silently
                self._writes_silently |= keep_silent_writes(handle, before.get(handle), known=known)

    @property
    def _captures(self) -> bool:
        return capturing(torch.get_device_module(self.config.device))

    def _show_sharded(self) -> None:
        if self.residency is UNSHARDED and (self._shows_leaves or self._pending.on):
            is_rounded = self.step_shard is not self.shard
            for handle in self._gathered:
                if is_rounded and (handle.leaves_edited or handle.leaves_elsewhere):
                    raise self._edited_while_rounded(handle)
                handle.keep_leaf_edits()
        exchanged = not self._pending.on
        self._shows_leaves = self._pending.on = False
        for handle in self.handles:
            handle.expose_sharded(tables=exchanged)
        if self.guards and self.root.guard.on:
            self.guard()

    def guard(self) -> None:
        """A forward runs, and not the unit's own: refuse to compute with pieces (see Note [Exposure])."""
        if not self.summoned:
            self.guarded = True
            for stand_ins in self.guards:
                stand_ins.make()

    def unguard(self) -> None:
        """Let attribute lookup find the user's parameters again."""
        if self.guarded:
            self.guarded = False
            for stand_ins in self.guards:
                stand_ins.undo()

    def _edited_while_rounded(self, handle: FlatParamHandle) -> UnsupportedError:
        return UnsupportedError(
            describe(
                "module code wrote into its gathered parameters in place, which are rounded: writing them back would "
                "round the shards too",
                unit=self.name,
                fqn=handle.fqns[0],
                remedy="Leave compress_communication's weights exact (weights=None), or write under "
                "summon_full_params.",
            ),
            unit=self.name,
        )

    def follow_user_changes(self) -> None:
        """Take over parameters that the user replaced, moved or (un)froze since the last forward.

        Raises:
            UsageError: If a change cannot be taken over; it names the parameter and the remedy.
        """
        for handle in self.handles:
            if handle.user_changed():
                self._adopt_changes()
                break
        self._param_hooks.follow()

    def _adopt_changes(self) -> None:
        # What is built here outlives the forward, so it must not be made of inference tensors.
        with torch.inference_mode(mode=False), torch.no_grad():
            for handle in self.handles:
                if handle.user_changed():
                    self.gradients.check_not_frozen(handle)
                    self._recast |= handle.adopt_changes()
        self.root.streams.shards_written()
        self._prepare()

    def see_recast(self) -> None:
        """If users gave the unit another dtype: see, before anything is sent in it, that they did so on all ranks.

        Collective: then, every rank of the unit.

        Raises:
            ShardMismatchError: If not; it says what each rank has, or waits for.
        """
        if self._recast:
            self.root.see_recast(self)
            self._recast = False

    def seen_alike(self) -> None:
        """Ranks have compared what they have.  Collective: none."""
        self._recast = False

    def follow_new_hooks(self) -> None:
        """Users may have put hooks on whole parameters.  Collective: none."""
        self._param_hooks.look_again()

    def follow_new_leaves(self) -> None:
        """Prepare for leaves that a handle has made anew.  Collective: none."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self._prepare()

    def _check_unchanged(self) -> None:
        """Refuse a backward over other values than the forward's, as autograd does for plain parameters."""
        for handle in self._gathered:
            if handle.changed_since_forward():
                raise UsageError(
                    describe(
                        "parameters were modified in place (by an optimizer step, say) between a forward and its "
                        "backward",
                        unit=self.name,
                        fqn=handle.fqns[0],
                        remedy="Run every backward of a forward before changing parameters.",
                    ),
                    unit=self.name,
                )

    def _follow_versions(self) -> None:
        """Have autograd refuse graphs over values that were written over since (see :meth:`_check_unchanged`)."""
        if not self.in_full_precision:  # no backward follows on these leaves
            for handle in self.handles:
                handle.follow_versions(graphs=self._graphs > 0)

    def _launch_gather(self) -> Work:
        for handle in self._gathered:
            handle.fill_own_slice()
        return self.step_shard.all_gather(self._gathers)

    def _plan_gather(self) -> None:
        self._gathered = [handle for handle in self.handles if not handle.aliased]
        flats = [handle.unsharded.flat for handle in self._gathered]
        self.unsharded_bytes = sum(flat.numel() * flat.element_size() for flat in flats)
        incoming = [handle.unsharded.incoming for handle in self._gathered]
        self._readable = [h.unsharded for h in self._gathered if h.unsharded.is_filled_in_place]
        self._gathers = [Gather(to.flat, to.slices) for to in incoming]
        self._reads_frozen = any(
            not leaf.requires_grad for handle in self._gathered for leaf in handle.unsharded.leaves
        )

    def _switch_precision(self) -> None:
        """Follow the root into or out of a forward in the shards' own dtype, which no backward follows."""
        self.in_full_precision = self.root.in_full_precision
        with torch.inference_mode(mode=False), torch.no_grad():
            for handle in self.handles:
                handle.use_full_precision(wanted=self.in_full_precision)
            self._plan_gather()

    def _count_aliases(self) -> int:
        """How many tensors share the gathered memory: the unit's own, users', and those that graphs have saved."""
        uses = 0
        for handle in self._gathered:
            uses += handle.unsharded.count_uses()
        return uses

    def own_buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Every buffer of the unit's own modules, with the module that holds it and its name there."""
        for module in self.modules:
            for name, buffer in _torch.buffer_table(module).items():
                if buffer is not None:
                    yield module, name, buffer
