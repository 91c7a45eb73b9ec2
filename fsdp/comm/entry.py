"""Every rank says that it has entered a collective call before any of them communicates.

A call that some ranks do not make (``if rank == 0: model.state_dict()``) would otherwise wait for the backend's
timeout, half an hour by default, and then say nothing useful.  The exchange goes through the group's store, not through
its communicator, so a missing rank leaves nothing half sent.
"""

from __future__ import annotations

import datetime
import itertools
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from .. import _torch
from ..errors import FsdpError, FsdpWarning, ShardMismatchError, describe
from .timeout import entry_timeout
from .watch import Awaited, Channel, the_watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["EntryGate", "gate_of", "raise_named"]

_LOST = "\x1e"  # the verdict where not all ranks will ever come
_NOTE = "\x1f"  # between the name of a call and what a rank has to say about it
_PERIOD = 0.2  # seconds between looks after the first long wait
_LONGEST_WAIT = 1800.0  # seconds; as long as torch's own collectives wait by default


def raise_named(activity: str, error: RuntimeError) -> NoReturn:
    """Raise, in the place of ``error``, what a backend's failure in ``activity`` means: a peer is gone or late."""
    if isinstance(error, FsdpError):
        raise error
    raise ShardMismatchError(
        describe(
            f"communication failed while {activity}: {error}",
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
        self._store: Store | None = _torch.store_of(group, "fsdp-entry")
        self._rank = group.rank()
        self._size = group.size()
        self._name = group.group_name if self._store else ""
        self._ranks = tuple(dist.get_process_group_ranks(group)) if self._store else ()
        self._channels: dict[str, Channel] = {}
        self._sequences = itertools.count()
        if self._store is not None:
            the_watch()  # so that the others know this process

    def enter(self, call: str) -> None:
        """Wait until every rank has entered ``call``.

        Collective: every rank of the group.  Four store operations a rank, whatever the size of the group.

        Raises:
            ShardMismatchError: If some have not within ``FSDP_ENTRY_TIMEOUT`` seconds, or entered another call; names
                the ranks.
        """
        self._enter("", call, _differing_calls, patient=False)

    def agree(self, call: str, problem: str = "") -> str:
        """Wait until every rank has entered ``call``, and learn the ``problem`` that any rank has with it.

        Collective: every rank of the group.  Slow ranks are waited for as long as collectives wait.

        Returns:
            The same text on every rank: what is wrong and where, or ``""``.

        Raises:
            ShardMismatchError: If a rank entered another call.
        """
        if self._store is None or self._size == 1:
            return problem
        try:
            self._enter("", f"{call}{_NOTE}{problem}", _problems, patient=True)
        except ShardMismatchError as error:
            head, _, problems = str(error).partition(_NOTE)
            if not head:
                return problems
            raise
        return ""

    def new_sequence(self) -> str:
        """A name for :meth:`follow`; every rank asks for its names in the same order.  Collective: none."""
        return f"sequence{next(self._sequences)}"

    def follow(self, sequence: str, step: str) -> None:
        """Wait until every rank has come to the next step of ``sequence``, and see that it is the same one.

        Collective: every rank of the group.  Slow ranks are waited for as long as collectives wait.

        Raises:
            ShardMismatchError: If a rank came to another step; names both.
        """
        self._enter(sequence, step, _differing_steps, patient=True)

    def see_alike(self, sequence: str, occasion: str, built: Sequence[str]) -> None:
        """Wait until every rank has come here, on this ``occasion``, and see that all have ``built`` the same.

        Collective: every rank of the group.  Only checksums travel, unless they differ.

        Raises:
            ShardMismatchError: Naming the first thing that some rank has built otherwise, as each has built it.
        """
        digests = [f"{zlib.crc32(text.encode()):08x}" for text in built]
        entry = _NOTE.join([occasion, *digests])
        place = self._meet(f"{sequence}.alike", entry, _first_unlike, patient=True)
        if place:
            mine = [*built, "nothing more"][min(int(place), len(built))]
            self._enter(f"{sequence}.unlike", mine, _unlike, patient=False)

    @property
    def has_store(self) -> bool:
        """Whether ranks can meet here at all."""
        return self._store is not None

    def compare(self, sequence: str, names: Sequence[str]) -> None:
        """Find out where ranks, which are known to have run different ``names``, first differ.

        Collective: every rank of the group.

        Raises:
            ShardMismatchError: Naming what each rank ran there; or the ranks that do not come within
                ``FSDP_ENTRY_TIMEOUT`` seconds.
        """
        self._enter(sequence, _NOTE.join(names), _first_difference, patient=False)

    def _enter(
        self,
        sequence: str,
        entry: str,
        judge: Callable[[Mapping[int, str]], str | None],
        *,
        patient: bool,
    ) -> None:
        verdict = self._meet(sequence, entry, judge, patient=patient)
        if verdict:
            raise ShardMismatchError(verdict)

    def _meet(
        self,
        sequence: str,
        entry: str,
        judge: Callable[[Mapping[int, str]], str | None],
        *,
        patient: bool,
    ) -> str:
        """What ``judge`` says of all ranks' entries, the same on every rank; ``""`` if all is well."""
        store = self._store
        if store is None or self._size == 1:
            return ""
        channel = self._channel(sequence)
        place = f"{sequence}/{channel.launched}"
        channel.launched += 1
        store.set(f"{place}/{self._rank}", entry)
        if store.add(f"{place}/count", 1) == self._size:
            entries = {
                global_rank: store.get(f"{place}/{rank}").decode()
                for rank, global_rank in enumerate(self._ranks)
            }
            if not store.check([f"{place}/verdict"]):  # else a rank has given up
                store.set(f"{place}/verdict", judge(entries) or "")
            for rank in range(self._size):
                store.delete_key(f"{place}/{rank}")
        channel.text = f"every rank to come to {entry.partition(_NOTE)[0]}"
        self._wait(store, channel, place, entry, patient=patient)
        verdict = store.get(f"{place}/verdict").decode()
        if verdict == _LOST:
            watch = the_watch()
            raise (watch and watch.explanation()) or self._why_lost(store, place, entry)
        if store.add(f"{place}/count", 1) == 2 * self._size:
            store.delete_key(f"{place}/verdict")
            store.delete_key(f"{place}/count")
        return verdict

    def _channel(self, sequence: str) -> Channel:
        """This gate's places of one sequence, which the watch knows: those who wait here may wait in a circle."""
        channel = self._channels.get(sequence)
        if channel is None:
            key = f"{self._name}/gate/{sequence}"
            channel = Channel(key, "", self._ranks, lambda: self._give_up(sequence), is_gate=True)
            self._channels[sequence] = channel
            watch = the_watch()
            if watch is not None:
                watch.add(channel)
        return channel

    def _give_up(self, sequence: str) -> None:
        """End the wait of every rank that has come to this one's place: the others never will."""
        assert self._store is not None
        place = f"{sequence}/{self._channels[sequence].launched - 1}"
        self._store.set(f"{place}/verdict", _LOST)

    def _wait(
        self, store: Store, channel: Channel, place: str, entry: str, *, patient: bool
    ) -> None:
        try:
            store.wait([f"{place}/verdict"], datetime.timedelta(seconds=entry_timeout()))
        except RuntimeError as error:
            absence = self._absence(store, place, entry)
            watch = the_watch()
            if not patient or (watch is not None and watch.guarded):
                store.set(f"{place}/why", str(absence))
                channel.interrupt()
                if watch is not None:
                    watch.give_up(str(absence))
                raise absence from error
            warnings.warn(f"{absence}  Still waiting.", FsdpWarning, stacklevel=5)
            if watch is not None:
                started = time.monotonic() - entry_timeout()
                watch.begin(Awaited(channel, channel.launched - 1, started))
            deadline = time.monotonic() + _LONGEST_WAIT
            # Not one long call, which would keep the watch from the store.
            try:
                while not store.check([f"{place}/verdict"]):
                    if time.monotonic() > deadline:
                        raise absence from error
                    time.sleep(_PERIOD)
            finally:  # who is interrupted does not wait any more
                if watch is not None:
                    watch.end()

    def _why_lost(self, store: Store, place: str, entry: str) -> ShardMismatchError:
        if store.check([f"{place}/why"]):
            return ShardMismatchError(store.get(f"{place}/why").decode())
        return self._absence(store, place, entry)

    def _absence(self, store: Store, place: str, entry: str) -> ShardMismatchError:
        present: list[int] = []
        missing: list[int] = []
        for rank, global_rank in enumerate(self._ranks):
            (present if store.check([f"{place}/{rank}"]) else missing).append(global_rank)
        call = entry.partition(_NOTE)[0]
        return ShardMismatchError(
            describe(
                f"{call} is collective but was entered by ranks {present} only: ranks {missing} did not within "
                f"{entry_timeout():g} s",
                rank=(self._ranks[self._rank], dist.get_world_size()),
                remedy="Call it on every rank; to keep the result on rank 0 only, use rank0_only=True and still call "
                "it everywhere.",
            ),
            ranks=tuple(missing),
        )


def _differing_calls(calls: Mapping[int, str]) -> str | None:
    if len(set(calls.values())) == 1:
        return None
    return describe(
        f"ranks entered different collective calls: {_by_rank(calls)}",
        remedy="Make the same collective calls in the same order on every rank.",
    )


def _problems(entries: Mapping[int, str]) -> str | None:
    parts = {rank: entry.partition(_NOTE) for rank, entry in entries.items()}
    problems = {rank: problem for rank, (_, _, problem) in parts.items()}
    differing = _differing_calls({rank: call for rank, (call, _, _) in parts.items()})
    found = set(problems.values())
    if differing is not None or not any(found):
        return differing
    return _NOTE + (found.pop() if len(found) == 1 else _by_rank(problems, skip=""))


def _differing_steps(steps: Mapping[int, str]) -> str | None:
    if len(set(steps.values())) == 1:
        return None
    return describe(
        f"Forward order differs across ranks: {_by_rank(steps)}",
        remedy="Run the same units in the same order on every rank, or pass allow_unused='any_rank' to the wrapper.",
    )


def _first_difference(entries: Mapping[int, str]) -> str | None:
    orders = {rank: entry.split(_NOTE) for rank, entry in entries.items()}
    ran = list(orders.values())
    if ran.count(ran[0]) == len(ran):
        return None
    place = next(i for i in itertools.count() if len({tuple(order[: i + 1]) for order in ran}) > 1)
    steps = {
        rank: f"unit {order[place]!r}" if place < len(order) else "nothing"
        for rank, order in orders.items()
    }
    return describe(
        f"Forward order differs across ranks: number {place + 1} of the units that ran was {_by_rank(steps)}",
        remedy="Run the same units in the same order on every rank, or pass allow_unused='any_rank' to the wrapper.",
    )


def _first_unlike(entries: Mapping[int, str]) -> str | None:
    lists = [entry.split(_NOTE)[1:] for entry in entries.values()]
    if lists.count(lists[0]) == len(lists):
        return None
    places = itertools.zip_longest(*lists)
    return str(next(place for place, found in enumerate(places) if len(set(found)) > 1))


def _unlike(entries: Mapping[int, str]) -> str:
    return describe(
        f"Ranks have built different models: {_by_rank(entries)}",
        remedy="Build the same model with the same arguments of the wrapper on every rank.",
    )


def _by_rank(entries: Mapping[int, str], skip: str | None = None) -> str:
    """Which ranks said what; ``rank 0: a; ranks 1, 2: b``.  Ranks that said ``skip`` are left out."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        ranks.setdefault(entry, []).append(rank)
    if skip is not None:
        ranks.pop(skip, None)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {entry}"
        for entry, who in ranks.items()
    )


_GATES: weakref.WeakKeyDictionary[ProcessGroup, EntryGate] = weakref.WeakKeyDictionary()
