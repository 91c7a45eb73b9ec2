"""Notices that ranks wait for each other for ever, and ends the wait with an error that names what each waits for.

Every exchange of a unit (one gather or one reduce) has a key that all ranks know: group, unit, kind and how many of
its kind came before.  A rank that has waited for an exchange longer than ``FSDP_ENTRY_TIMEOUT`` seconds writes into
the job's store which exchange that is and which ones it has launched so far: its ledger.  With the ledgers of others
it can tell slowness from deadlock:

* every rank has launched the awaited exchange: the network is slow; go on waiting;
* a rank that has not launched it is not waiting for anything: it still computes; warn once, go on waiting;
* ranks wait in a circle, each for an exchange that another has not launched: nobody will ever move; raise.

So a healthy run is never ended, however slow, and a run whose ranks went different ways ends within seconds of the
limit.  A rank whose process has ended, or that has given up at a gate, ends the wait of those who meet there; under a
guard (``with model.guard():``) a rank that failed or stayed away ends the wait too.

Nothing of this runs before a wait has lasted long: the hot path notes what it waits for, no more.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _torch
from ..errors import FsdpWarning, ShardMismatchError, describe
from .processes import Watched, named_process, this_process
from .timeout import entry_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["Awaited", "Channel", "Watch", "the_watch"]

_LONGEST_PERIOD = 1.0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Channel:
    """Exchanges of one kind of one unit.

    Attributes:
        key: What they are, the same on every rank: ``"<group>/<unit>/<kind>"``.
        text: What they are for people: ``"the gather of unit 'blocks.1'"``.
        ranks: Global ranks of the group.
        interrupt: Makes every wait over the group raise, now and later.
        launched: How many this rank has launched.
        is_gate: Whether ranks only meet there, and send nothing that would tell them of a peer's end.
    """

    key: str
    text: str
    ranks: tuple[int, ...]
    interrupt: Callable[[], None]
    launched: int = 0
    is_gate: bool = False


@dataclass(eq=False, slots=True)
class Awaited:
    """An exchange that a thread waits for.

    Attributes:
        channel: What it is one of.
        number: How many came before it.
        since: When the wait began, by ``time.monotonic()``.
    """

    channel: Channel
    number: int
    since: float


@dataclass(frozen=True, slots=True)
class Position:
    """Where a waiting rank stands, as it writes it into the store.

    Attributes:
        key: The channel of the exchange it waits for, with its ``text`` and ``ranks``.
        number: How many exchanges of that channel came before it.
        launched: How many exchanges of each channel it has launched.
    """

    key: str
    number: int
    text: str
    ranks: tuple[int, ...]
    launched: dict[str, int]

    def has_launched(self, other: Position) -> bool:
        """Whether this rank has done its part of what ``other`` waits for."""
        return self.launched.get(other.key, 0) > other.number

    def encode(self) -> str:
        """As text for the store."""
        return json.dumps([self.key, self.number, self.text, self.ranks, self.launched])

    @classmethod
    def decode(cls, text: str | bytes) -> Position:
        """What :meth:`encode` gave."""
        key, number, said, ranks, launched = json.loads(text)
        return cls(key, number, said, tuple(ranks), launched)


def find_circle(positions: dict[int, Position], start: int) -> list[int] | None:
    """Ranks that wait for each other in a circle ``start`` leads into, or None if somebody there can still move.

    Collective: none.

    Args:
        positions: The ranks that are waiting.
        start: One of them.

    Example:
        >>> first = Position("a", 0, "a", (0, 1), {"a": 1})
        >>> second = Position("b", 0, "b", (0, 1), {"b": 1})
        >>> find_circle({0: first, 1: second}, 0)
        [0, 1]
        >>> find_circle({0: first}, 0) is None
        True
    """
    path: list[int] = []
    finished: set[int] = set()

    def visit(rank: int) -> list[int] | None:
        if rank in path:
            return path[path.index(rank) :]
        if rank in finished or rank not in positions:
            return None
        path.append(rank)
        awaited = positions[rank]
        for other in awaited.ranks:
            blocks = other in positions and not positions[other].has_launched(awaited)
            if blocks and (circle := visit(other)) is not None:
                return circle
        finished.add(path.pop())
        return None

    return visit(start)


class Watch:
    """Watches the waits of this process; see the module's docstring.

    Args:
        store: The job's store, shared by all ranks.
        rank: This process's global rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._channels: list[weakref.ref[Channel]] = []
        self._waiting: dict[int, Awaited] = {}
        self._verdict: str | None = None
        self._thread: threading.Thread | None = None
        self._guard_epoch = 0
        self._guards = 0
        self._processes: dict[int, Watched | None] = {}
        store.set(f"process/{rank}", this_process())

    def add(self, channel: Channel) -> None:
        """Make ``channel`` part of this rank's ledger, as long as it lives."""
        self._channels.append(weakref.ref(channel))

    # -- the hot path ----------------------------------------------------------------------------------------------

    def begin(self, awaited: Awaited) -> None:
        """The calling thread is about to wait."""
        self._waiting[threading.get_ident()] = awaited
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fsdp-watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The calling thread waits no more."""
        self._waiting.pop(threading.get_ident(), None)

    def give_up(self, why: str) -> None:
        """This rank leaves a gate to which others have not come: who waits for it somewhere else learns of it."""
        self._store.set(f"gave up/{self._rank}", why)

    # -- guarded sections ------------------------------------------------------------------------------------------

    @property
    def guarded(self) -> bool:
        """Whether a rank that stays away ends the wait of the others."""
        return self._guards > 0

    def enter_guard(self) -> None:
        """Begin a guarded section; every rank does.  Collective: none."""
        if not self._guards:
            self._guard_epoch += 1
        self._guards += 1

    def leave_guard(self, error: BaseException | None) -> None:
        """End it; the others are told of ``error``.  Collective: none."""
        self._guards -= 1
        if error is not None:
            told = f"{type(error).__name__}: {error}"
            self._store.set(f"failed/{self._guard_epoch}/{self._rank}", told)

    # -- errors ----------------------------------------------------------------------------------------------------

    def explanation(self) -> ShardMismatchError | None:
        """Why waits were interrupted, on this rank or on the one that found out first; None if they were not."""
        if self._verdict is None and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
        return None if self._verdict is None else ShardMismatchError(self._verdict)

    # -- the watching thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        before: dict[int, Position] = {}
        posted = False
        warned: Awaited | None = None
        while self._verdict is None:
            time.sleep(min(_LONGEST_PERIOD, entry_timeout() / 4))
            try:
                awaited = min(
                    list(self._waiting.values()), key=lambda found: found.since, default=None
                )
                if awaited is not None and self._guards and (failed := self._failures(awaited)):
                    self._interrupt(awaited, failed)
                    return
                if awaited is None or time.monotonic() - awaited.since < entry_timeout():
                    if posted:
                        self._store.delete_key(f"waiting/{self._rank}")
                        posted, before = False, {}
                    continue
                mine = self._position(awaited)
                self._store.set(f"waiting/{self._rank}", mine.encode())
                posted = True
                now = self._positions(mine)
                circle = find_circle(now, self._rank)
                # Seen twice, so that nobody on the circle has moved in between.
                if circle is not None and all(now[rank] == before.get(rank) for rank in circle):
                    self._interrupt(awaited, _describe_circle(circle, now))
                    return
                before = now
                if circle is None and (absent := self._absent(mine, now)):
                    lost = self._lost(awaited, absent)
                    told = _describe_absent(mine, self._rank, absent)
                    if lost or self._guards:
                        self._interrupt(awaited, lost or told)
                        return
                    if warned is not awaited:
                        warned = awaited
                        warnings.warn(told, FsdpWarning, stacklevel=2)
            except RuntimeError:
                return  # the store is gone: the job is ending

    def _position(self, awaited: Awaited) -> Position:
        live = [channel for ref in self._channels if (channel := ref()) is not None]
        ledger = {channel.key: channel.launched for channel in live}
        channel = awaited.channel
        return Position(channel.key, awaited.number, channel.text, channel.ranks, ledger)

    def _positions(self, mine: Position) -> dict[int, Position]:
        """Every waiting rank that ``mine`` leads to, directly or through others."""
        found = {self._rank: mine}
        to_ask = list(mine.ranks)
        while to_ask:
            rank = to_ask.pop()
            if rank not in found and self._store.check([f"waiting/{rank}"]):
                found[rank] = Position.decode(self._store.get(f"waiting/{rank}"))
                to_ask += found[rank].ranks
        return found

    def _absent(self, mine: Position, waiting: dict[int, Position]) -> list[int]:
        """Ranks of the awaited exchange that wait for nothing."""
        return [rank for rank in mine.ranks if rank not in waiting]

    def _failures(self, awaited: Awaited) -> str | None:
        """What ranks that failed inside this guarded section have said."""
        for rank in awaited.channel.ranks:
            key = f"failed/{self._guard_epoch}/{rank}"
            if rank != self._rank and self._store.check([key]):
                return describe(
                    f"rank {self._rank} waits for {awaited.channel.text}, but rank {rank} has failed: "
                    f"{self._store.get(key).decode()}",
                    remedy="Look at that rank's error; restart the job from the last checkpoint.",
                )
        return None

    def _lost(self, awaited: Awaited, absent: list[int]) -> str | None:
        """Why one of the ``absent`` will never come to the gate that is waited at, if that is known."""
        if not awaited.channel.is_gate:
            return None  # who communicates finds out by itself
        for rank in absent:
            if self._store.check([f"gave up/{rank}"]):
                why = f"rank {rank} has given up: {self._store.get(f'gave up/{rank}').decode()}"
            elif self._has_ended(rank):
                why = f"the process of rank {rank} has ended"
            else:
                continue
            return describe(
                f"rank {self._rank} waits for {awaited.channel.text}, but {why}",
                remedy="Look at the first error of that rank, and make the same calls on every rank.",
            )
        return None

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to be no more."""
        if rank not in self._processes:
            key = f"process/{rank}"
            told = self._store.get(key).decode() if self._store.check([key]) else ""
            self._processes[rank] = named_process(told)
        process = self._processes[rank]
        return process is not None and process.has_ended()

    def _interrupt(self, awaited: Awaited, verdict: str) -> None:
        self._verdict = verdict
        self._store.set("verdict", verdict)
        awaited.channel.interrupt()


def _describe_circle(circle: Iterable[int], positions: dict[int, Position]) -> str:
    who = ", ".join(f"rank {rank} waits for {positions[rank].text}" for rank in sorted(circle))
    return describe(
        f"Forward order differs across ranks: {who}, and none of them can go on",
        remedy="Make the same calls and run the same units in the same order on every rank, or pass "
        "allow_unused='any_rank' to the wrapper.",
    )


def _describe_absent(mine: Position, rank: int, absent: list[int]) -> str:
    return describe(
        f"rank {rank} has waited {entry_timeout():g} s for {mine.text}, and ranks {absent} are not waiting for "
        "anything: they are slow, have left the step, or have failed",
        remedy="Look at what those ranks do; if they take other branches of the model, pass allow_unused='any_rank' "
        "to the wrapper.",
    )


_WATCHES: weakref.WeakKeyDictionary[ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def the_watch() -> Watch | None:
    """The watch of this process for the current job; None where ranks share no store.  Collective: none."""
    job = _torch.default_group()
    watch = _WATCHES.get(job)
    if watch is None:
        store = _torch.store_of(job, "fsdp-watch")
        if store is None:
            return None
        watch = _WATCHES[job] = Watch(store, job.rank())
    return watch
