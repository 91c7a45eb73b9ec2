"""Messages between ranks of one host through memory that they share, instead of gloo's sockets.

Note [Shared memory]
    A socket moves each byte twice through the kernel and wakes threads on both sides.  Ranks of one host can do
    better: the sender copies into a segment that its peers have mapped, and they read from there, straight into a
    gathered parameter or into a sum.  At 1.5 MiB that takes a tenth of the processor time (measured,
    docs/explanation/performance.md), which on the CPU is time taken from the computation.

    Each rank has one segment for each group::

        page 0            a token, by which peers know that they have mapped the right memory
        board             for each channel (the gathers of a unit, its reductions): how many messages have been posted,
                          and where the last few of them lie
        arena             regions, each with a header: for each neighbour, whether it has read its message, and where
                          that message begins

    Every word has one writer: posting is a copy, then two stores; reading is a load, then a copy, then a store.  No
    locks and no atomic operations are needed where stores become visible in order, so this is for x86-64 only.

    A channel holds 63 messages: a rank that is further ahead of a peer that has not read yet waits before it sends.
    Units have one gather and one reduction on their way at a time.

    A rank that waits polls: it yields the processor at first, then sleeps for a share of the time it has waited
    already.  It notices when the peer's process has ended, when the watch has found a deadlock, and the group's
    timeout.

    Segments are anonymous (``memfd``): nothing is left in the file system, whatever ends the process.  Memory is used
    only as far as it is touched: at most what is in flight, since longer messages go through gloo.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .processes import Watched

__all__ = ["LONGEST_MESSAGE", "Check", "Introduction", "Neighbours", "Segment", "find", "introduce"]

LONGEST_MESSAGE = 4 << 20  # bytes; beyond, gloo copies in the background and needs no memory

_PAGE = 4096
_WORD = 8
_LINE = 64
_CHANNELS = 1 << 15
_RING = 63  # messages of one channel that can be in flight
_ROW_WORDS = 1 + _RING  # a board's row: how many have been posted, and where the last ones are
_BOARD = _PAGE
_ARENA = _BOARD + _CHANNELS * _ROW_WORDS * _WORD
_SEGMENT = _ARENA + (1 << 30)  # addresses, not memory
_SPARE_CLASSES = 7  # how much too large a region may be for a message in pieces, as a power of two
_SPIN = 1e-4
_LONGEST_SLEEP = 1e-3
_LIVENESS_PERIOD = 0.05
_CHECK_AFTER = 1.0

Check = Callable[[], None]
"""Called now and then in a long wait; raises to end it."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells its peers, as one tensor.

    Attributes:
        host: The same on ranks that can see each other's memory and would reach each other without a network.
        pid: The process.
        descriptor: Its segment's file.
        token: What the segment begins with.
    """

    host: int
    pid: int
    descriptor: int
    token: int

    def encode(self) -> torch.Tensor:
        """``[4]`` int64."""
        return torch.tensor([self.host, self.pid, self.descriptor, self.token])

    @classmethod
    def decode(cls, words: torch.Tensor) -> Introduction:
        """What :meth:`encode` gave."""
        return cls(*words.tolist())


_NOBODY = Introduction(0, 0, 0, 0)


class Segment:
    """A mapped segment: this rank's own, or a peer's.

    Args:
        descriptor: A file of ``_SEGMENT`` bytes, which may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        mapping = mmap.mmap(descriptor, _SEGMENT)
        self.words = memoryview(mapping).cast("q")
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """``like``-sized 1-D tensor at ``offset`` bytes."""
        return self.bytes[offset : offset + like.nbytes].view(like.dtype)


def _host() -> int:
    """This host, or 0 where ranks should not look for shared memory.

    Ranks in different network namespaces count as different hosts: that is what whoever set them up means.
    """
    if os.environ.get("FSDP_SHARED_MEMORY", "1") == "0":
        return 0
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return 0
    digest = hashlib.sha256(f"{boot}{spaces}{os.getuid()}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) | 1


def introduce() -> tuple[Introduction, int | None, Segment | None]:
    """Make this rank's segment: what to tell peers of it, its file to close once they have found it, the segment.

    Collective: none.

    Returns:
        An introduction without a host, None and None, where there is no such memory.
    """
    host = _host()
    if not host:
        return _NOBODY, None, None
    try:
        descriptor = os.memfd_create("fsdp", os.MFD_CLOEXEC)
    except OSError:
        return _NOBODY, None, None
    try:
        os.ftruncate(descriptor, _SEGMENT)
        segment = Segment(descriptor)
    except (OSError, ValueError):
        os.close(descriptor)
        return _NOBODY, None, None
    token = secrets.randbits(62)
    segment.words[0] = token
    return Introduction(host, os.getpid(), descriptor, token), descriptor, segment


def find(peer: Introduction, mine: Introduction) -> Segment | None:
    """Map a peer's segment; None if it is on another host or cannot be reached.  Collective: none."""
    if not mine.host or peer.host != mine.host:
        return None
    try:
        descriptor = os.open(f"/proc/{peer.pid}/fd/{peer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != _SEGMENT:
            return None
        segment = Segment(descriptor)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return segment if segment.words[0] == peer.token else None


class Neighbour:
    """A peer on this host.

    Args:
        rank: Its rank in the group.
        pid: Its process.
        segment: Its segment.
        place: Which of its neighbours this rank is, in the order of ranks.
    """

    def __init__(self, rank: int, pid: int, segment: Segment, place: int) -> None:
        self.rank = rank
        self.pid = pid
        self.segment = segment
        self.place = place
        self._process = Watched(pid)  # where the kernel cannot tell, the timeout will

    def has_ended(self) -> bool:
        """Whether its process is no more."""
        return self._process.has_ended()


class _Unread(NamedTuple):
    """A message in the own segment: its region, the region's size class, its channel and number, who posts pieces."""

    region: int
    size_class: int
    channel: int
    number: int
    thread: int | None


@dataclass(slots=True)
class _Arena:
    """Regions of the own segment: handed out by size class, taken back once every neighbour has read them.

    Attributes:
        end: Where untouched memory begins.
        free: Regions to hand out again, by size class (the power of two).
        unread: Messages that are still to be read, oldest first.
    """

    end: int = _ARENA
    free: dict[int, list[int]] = field(default_factory=dict)
    unread: list[_Unread] = field(default_factory=list)

    def class_with_room(self, size_class: int, spare: int) -> int:
        """The first of ``size_class`` and the ``spare`` classes above it that has a free region; it if none has."""
        self.free.setdefault(size_class, [])
        candidates = range(size_class, size_class + spare + 1)
        return next((found for found in candidates if self.free.get(found)), size_class)


class Neighbours:
    """The peers of a group that share this rank's host, and messages to and from them.

    Args:
        mine: This rank's segment.
        peers: Those peers.
        timeout: Seconds after which a wait fails.

    Attributes:
        ranks: Their ranks in the group, ascending.
        interrupted: Set to end every wait, now and later.
    """

    def __init__(self, mine: Segment, peers: Iterable[Neighbour], timeout: float) -> None:
        self._mine = mine
        self._timeout = timeout
        self._peers = {peer.rank: peer for peer in peers}
        self.ranks = tuple(sorted(self._peers))
        self._header = _padded(2 * _WORD * len(self.ranks))
        self._arena = _Arena()
        self._lock = threading.Lock()
        self.interrupted = False

    def post(
        self, channel: int, number: int, messages: Sequence[Sequence[torch.Tensor]], check: Check
    ) -> None:
        """Leave message ``number`` of ``channel`` for the neighbours; the tensors may be changed afterwards.

        Args:
            channel: What they are; below :meth:`channels`.
            number: How many of that channel came before.
            messages: For each neighbour, in the order of ``ranks``: contiguous tensors.  One object given to
                neighbours in a row is copied once.
            check: Called now and then while a wait lasts.
        """
        words = self._mine.words
        with self._lock:
            region = self._take_region(_size_of(messages) + self._header, channel, number, check)
            head = region // _WORD
            at = region + self._header
            written: Sequence[torch.Tensor] = ()
            start = at
            for place, tensors in enumerate(messages):
                if tensors is not written:
                    written, start = tensors, at
                    for tensor in tensors:
                        nbytes = tensor.nbytes
                        ctypes.memmove(self._mine.address + at, tensor.data_ptr(), nbytes)
                        at += _padded(nbytes)
                words[head + 2 * place] = 0
                words[head + 2 * place + 1] = start
            self._announce(channel, number, region)

    def post_pieces(
        self,
        channel: int,
        number: int,
        pieces: Sequence[Sequence[torch.Tensor]],
        dtype: torch.dtype,
        check: Check,
    ) -> None:
        """The same, of what lies in pieces, when all have read the thread's message in pieces before.

        A neighbour finds its own pieces without gaps between them, as ``dtype``.

        Args:
            channel: What they are.
            number: How many of that channel came before.
            pieces: For each neighbour, in the order of ``ranks``: 1-D tensors, expanded zeros among them.
            dtype: What the neighbours read.
            check: Called now and then while a wait lasts.
        """
        words = self._mine.words
        sizes = [sum(piece.numel() for piece in of_one) * dtype.itemsize for of_one in pieces]
        with self._lock:
            self._withdraw(channel, number)
            room = sum(map(_padded, sizes)) + self._header
            thread = threading.get_ident()
            region = self._take_region(room, channel, number, check, thread=thread)
            head = region // _WORD
            at = region + self._header
            for place, (of_one, size) in enumerate(zip(pieces, sizes, strict=True)):
                words[head + 2 * place] = 0
                words[head + 2 * place + 1] = at
                self._write(of_one, at, dtype)
                at += _padded(size)
            self._announce(channel, number, region)

    def _write(self, pieces: Sequence[torch.Tensor], at: int, dtype: torch.dtype) -> None:
        for piece in pieces:
            nbytes = piece.numel() * dtype.itemsize
            if piece.dtype is dtype and piece.is_contiguous():
                ctypes.memmove(self._mine.address + at, piece.data_ptr(), nbytes)
            else:
                self._mine.bytes[at : at + nbytes].view(dtype).copy_(piece)
            at += nbytes

    def _announce(self, channel: int, number: int, region: int) -> None:
        words = self._mine.words
        row = (_BOARD // _WORD) + channel * _ROW_WORDS
        words[row + 1 + number % _RING] = region
        words[row] = number + 1

    def wait_for(self, channel: int, number: int, rank: int, check: Check) -> int:
        """Where message ``number`` of ``channel`` from ``rank`` begins in its segment, once it is there.

        Raises:
            RuntimeError: If the peer's process has ended, the wait is interrupted or the group's timeout is over.
        """
        peer = self._peers[rank]
        words = peer.segment.words
        row = (_BOARD // _WORD) + channel * _ROW_WORDS
        if words[row] <= number:
            self._poll(lambda: words[row] > number, peer, check)
        return words[words[row + 1 + number % _RING] // _WORD + 2 * peer.place + 1]

    def has_announced(self, channel: int, number: int) -> bool:
        """Whether this rank has posted message ``number`` of ``channel``."""
        return self._mine.words[_BOARD // _WORD + channel * _ROW_WORDS] > number

    def has_posted(self, channel: int, number: int, rank: int) -> bool:
        """Whether message ``number`` of ``channel`` from ``rank`` is there."""
        words = self._peers[rank].segment.words
        return words[_BOARD // _WORD + channel * _ROW_WORDS] > number

    def read(self, rank: int, offset: int, out: torch.Tensor) -> int:
        """Copy from ``rank``'s segment into ``out`` (contiguous); returns where the next tensor begins."""
        nbytes = out.nbytes
        ctypes.memmove(out.data_ptr(), self._peers[rank].segment.address + offset, nbytes)
        return offset + _padded(nbytes)

    def view(self, rank: int, offset: int, like: torch.Tensor) -> tuple[torch.Tensor, int]:
        """``rank``'s memory as a 1-D tensor like ``like``, to be only read; and where the next tensor begins."""
        return self._peers[rank].segment.view(offset, like), offset + _padded(like.nbytes)

    def acknowledge(self, channel: int, number: int, rank: int) -> None:
        """Let ``rank`` use the memory of message ``number`` of ``channel`` again."""
        peer = self._peers[rank]
        words = peer.segment.words
        row = (_BOARD // _WORD) + channel * _ROW_WORDS
        words[words[row + 1 + number % _RING] // _WORD + 2 * peer.place] = 1

    @staticmethod
    def channels() -> int:
        """How many channels there are."""
        return _CHANNELS

    # -- memory ----------------------------------------------------------------------------------------------------

    def _take_region(
        self,
        nbytes: int,
        channel: int,
        number: int,
        check: Check,
        *,
        thread: int | None = None,
    ) -> int:
        """A region of at least ``nbytes`` for message ``number`` of ``channel``.

        Messages in pieces have one region at a time, whatever they are; memory that a longer message has touched
        costs them nothing more.  Each ``thread`` that posts them has its own: peers read what another one has posted
        only when they have posted theirs, and those of a peer may be waiting for this rank's in a circle.
        """
        size_class = max(nbytes - 1, _PAGE - 1).bit_length()
        in_pieces = thread is not None
        spare = _SPARE_CLASSES if in_pieces else 0
        arena = self._arena
        self._collect_read()
        while True:
            # The ring forgets a message when another one comes to its place.
            last = (channel, number - _RING)
            ahead = [
                unread
                for unread in arena.unread
                if (
                    unread.thread == thread
                    if in_pieces
                    else (unread.channel, unread.number) == last
                )
            ]
            size_class = arena.class_with_room(size_class, spare)
            is_full = not arena.free[size_class] and arena.end + (1 << size_class) > _SEGMENT
            if not ahead and not is_full:
                break
            oldest = (arena.unread if is_full else ahead)[0].region
            self._poll(partial(self._is_read, oldest), self._unread_by(oldest), check)
            self._collect_read()
        free = arena.free[size_class]
        if free:
            region = free.pop()
        else:
            region = arena.end
            arena.end += 1 << size_class
        arena.unread.append(_Unread(region, size_class, channel, number, thread))
        return region

    def _withdraw(self, channel: int, number: int) -> None:
        """Take back what an interrupted post of the message has left, of which nobody has been told."""
        for message in self._arena.unread:
            if (message.channel, message.number) == (channel, number):
                for place in range(len(self.ranks)):
                    self._mine.words[message.region // _WORD + 2 * place] = 1

    def _collect_read(self) -> None:
        arena = self._arena
        unread: list[_Unread] = []
        for message in arena.unread:
            if self._is_read(message.region):
                arena.free[message.size_class].append(message.region)
            else:
                unread.append(message)
        arena.unread = unread

    def _is_read(self, region: int) -> bool:
        head = region // _WORD
        words = self._mine.words
        return all(words[head + 2 * place] for place in range(len(self.ranks)))

    def _unread_by(self, region: int) -> Neighbour:
        """The first neighbour that has not read ``region``."""
        head = region // _WORD
        words = self._mine.words
        late = (rank for place, rank in enumerate(self.ranks) if not words[head + 2 * place])
        return self._peers[next(late, self.ranks[0])]

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _poll(self, done: Callable[[], bool], peer: Neighbour, check: Check) -> None:
        began = time.monotonic()
        looked = began
        while not done():
            now = time.monotonic()
            waited = now - began
            if waited < _SPIN:
                os.sched_yield()
                continue
            time.sleep(min(waited / 8, _LONGEST_SLEEP))
            if now - looked > _LIVENESS_PERIOD:
                looked = now
                self._look_around(done, peer, waited, check)

    def _look_around(
        self, done: Callable[[], bool], peer: Neighbour, waited: float, check: Check
    ) -> None:
        if waited > _CHECK_AFTER:
            check()
        if self.interrupted:
            raise RuntimeError("The wait was interrupted.")
        if peer.has_ended() and not done():
            raise RuntimeError(
                f"The process of rank {peer.rank} of the group (pid {peer.pid}) has ended while this one waits for it."
            )
        if waited > self._timeout:
            raise RuntimeError(
                f"Timed out after {self._timeout:g} s of waiting for rank {peer.rank} of the group."
            )


def _padded(nbytes: int) -> int:
    return (nbytes + _LINE - 1) // _LINE * _LINE


def _size_of(messages: Sequence[Sequence[torch.Tensor]]) -> int:
    size = 0
    written: Sequence[torch.Tensor] = ()
    for tensors in messages:
        if tensors is not written:
            written = tensors
            size += sum(_padded(tensor.nbytes) for tensor in tensors)
    return size
