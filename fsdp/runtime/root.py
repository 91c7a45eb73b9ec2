"""The state that all units below one outermost unit share, and what happens around a whole forward or backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Protocol

import torch
from torch import nn

from .. import _torch
from ..config import TrainingState
from ..errors import TrainingStateError, UnsupportedError, UsageError, describe
from ..flat.tables import Guard
from ..names import join_names
from ..schedule.order import ExecutionOrder
from . import precision
from .alike import Likeness
from .buffers import BufferPool
from .frames import caller_of_caller, engine_frame, is_running
from .guard import check_not_overlapped
from .lenders import find_lenders
from .lockstep import Lockstep
from .offload import Away
from .order_check import OrderCheck
from .reduction_queue import ReductionQueue
from .residency import GATHERING, SHARDED, ResidentUnit
from .streams import Streams, streams_for
from .tree import Tree
from .unit import Unit
from .usage import Usage, agree

__all__ = ["Root"]

_SMALL_BYTES = 4 << 20  # what may be gathered ahead together beyond the one that always is


class Announcer(Protocol):
    """Tells other ranks what this one is about to do, inside ``Join``."""

    def forward(self, *, with_grad: bool) -> None:
        """A forward is about to begin."""

    def backward(self) -> None:
        """A backward is about to begin."""

    def clip(self, max_norm: float, norm_type: float) -> None:
        """Gradients are about to be clipped."""

    def leave(self) -> None:
        """The context has ended."""


class Root:
    """Runtime of a tree of units.

    Built by the outermost wrapper's constructor, complete; a wrapper that is later put around it builds a new one
    over all units.

    Attributes:
        units: Every unit, the outermost first, in the order of the module walk.
        order: What ran when, for prefetching.
        order_check: Whether ranks ran the same.
        lockstep: The fixed order of communication, where ranks may use different units.
        uneven: Tells ranks without data what comes, inside ``Join``.
        ranks_averaged: By how many ranks gradients are divided, if not by all.
        streams: Where communication runs.
        reductions: Those that wait for others, and those under way.
        away: What ``offload()`` has moved to the host, until ``reload()``.
        pool: Buffers for gradients.
        usage: Which parameters the running backward has used on this rank.
        stack: Units whose forward is running, outermost first.
        backward_task: The backward that has reached one of the units and not ended yet; None if there is none.
        started: Whether any forward has run.
        tree: The modules below the outermost wrapper.
        changed: Whether the next forward has to look for changes first; true before the first one.
        open_saves: How to close each unit that is being saved; those inside one another were entered together.
        entered_with_grad: Whether the running forward was entered with gradients enabled.
        in_full_precision: Whether the running forward computes in the shards' own dtype.
        done: Indices of the units whose gradients the running backward has reduced or, inside ``no_sync``, kept, or is
            about to (they are due).
        differentiable: Whether the running backward was asked for with ``create_graph``: what it computes may want the
            parameters again, so they stay until another backward or forward.
        read_again: Units that such a backward has reached since the last forward with gradients began: the graph that
            it made comes to their parameters past every hook, so every backward gathers them first, and forwards
            without gradients again until a backward has used the graph up.
        guard: On while a forward runs, so that units refuse to be reached into from outside theirs.
        has_compiled: Whether torch.compile had been used when the running backward began.
    """

    __slots__ = (
        "__weakref__",
        "_backward_frame",
        "_entry_frame",
        "_forwards",
        "_likeness",
        "_order_is_agreed",
        "_owner",
        "_reads_are_due",
        "_sequence",
        "away",
        "backward_task",
        "changed",
        "differentiable",
        "done",
        "entered_with_grad",
        "guard",
        "has_compiled",
        "in_full_precision",
        "lockstep",
        "open_saves",
        "order",
        "order_check",
        "pool",
        "ranks_averaged",
        "read_again",
        "reductions",
        "stack",
        "started",
        "streams",
        "tree",
        "uneven",
        "units",
        "usage",
    )

    def __init__(self, units: Sequence[Unit], names: Sequence[str], top: nn.Module) -> None:
        self.units = tuple(units)
        self.order = ExecutionOrder()
        self.streams: Streams = streams_for(
            units[0].config.device, reads_host=any(unit.offloaded for unit in units)
        )
        self.reductions = ReductionQueue()
        self.pool = BufferPool()
        self.usage = Usage()
        self.stack: list[Unit] = []
        self.backward_task: int | None = None
        self.started = False
        self.changed = True
        self.entered_with_grad = False
        self.in_full_precision = False
        self.guard = Guard()
        self.has_compiled = False
        self.differentiable = False
        self.read_again: dict[Unit, None] = {}
        self._reads_are_due = False  # no backward since has used up the graph that reads them
        self._entry_frame: FrameType | None = None
        self._owner: int | None = None
        self.open_saves: list[Callable[[], None]] = []
        self._backward_frame: FrameType | None = None
        self.done: set[int] = set()
        self._sequence = units[0].gate.new_sequence()
        self._order_is_agreed = False
        self._likeness = Likeness()
        self.order_check = OrderCheck(self.units, self._sequence)
        self._forwards = (
            0  # attempts outside Join, failed ones included: the same number on every rank
        )
        for index, (unit, name) in enumerate(zip(units, names, strict=True)):
            unit.join_root(self, index, name)
        self.tree = Tree(self, top)
        self.lockstep = Lockstep(self.units)
        self.uneven: Announcer | None = None
        self.ranks_averaged: int | None = None
        self.away: Away | None = None

    @property
    def backward_running(self) -> bool:
        """Whether a backward has reached one of the units and not ended yet."""
        return self.backward_task is not None

    @property
    def training_state(self) -> TrainingState:
        """What is going on."""
        self.recover()
        if self.stack or self.backward_running:
            return TrainingState.FORWARD_BACKWARD
        if any(unit.summoned for unit in self.units):
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE

    def check_idle(self, action: str) -> None:
        """Raise unless no forward or backward is running.

        Raises:
            TrainingStateError: Naming ``action`` and the unit that is running.
        """
        self.recover()
        if self.stack or self.backward_running or _torch.in_backward():
            running = self.stack[-1].name if self.stack else None
            raise TrainingStateError(
                describe(
                    f"Cannot manually unshard parameters during forward/backward: {action} was called inside one",
                    unit=running,
                    remedy="Call it between steps.",
                ),
                unit=running,
            )

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self, entry: Unit) -> None:
        """The first unit of a forward is entered: nothing gathered earlier may be used again.

        Raises:
            TrainingStateError: If the model is away (see Note [Away] in ``runtime.offload``).
        """
        if self.away is not None:
            raise self.away.refuse_forward(entry)
        if self.changed:
            self._follow_changes()
        if _torch.in_backward():
            return
        self.recover()
        self._likeness.check()
        _refuse_transforms(entry)
        self._entry_frame = caller_of_caller()
        self._owner = threading.get_ident()
        self.close_saves()
        if self.order_check.on:
            self.order_check.look()
        if self.uneven is not None:
            self.uneven.forward(with_grad=torch.is_grad_enabled())
        if not self.lockstep.on:
            self._forwards += 1
        self.entered_with_grad = torch.is_grad_enabled()
        self.in_full_precision = (
            entry.config.mixed_precision.full_precision_in_eval
            and not self.entered_with_grad
            and not entry.module.training
        )
        self._free_for_forward()
        self._guard_units()
        if entry.index == 0:
            self.order.start_iteration()
        if self.streams.start_step():
            self.pool = BufferPool()  # a graph keeps the buffers that it was captured with

    def _follow_changes(self) -> None:
        """This is the first forward, or the modules may have changed."""
        if not _torch.in_backward():
            self.changed = self.tree.follow(before_first_forward=not self.started)
            find_lenders(self.units)
        if not self.started:
            self._check_claimed()
            check_not_overlapped(self.units)
            self.started = True
            with torch.inference_mode(mode=False):
                for unit in self.units:
                    precision.cast_buffers(unit)

    def _free_for_forward(self) -> None:
        self._reshard_all()
        if self.entered_with_grad:
            self.read_again.clear()
            self._reads_are_due = False
        if self.lockstep.on:  # units are gathered for other ranks that this one does not run
            for unit in self.units:
                unit.follow_user_changes()

    def _guard_units(self) -> None:
        self.guard.on = True
        for unit in self.units:
            if unit.guards:
                unit.guard()

    def take(self, units: Mapping[Unit, str]) -> None:
        """Be the runtime of ``units``, the outermost first, which have these names; between forwards.

        Collective: none; every rank does it alike.
        """
        self.units = tuple(units)
        self.order = ExecutionOrder()
        self._sequence = self.units[0].gate.new_sequence()
        self._order_is_agreed = False
        self._likeness = Likeness()
        self.order_check = OrderCheck(self.units, self._sequence)
        for index, (unit, name) in enumerate(units.items()):
            unit.join_root(self, index, name)
        self.lockstep = Lockstep(self.units)
        self.started = False

    def _check_claimed(self) -> None:
        for unit in self.units:
            if unit.unclaimed:
                fqn = join_names(unit.name, unit.unclaimed[0].fqn)
                raise UsageError(
                    describe(
                        "a parameter is tied to one outside this wrapper, and no wrapper is around all its users",
                        unit=unit.name,
                        fqn=fqn,
                        remedy="Wrap the module that contains both, too, before the first forward.",
                    ),
                    fqn=fqn,
                )

    def begin_unit(self, unit: Unit) -> None:
        """The forward of ``unit`` begins; in the first iteration the ranks see that they all run the same one.

        Collective: every rank of the shard group, in the first iteration.

        Raises:
            ShardMismatchError: If another rank runs another unit, or has built another one; names both.
        """
        for index in self.order.begin(unit.index):
            if self.units[index].residency is GATHERING:
                self.units[index].release()
        if self.order_check.on:
            self.order_check.path.append(unit.index)
        if self._order_is_agreed or self.lockstep.on or unit.world_size == 1:
            return
        self._likeness.see(unit, self.units, self._sequence)
        if unit.shard.size > 1:
            sequence = f"{self._sequence}.{self._forwards}"
            unit.gate.follow(sequence, f"unit {unit.name or '<root>'!r}")

    def see_recast(self, unit: ResidentUnit) -> None:
        """This rank's user has given ``unit`` another dtype; see :meth:`Likeness.see_recast`."""
        self._likeness.see_recast(self.units[unit.index], self._sequence)

    def _reshard_all(self) -> None:
        for unit in self.units:
            if unit.residency is not SHARDED:
                unit.reshard()
        self.lockstep.start_over()

    def close_saves(self) -> None:
        """Put the parameters back that a ``state_dict()`` which failed half way has left summoned."""
        for close in reversed(self.open_saves):
            close()

    def _check_order(self, entry: Unit | None) -> None:
        """A forward has ended that was entered by ``entry``: once an iteration, tell the other ranks its order."""
        if entry is not None and entry.index == 0 and self._order_is_agreed:
            self.order_check.exchange(self.streams)

    def end_forward(self, entry: Unit | None = None) -> None:
        """The last unit of a forward, ``entry``, is left: free what was gathered ahead and not used."""
        if not _torch.in_backward():
            self._entry_frame = None
            self.in_full_precision = False
            self.guard.on = False
            for unit in self.units:
                if unit.guarded:
                    unit.unguard()
            if self.order_check.on and not self.lockstep.on:
                self._check_order(entry)
            self._order_is_agreed = self._order_is_agreed or not self.lockstep.on
            if self.lockstep.on:
                self.lockstep.gather_all()
                if not self.entered_with_grad:
                    self._reshard_all()
            for unit in self.units:
                if unit.residency is GATHERING and not self.lockstep.on:
                    unit.reshard()
            # Ranks without data know nothing of such graphs.
            if self._reads_are_due and not (self.entered_with_grad or self.lockstep.on):
                self._gather_again()
            self.streams.end_step()

    def _gather_again(self) -> None:
        """A forward without gradients has freed what a graph reads past every hook (see ``read_again``)."""
        for unit in self.read_again:
            unit.gather_again()
        for unit in self.read_again:
            unit.wait_unshard()

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether ``unit`` is freed between its forward and its backward; the outermost would be wanted at once."""
        is_outermost = unit.index == 0 and not self.stack
        return unit.config.reshard_after_forward and not (is_outermost and unit.module.training)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start gathering what followed ``unit`` last time.

        On an accelerator too, whose host runs ahead: a gather waits for the last use of the memory it takes, so what
        is launched after the unit before it has been freed would begin when that one's computation has ended.
        """
        index = self.order.after(unit.index)
        if index is None or self.units[index].residency is not SHARDED:
            return  # it needs no gather now, and so none after it does
        for ahead in self._burst(unit, self.order.after):
            ahead.follow_user_changes()
            ahead.start_unshard()
            self.order.foresee(ahead.index)

    def _burst(self, unit: Unit, following: Callable[[int], int | None]) -> list[Unit]:
        """The units to gather ahead of ``unit``: the next one, and those after it while together they are small.

        Nothing while the next one is under way: one burst follows the other, so small units meet the other ranks
        once a burst and not once a unit.
        """
        burst: list[Unit] = []
        ahead_bytes = 0
        index = following(unit.index)
        while index is not None:
            ahead = self.units[index]
            ahead_bytes += ahead.unsharded_bytes
            if ahead.residency is not SHARDED or ahead.summoned:
                break
            if ahead_bytes > _SMALL_BYTES and ahead_bytes > ahead.unsharded_bytes:
                break
            burst.append(ahead)
            index = following(index)
        return burst

    # -- backward --------------------------------------------------------------------------------------------------

    def enter_backward(self, task: int) -> bool:
        """The backward ``task`` has come to a unit; returns whether it begins here, outside any running one."""
        if self.backward_was_lost():
            self.reset()
        begins = self.backward_task is None
        if begins:
            self.begin_backward(task)
        return begins

    def begin_backward(self, task: int) -> None:
        """The first unit of the backward ``task`` is reached."""
        self.backward_task = task
        self.differentiable = torch.is_grad_enabled()
        self.done.clear()
        self._backward_frame = engine_frame()
        self.has_compiled = _torch.has_compiled()
        _torch.queue_end_of_backward(self.end_backward)
        if self.uneven is not None:
            self.uneven.backward()
        if self.lockstep.on:
            self.lockstep.begin_backward()
        for unit in self.read_again:
            unit.start_unshard()
        for unit in self.read_again:
            unit.wait_unshard()

    def backward_was_lost(self) -> bool:
        """Whether the backward that began is not the one that runs now, nor around it: it has failed.

        Only known where hooks run below the Python frame that called ``backward``, as they do on the CPU.
        """
        frame = self._backward_frame
        if not self.backward_running or frame is None:
            return False
        return engine_frame() is not frame and not is_running(frame)

    def prefetch_backward(self, unit: Unit) -> None:
        """Start gathering what finished its forward before ``unit``."""
        index = self.order.before(unit.index)
        if index is None or self.units[index].residency is not SHARDED:
            return
        for ahead in self._burst(unit, self.order.before):
            if ahead.index in self.done:
                return
            ahead.start_unshard()

    def is_done(self, unit: ResidentUnit) -> bool:
        """Whether the gradients of ``unit`` have arrived in the running backward, all it was known to bring."""
        return unit.index in self.done

    def reduce(self, unit: Unit) -> None:
        """The gradients of ``unit`` have arrived: reduce them, now or when their turn comes."""
        self.done.add(unit.index)
        if self.lockstep.on:
            self.lockstep.reduce(unit, self.reductions.start)
        else:
            self.reductions.add(unit)

    def end_backward(self) -> None:
        """Every gradient of a backward has arrived: reduce what is left, publish, free.

        Units of which only some parameters got gradients, or none now but some inside an earlier ``no_sync``, are
        finished here, last unit first on every rank.
        """
        self.reductions.start_due()  # what is looked at next is what these have left
        for unit in reversed(self.units):
            if unit.arrivals.armed or unit.accumulating:
                owes = unit.gradients.kept or (unit.owes_all_reduce and not self.is_done(unit))
                if unit.arrivals.some or (owes and unit.sync_gradients):
                    unit.finish_backward()
                unit.arrivals.disarm()
        if self.lockstep.on:
            self.lockstep.reduce_rest(self.reductions.start)
        self.reductions.finish()
        self.pool.free_large()
        self._agree_on_use()
        if not self.differentiable:
            self._reshard_all()
        self._reads_are_due = self.differentiable or (self._reads_are_due and _torch.keeps_graph())
        self.differentiable = False
        self.streams.end_step()
        self.backward_task = None
        self._backward_frame = None

    # -- a rank without data ---------------------------------------------------------------------------------------

    def follow_forward(self, *, with_grad: bool) -> None:
        """Make the collective calls of a forward that other ranks run.

        Collective: every rank of every shard group, in lockstep.
        """
        self.entered_with_grad = with_grad
        self._free_for_forward()
        self.streams.start_step()
        self.end_forward()

    def follow_backward(self, *, sync: bool) -> None:
        """Make the collective calls of a backward that other ranks run.

        Collective: every rank of every unit's groups, in lockstep.
        """
        for unit in self.units:
            unit.sync_gradients = sync
        self.lockstep.begin_backward()
        with torch.no_grad():
            self.end_backward()
        for unit in self.units:
            unit.sync_gradients = True

    def _agree_on_use(self) -> None:
        """Once for all units of a group, whether or not this rank left anything out."""
        groups: dict[tuple[int, int, int], list[Unit]] = {}
        for unit in self.units:
            asked = unit.config.orig_mode or self.lockstep.on
            trains = unit.trained_handles and unit.world_size > 1
            if asked and trains and unit.sync_gradients:
                groups.setdefault(unit.group_key, []).append(unit)
        with torch.no_grad():
            for members in groups.values():
                handles = [handle for unit in members for handle in unit.trained_handles]
                agree(self.usage, handles, (members[0].shard, members[0].replicate))
        self.usage.clear()

    # -- recovery --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Reset if a forward or backward has been left by an exception that reached none of the hooks.

        Only the thread that ran the forward can tell.
        """
        if _torch.in_backward() or self._owner not in (None, threading.get_ident()):
            return  # it may well be running, just not here
        interrupted = bool(self.stack) and not is_running(self._entry_frame)
        if self.backward_running or interrupted:
            self.reset()

    def reset(self) -> None:
        """Forget a step that failed half way; published gradients stay.  Collective: none."""
        self.stack.clear()
        self.differentiable = False
        self.order_check.forget()
        self.guard.on = False
        self.usage.clear()
        self.in_full_precision = False
        self._backward_frame = None
        self.reductions.abandon()
        self.pool = BufferPool()
        self.backward_task = None
        for unit in self.units:
            unit.reset()
        self.lockstep.start_over()


def _refuse_transforms(entry: Unit) -> None:
    if _torch.inside_transform():
        raise UnsupportedError(
            describe(
                "a forward was called inside a transform of torch.func (grad, vjp, vmap, ...)",
                unit=entry.name,
                remedy="Transform the unwrapped module, on parameters from `with FSDP.summon_full_params(model):`.",
            ),
            unit=entry.name,
        )
