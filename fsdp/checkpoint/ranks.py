"""Who takes part in a save or load, and how they agree."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..comm.entry import gate_of
from ..comm.topology import Axes
from ..errors import CheckpointError, FsdpError
from ..runtime.held import units_in
from ..state.tensor_parallel import tensor_rank
from ..wrapper import FullyShardedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["Ranks"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The ranks of one save or load; ``group`` is None where there is but this one.

    Attributes:
        group: Their process group.
        rank: This rank in it.
        size: How many they are.
    """

    group: ProcessGroup | None
    rank: int = 0
    size: int = 1

    @staticmethod
    def of(model: nn.Module, group: ProcessGroup | None) -> Ranks:
        """The ranks of ``group``; of the model's outermost unit if that has one axis; else all.  Collective: none."""
        if group is None and tensor_rank(units_in(model)) is None:
            for axes in _axes_in(model, root_only=True)[:1]:
                if axes.shard is None or axes.replicate is None:
                    group = axes.whole
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return Ranks(group, group.rank(), group.size()) if group is not None else Ranks(None)

    def lacking(self, model: nn.Module, call: str) -> tuple[int, ...]:
        """Ranks of the job that share or copy units of these ranks, and are not among them; the same everywhere.

        Collective: every rank, unless they are all of the job; one small exchange.
        """
        if self.group is None or self.size == dist.get_world_size():
            return ()
        needed = {
            rank
            for axes in _axes_in(model)
            for group in (axes.shard, axes.replicate)
            if group is not None
            for rank in dist.get_process_group_ranks(group)
        }
        present = set(dist.get_process_group_ranks(self.group))
        return tuple(sorted(set().union(*self._told(call, needed)) - present))

    def await_replicas(self, model: nn.Module, call: str) -> None:
        """Wait until the other replicas have entered ``call`` too.

        Collective: every rank of every replica, through the stores.

        Raises:
            ShardMismatchError: If some have not within ``FSDP_ENTRY_TIMEOUT`` seconds; names them.
        """
        for group in dict.fromkeys(axes.replicate for axes in _axes_in(model)):
            if group is not None:
                gate_of(group).enter(call)

    def in_background(self) -> Ranks:
        """The same ranks with a group of their own, for a thread.

        Collective: every rank, the first time.
        """
        if self.group is None or self.size == 1:
            return self
        if self.group not in _BEHIND:
            members = dist.get_process_group_ranks(self.group)
            _BEHIND[self.group] = dist.new_group(
                members, backend="gloo", use_local_synchronization=True
            )
        return Ranks(_BEHIND[self.group], self.rank, self.size)

    def attempt(self, call: str, work: Callable[[], _Result]) -> _Result:
        """Do ``work``, and raise on every rank if it failed on any.

        Collective: every rank, besides what ``work`` does; one small exchange.

        Raises:
            CheckpointError: Saying which ranks failed and why.
        """
        try:
            result = work()
        except Exception as error:
            self.agree(call, str(error) if isinstance(error, FsdpError) else repr(error))
            raise
        self.agree(call, "")
        return result

    def agree(self, call: str, problem: str) -> None:
        """Raise on every rank if any has a ``problem``.

        Through the communicator, which notices a rank that has died; a store does not.

        Collective: every rank; one small exchange.

        Raises:
            CheckpointError: Saying which ranks have which problem, or that one has stopped.
        """
        who: dict[str, list[int]] = {}
        for rank, text in enumerate(self._told(call, problem)):
            who.setdefault(text, []).append(rank)
        who.pop("", None)
        if who:
            listed = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in who.items()]
            raise CheckpointError("; ".join(listed if self.size > 1 else who))

    def _told(self, call: str, message: Any) -> list[Any]:
        """What each rank tells the others.  Collective: every rank; one small exchange."""
        told = [message]
        if self.group is not None and self.size > 1:
            told *= self.size
            with _naming_a_stop(call):
                dist.all_gather_object(told, message, group=self.group)
        return told

    def enter(self, call: str) -> None:
        """Wait until every rank has entered ``call``.

        Collective: every rank, through the store.

        Raises:
            ShardMismatchError: If some have not within ``FSDP_ENTRY_TIMEOUT`` seconds; names them.
        """
        if self.group is not None:
            gate_of(self.group).enter(call)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on the first rank.

        Collective: every rank; one small broadcast.

        Raises:
            CheckpointError: If it raises there.
        """
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = make()
            except Exception as error:  # noqa: BLE001 the other ranks wait for an answer
                box[1] = (
                    error if isinstance(error, CheckpointError) else CheckpointError(repr(error))
                )
        if self.group is not None and self.size > 1:
            source = dist.get_global_rank(self.group, 0)
            with _naming_a_stop("checkpoint.load"):
                dist.broadcast_object_list(box, src=source, group=self.group)
        if box[1] is not None:
            raise box[1]
        return box[0]


def _axes_in(model: nn.Module, *, root_only: bool = False) -> list[Axes]:
    """The process groups of each wrapper in ``model``, in ``modules()`` order."""
    wrappers = FullyShardedDataParallel.fsdp_modules(model, root_only=root_only)
    return [wrapper._arguments.axes for wrapper in wrappers]  # noqa: SLF001 of this package


@contextmanager
def _naming_a_stop(call: str) -> Iterator[None]:
    """Turn what a backend raises when a peer is gone into an error that says what it was for."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"communication failed in {call}: {error}. A rank has stopped; look at the first error of every rank."
        ) from error


_BEHIND: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
