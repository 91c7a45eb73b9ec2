"""Uneven inputs: what ranks tell each other inside ``with Join([model])``, and what a rank without data does.

A rank that has run out of data still holds its shards: the others need them in every gather, and their gradients have
to be reduced to it and stepped on by it.  So it follows: it makes the collective calls of the others with zero
gradients (``runtime.lockstep`` makes these the same whatever part of the model runs), clips when they clip, and steps
its optimizer when they have stepped theirs, with their hyper-parameters.

Note [Announcements]
    torch's ``Join`` lets the ranks without data run a hook each time a rank with data notifies them.  Ranks with data
    notify before every forward and every clipping, and then all ranks exchange one row of numbers each, which says
    what is to come.  A backward is announced by such an exchange alone, because it follows a forward.  Optimizer steps
    are told afterwards, with the next announcement or at the end: they communicate nothing themselves.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import ShardMismatchError, UnsupportedError, UsageError, describe
from ..names import join_names
from ..runtime.spread import partial_units

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.optim import Optimizer

    from ..runtime.root import Root

__all__ = ["UnevenInputs", "UnevenInputsHook", "check_joinable", "group_of_all"]


class _Kind(IntEnum):
    """What a rank with data is about to do."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    NO_BACKWARD = 3
    CLIP = 4
    END = 5


@dataclass(frozen=True, slots=True)
class _Row:
    """What one rank announces; a rank without data announces ``NOTHING``.

    Attributes:
        kind: What is to come.
        first: Of a forward: whether gradients are enabled.  Of a backward: whether gradients are synchronised.  Of a
            clipping: the largest norm.
        second: Of a backward: whether earlier gradients are kept.  Of a clipping: the order of the norm.
        steps: Optimizer steps that this rank has made in the context.
    """

    kind: _Kind = _Kind.NOTHING
    first: float = 0.0
    second: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step: which optimizer, and the hyper-parameters of its groups at that moment."""

    optimizer: tuple[str, ...]
    settings: list[dict[str, Any]]


class UnevenInputs:
    """One ``Join`` context as one rank sees it.

    Args:
        root: The runtime of the joined wrapper.
        group: All ranks of the context.
        notify: Tells the ranks without data that something is to come; returns whether the context is enabled.
        optimizers: Optimizers over the wrapper's parameters; found among all living ones if None.
        by_all: Divide gradients by all ranks instead of by those that have data.
    """

    def __init__(
        self,
        root: Root,
        group: ProcessGroup,
        notify: Callable[[], bool],
        *,
        optimizers: Iterable[Optimizer] | None,
        by_all: bool,
    ) -> None:
        self._root = root
        self._group = group
        self._notify = notify
        self._given = None if optimizers is None else list(optimizers)
        self._by_all = by_all
        self._names = {
            param: join_names(unit.name, name)
            for unit in root.units
            for handle in unit.handles
            for param, name in zip(handle.exposed, handle.fqns, strict=False)
        }
        self._optimizers: dict[tuple[str, ...], Optimizer] = {}
        self._steps: list[_Step] = []  # those that a rank may not know yet
        self._forgotten = 0  # those before, which all ranks have made
        self._backward_is_awaited = False
        self._is_enabled = False
        me = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            uneven = me()
            if uneven is not None:
                uneven._note_step(optimizer)  # noqa: SLF001 this class's own

        self._step_hook = register_optimizer_step_post_hook(stepped)

    def leave(self) -> None:
        """The context has ended.  Collective: none."""
        self._step_hook.remove()
        self._root.uneven = None
        self._root.ranks_averaged = None
        self._root.lockstep.on = self._root.lockstep.always

    @property
    def _made(self) -> int:
        """Optimizer steps that this rank has made."""
        return self._forgotten + len(self._steps)

    # -- a rank with data ------------------------------------------------------------------------------------------

    def forward(self, *, with_grad: bool) -> None:
        """A forward is about to begin.

        Collective: every rank of the context.
        """
        if self._backward_is_awaited:
            self._exchange(_Row(_Kind.NO_BACKWARD, steps=self._made))
        self._is_enabled = self._notify()
        self._root.lockstep.on = self._root.lockstep.always or self._is_enabled
        self._backward_is_awaited = with_grad and self._is_enabled
        if self._is_enabled:
            self._exchange(_Row(_Kind.FORWARD, float(with_grad), steps=self._made))

    def backward(self) -> None:
        """A backward is about to begin.

        Collective: every rank of the context.

        Raises:
            UnsupportedError: If it is not the one backward of the latest forward.
        """
        if not self._is_enabled:
            return
        if not self._backward_is_awaited:
            raise UnsupportedError(
                "inside Join each forward may have one backward, before the next forward: ranks without data follow "
                "in that order."
            )
        self._backward_is_awaited = False
        sync = self._root.units[0].sync_gradients
        kept = any(param.grad is not None for param in self._names)
        self._exchange(_Row(_Kind.BACKWARD, float(sync), float(kept), self._made))

    def clip(self, max_norm: float, norm_type: float) -> None:
        """Gradients are about to be clipped.

        Collective: every rank of the context.
        """
        if self._notify():
            self._exchange(_Row(_Kind.CLIP, max_norm, norm_type, self._made))

    # -- a rank without data ---------------------------------------------------------------------------------------

    def follow(self, clip: Callable[[float, float], object]) -> None:
        """Do this rank's part of what the ranks with data announce next.

        Collective: every rank of the context.

        Args:
            clip: Clips this rank's gradients, given the largest norm and the order of the norm.
        """
        self._root.lockstep.on = True
        row = self._exchange(_Row(steps=self._made))
        if row.kind is _Kind.FORWARD:
            with_grad = bool(row.first)
            self._root.follow_forward(with_grad=with_grad)
            if with_grad:
                self._follow_backward()
        elif row.kind is _Kind.CLIP:
            clip(row.first, row.second)

    def finish(self, *, is_last: bool) -> None:
        """All ranks are out of data: make the steps that were not told yet.

        Collective: every rank of the context.
        """
        kind = _Kind.END if is_last else _Kind.NOTHING
        self._exchange(_Row(kind, steps=self._made))

    def _follow_backward(self) -> None:
        row = self._exchange(_Row(steps=self._made))
        if row.kind is _Kind.BACKWARD:
            if not row.second:
                for param in self._names:
                    param.grad = None
            self._root.follow_backward(sync=bool(row.first))

    # -- announcements ---------------------------------------------------------------------------------------------

    def _exchange(self, mine: _Row) -> _Row:
        """Give and take one row a rank, and catch up with the steps of others; returns what is to come."""
        table = torch.zeros(self._group.size(), 4, dtype=torch.float64)
        row = [float(mine.kind), mine.first, mine.second, float(mine.steps)]
        table[self._group.rank()] = torch.tensor(row, dtype=torch.float64)
        table = table.to(self._root.units[0].config.device)
        dist.all_reduce(table, group=self._group)
        rows = [
            _Row(_Kind(int(kind)), first, second, int(steps))
            for kind, first, second, steps in table.tolist()
        ]
        told = {rank: row for rank, row in enumerate(rows) if row.kind is not _Kind.NOTHING}
        self._check_alike(told)
        if told[min(told)].kind is _Kind.BACKWARD and not self._by_all:
            self._root.ranks_averaged = len(told)
        self._catch_up(rows, source=min(told))
        return told[min(told)]

    def _check_alike(self, told: dict[int, _Row]) -> None:
        """Raise unless the ranks with data do the same thing (whether they keep gradients is their own affair)."""
        alike = {(row.kind, row.first, row.steps) for row in told.values()}
        if len(alike) > 1:
            listed = "; ".join(
                f"rank {rank}: {row.kind.name.lower()}" for rank, row in told.items()
            )
            raise ShardMismatchError(
                describe(
                    f"ranks with data do different things inside Join: {listed}",
                    remedy="Make the same forwards, backwards, clippings and optimizer steps on every rank with data.",
                ),
                ranks=tuple(told),
            )

    def _catch_up(self, rows: Sequence[_Row], source: int) -> None:
        """Make the optimizer steps that rank ``source`` has made and this one has not."""
        fewest = min(row.steps for row in rows)
        if fewest < rows[source].steps:
            told: list[list[_Step]] = [self._steps[fewest - self._forgotten :]]
            dist.broadcast_object_list(
                told, dist.get_global_rank(self._group, source), group=self._group
            )
            for step in told[0][self._made - fewest :]:
                self._make(step)
        del self._steps[: fewest - self._forgotten]
        self._forgotten = fewest

    def _make(self, step: _Step) -> None:
        if step.optimizer not in self._optimizers:
            self._optimizers = self._find_optimizers()
        optimizer = self._optimizers.get(step.optimizer)
        if optimizer is None:
            raise UsageError(
                describe(
                    "another rank stepped an optimizer inside Join that this rank does not have",
                    fqn=step.optimizer[1] if len(step.optimizer) > 1 else None,
                    remedy="Build the same optimizers on every rank before entering Join, or name them: "
                    "Join([model], optimizers=[...]).",
                )
            )
        for group, settings in zip(optimizer.param_groups, step.settings, strict=True):
            group.update(copy.deepcopy(settings))
        optimizer.step()  # the hook notes it
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def _note_step(self, optimizer: Optimizer) -> None:
        name = self._name_of(optimizer)
        if len(name) > 1:
            settings = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            self._steps.append(_Step(name, copy.deepcopy(settings)))

    def _find_optimizers(self) -> dict[tuple[str, ...], Optimizer]:
        """The optimizers over the wrapper's parameters, by name."""
        candidates = self._given
        if candidates is None:
            candidates = [found for found in gc.get_objects() if _is_optimizer(found)]
        return {self._name_of(optimizer): optimizer for optimizer in candidates}

    def _name_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        """The same on every rank: its class and the parameters it holds."""
        held = [
            self._names[param]
            for group in optimizer.param_groups
            for param in group["params"]
            if param in self._names
        ]
        return (type(optimizer).__qualname__, *held)


class UnevenInputsHook(JoinHook):
    """What torch's ``Join`` calls on a rank that has run out of data."""

    def __init__(
        self,
        uneven: UnevenInputs,
        clip: Callable[[float, float], object],
    ) -> None:
        self._uneven = uneven
        self._clip = clip
        super().__init__()

    def main_hook(self) -> None:
        """Follow the ranks with data.

        Collective: every rank of the context.
        """
        self._uneven.follow(self._clip)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 torch's signature
        """Catch up with the last steps and leave.

        Collective: every rank of the context.
        """
        self._uneven.finish(is_last=is_last_joiner)
        self._uneven.leave()


def _is_optimizer(value: object) -> bool:
    # By type: isinstance would ask __class__, which lazy objects answer with side effects.
    return issubclass(type(value), torch.optim.Optimizer)


def group_of_all(root: Root, group: ProcessGroup) -> ProcessGroup:
    """The group of all ranks that hold parts of the model: ``group``, or the default one under hybrid sharding.

    Collective: none.

    Raises:
        UnsupportedError: If hybrid sharding covers only part of the default group.
    """
    unit = root.units[0]
    ranks = unit.shard.size * unit.replicate.size
    everybody = dist.group.WORLD
    if group.size() >= ranks:
        return group
    if everybody is not None and everybody.size() == ranks:
        return everybody
    raise UnsupportedError(
        "Join needs one process group over all replicas: use hybrid sharding over the whole default group."
    )


def check_joinable(root: Root, *, by_all: bool) -> None:
    """Raise if gradients can not be divided as asked, or ranks without data can not follow.

    Collective: none.

    Raises:
        UnsupportedError: If a communication hook divides them, or gathers of a backward differ from a forward's.
    """
    if any(handle.has_tensor_shards for unit in root.units for handle in unit.handles):
        raise UnsupportedError(
            "Join does not know tensor-parallel parameters: ranks without data could not take part in what layers "
            "exchange. Give every rank the same number of batches."
        )
    partial = partial_units(root.units)
    if partial:
        raise UnsupportedError(
            describe(
                "Join needs every unit over all ranks of the model: ranks without data could not take part in what "
                "experts exchange",
                unit=partial[0].name,
                remedy="Give every rank the same number of batches.",
            ),
            unit=partial[0].name,
        )
    compression = root.units[0].compression
    if compression is not None and compression[0].secondary_shard:
        raise UnsupportedError(
            "Compression(secondary_shard=True) gathers in another way in backward, and ranks without data have none: "
            "leave secondary_shard out to use Join."
        )
    if root.units[0].averaging.hook is not None and not by_all:
        raise UnsupportedError(
            "a communication hook divides gradients by all ranks, so Join can not divide by those that have data: "
            "pass divide_by_initial_world_size=True to Join."
        )
