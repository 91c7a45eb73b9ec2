"""Every rank says that it has entered a collective call before any of them communicates.

A call that some ranks do not make (``if rank == 0: model.state_dict()``) would otherwise wait for the backend's
timeout, half an hour by default, and then say nothing useful.  The exchange goes through the group's store, not through
its communicator, so a missing rank leaves nothing half sent.
"""

from __future__ import annotations

import datetime
import os
import weakref
from typing import TYPE_CHECKING

from .. import _torch
from ..errors import FsdpError, ShardMismatchError, describe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["EntryGate", "entry_timeout", "gate_of", "naming_failures"]


def entry_timeout() -> float:
    """Seconds to wait for the other ranks: ``FSDP_ENTRY_TIMEOUT``, 60 by default.  Collective: none."""
    return float(os.environ.get("FSDP_ENTRY_TIMEOUT", "60"))


class naming_failures:  # noqa: N801 a context manager, in the hot path too hot for a generator
    """Turns what a backend raises when a peer is gone or late into an error that names the activity."""

    __slots__ = ("_activity",)

    def __init__(self, activity: str) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, FsdpError):
            raise ShardMismatchError(
                describe(
                    f"communication failed while {self._activity}: {error}",
                    remedy="A rank has stopped, or ranks have run different units or calls; look at the first error "
                    "of every rank.",
                )
            ) from error


def gate_of(group: ProcessGroup) -> EntryGate:
    """The gate of ``group``: one a process, because it counts the calls of all wrappers over the group."""
    gate = _GATES.get(group)
    if gate is None:
        gate = _GATES[group] = EntryGate(group)
    return gate


class EntryGate:
    """Counts the collective calls of one group; see the module's docstring.

    Args:
        group: The group whose ranks must enter together; one without a store (a fake group) opens at once.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._store: Store | None = _torch.store_of(group)
        self._rank = group.rank()
        self._size = group.size()
        self._calls = 0

    def enter(self, call: str) -> None:
        """Wait until every rank has entered ``call``.

        Collective: every rank of the group.  Three store operations a rank, whatever the size of the group.

        Raises:
            ShardMismatchError: If some have not within ``FSDP_ENTRY_TIMEOUT`` seconds, or entered another call; names
                the ranks.
        """
        if self._store is None or self._size == 1:
            return
        number, self._calls = self._calls, self._calls + 1
        self._store.set(f"{number}/{self._rank}", call)
        if self._store.add(f"{number}/count", 1) == self._size:
            self._store.set(f"{number}/open", "")
        try:
            self._store.wait([f"{number}/open"], datetime.timedelta(seconds=entry_timeout()))
        except RuntimeError as error:
            raise self._absent(self._store, number, call) from error
        self._compare(self._store, number, call)
        if number:
            self._store.delete_key(f"{number - 1}/{self._rank}")

    def _absent(self, store: Store, number: int, call: str) -> ShardMismatchError:
        missing = tuple(rank for rank in range(self._size) if not store.check([f"{number}/{rank}"]))
        present = [rank for rank in range(self._size) if rank not in missing]
        return ShardMismatchError(
            describe(
                f"{call} is collective but was entered by ranks {present} only: ranks {list(missing)} did not within "
                f"{entry_timeout():g} s",
                rank=(self._rank, self._size),
                remedy="Call it on every rank; to keep the result on rank 0 only, use rank0_only=True and still call "
                "it everywhere.",
            ),
            ranks=missing,
        )

    def _compare(self, store: Store, number: int, call: str) -> None:
        """The rank after this one speaks for all: a chain of equal neighbours is a group of equals."""
        neighbour = (self._rank + 1) % self._size
        other = store.get(f"{number}/{neighbour}").decode()
        if other != call:
            raise ShardMismatchError(
                describe(
                    f"rank {self._rank} entered {call} while rank {neighbour} entered {other}",
                    remedy="Make the same collective calls in the same order on every rank.",
                ),
                ranks=(self._rank, neighbour),
            )


_GATES: weakref.WeakKeyDictionary[ProcessGroup, EntryGate] = weakref.WeakKeyDictionary()
