"""Who of a group shares this rank's host, and the collectives of a unit among them (see Note [Shared memory]).

Ranks meet when a group communicates for the first time: everybody tells everybody where its memory is, maps what it
can, and tells which peers it found.  Two ranks use shared memory if each has found the other, and gloo otherwise.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .. import _torch
from .collectives import Reduce
from .shared_memory import Check, Introduction, Neighbour, Neighbours, find, introduce

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["Line", "NearCombination", "NearGather", "NearSums", "all_are_near", "meet"]

_LOCK = threading.Lock()
_MET: weakref.WeakKeyDictionary[ProcessGroup, tuple[Neighbours | None, bool]] = (
    weakref.WeakKeyDictionary()
)


def meet(group: ProcessGroup, tag: int) -> Neighbours | None:
    """The ranks of ``group`` (gloo) on this host; None if there are none.

    Collective: every rank of ``group``, the first time.

    Args:
        group: At least two ranks.
        tag: A tag of gloo messages that nobody else uses.
    """
    with _LOCK:
        if group not in _MET:
            _MET[group] = _meet(group, tag)
        return _MET[group][0]


def all_are_near(group: ProcessGroup) -> bool:
    """Whether every two ranks of ``group``, which have met, use shared memory: the same answer on all of them."""
    return _MET[group][1]


def _meet(group: ProcessGroup, tag: int) -> tuple[Neighbours | None, bool]:
    rank, size = group.rank(), group.size()
    mine, descriptor, segment = introduce()
    try:
        told = [Introduction.decode(words) for words in _tell_all(group, tag, mine.encode())]
        segments = {
            peer: found
            for peer in range(size)
            if peer != rank and (found := find(told[peer], mine)) is not None
        }
        row = torch.zeros(size, dtype=torch.uint8)
        row[list(segments)] = 1
        reached = torch.stack(_tell_all(group, tag, row))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    mutual = (reached & reached.T).tolist()
    peers = [
        Neighbour(peer, told[peer].pid, found, sum(mutual[peer][:rank]))
        for peer, found in segments.items()
        if mutual[rank][peer]
    ]
    if segment is None or not peers:
        return None, False
    everyone = sum(map(sum, mutual)) == size * (size - 1)
    return Neighbours(segment, peers, _torch.group_timeout(group)), everyone


def _tell_all(group: ProcessGroup, tag: int, mine: torch.Tensor) -> list[torch.Tensor]:
    """What each rank of ``group`` tells."""
    said = [torch.empty_like(mine) for _ in range(group.size())]
    said[group.rank()] = mine
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    works = [group.recv([said[peer]], peer, tag) for peer in peers]
    works += [group.send([mine], peer, tag) for peer in peers]
    for work in works:
        work.wait()
    return said


class Line:
    """Messages of one kind of one unit, to and from the neighbours.

    Args:
        neighbours: The neighbours.
        channel: Which of their channels it is.
        check: Called now and then in a long wait.
    """

    def __init__(self, neighbours: Neighbours, channel: int, check: Check) -> None:
        self.neighbours = neighbours
        self._channel = channel
        self._check = check
        self._sent = 0
        self._abandoned: list[
            tuple[int, int]
        ] = []  # number and rank of messages that nobody will read

    def send(self, messages: Sequence[Sequence[torch.Tensor]]) -> int:
        """Send to each neighbour, in the order of their ranks; returns the message's number."""
        self._let_abandoned_go()
        number = self._sent
        self._sent += 1
        self.neighbours.post(self._channel, number, messages, self._check)
        return number

    def reserve(self, messages: int) -> int:
        """Let nobody else send the next ``messages``; returns the number of the first."""
        self._let_abandoned_go()
        number = self._sent
        self._sent += messages
        return number

    def send_pieces(
        self, number: int, pieces: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
    ) -> None:
        """Send a reserved message, which lies in pieces, to each neighbour (see ``Neighbours.post_pieces``)."""
        self.neighbours.post_pieces(self._channel, number, pieces, dtype, self._check)

    def has_sent(self, number: int) -> bool:
        """Whether message ``number``, which is not older than the last one sent, has been sent."""
        return self.neighbours.has_announced(self._channel, number)

    def receive(self, number: int, read: Callable[[Mapping[int, int]], None]) -> None:
        """Let ``read`` have where each neighbour's message ``number`` begins, then let them go."""
        self.read(number, read)
        for rank in self.neighbours.ranks:
            self.let_go(number, rank)

    def read(self, number: int, read: Callable[[Mapping[int, int]], None]) -> None:
        """Let ``read`` have where each neighbour's message ``number`` begins."""
        near = self.neighbours
        starts = {
            rank: near.wait_for(self._channel, number, rank, self._check) for rank in near.ranks
        }
        read(starts)

    def let_go(self, number: int, rank: int) -> None:
        """Let ``rank`` use the memory of its message ``number`` again; once only."""
        self.neighbours.acknowledge(self._channel, number, rank)

    def abandon(self, number: int) -> None:
        """Message ``number`` of each neighbour will not be read, though it may be still to come."""
        self._abandoned += [(number, rank) for rank in self.neighbours.ranks]
        self._let_abandoned_go()

    def _let_abandoned_go(self) -> None:
        still_to_come: list[tuple[int, int]] = []
        for number, rank in self._abandoned:
            if self.neighbours.has_posted(self._channel, number, rank):
                self.neighbours.acknowledge(self._channel, number, rank)
            else:
                still_to_come.append((number, rank))
        self._abandoned = still_to_come


class _Message:
    """What this rank has sent, and will read of its neighbours when waited on.

    Args:
        line: Where messages come from and go to.
        messages: For each neighbour, in the order of ranks; sent at once.
    """

    _number: int | None = None

    def __init__(self, line: Line, messages: Sequence[Sequence[torch.Tensor]]) -> None:
        self._line = line
        self._number = line.send(messages)

    def wait(self) -> None:
        """Read what the neighbours have sent; nothing where that has been done."""
        if self._number is not None:
            self._line.receive(self._number, self._read)
            self._number = None

    def abandon(self) -> None:
        """Let the neighbours go on: what they have sent, or will, is not read."""
        number, self._number = self._number, None
        if number is not None:
            self._line.abandon(number)

    __del__ = abandon  # an exception may come between the launch and the wait

    def _read(self, starts: Mapping[int, int]) -> None:
        raise NotImplementedError


class NearGather(_Message):
    """Slices of the neighbours, copied to where they belong when waited on.

    Args:
        line: Where they come from.
        own: This rank's slices, one a flat parameter; sent at once.
        slices: Each flat parameter's slices, by rank in the group.
    """

    def __init__(
        self, line: Line, own: Sequence[torch.Tensor], slices: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self._slices = slices
        super().__init__(line, [own] * len(line.neighbours.ranks))

    def _read(self, starts: Mapping[int, int]) -> None:
        near = self._line.neighbours
        for rank, start in starts.items():
            offset = start
            for of_all in self._slices:
                offset = near.read(rank, offset, of_all[rank])


class NearSums(_Message):
    """Sums over all ranks in rank order: slices of neighbours are read where they lie, others have been received.

    Args:
        line: Where the neighbours' slices come from.
        reduces: What to sum; the neighbours' slices are sent at once.
        rank: This rank in the group.
        received: For each of ``reduces``, what has come from ranks that are no neighbours once this is waited on.
    """

    def __init__(
        self,
        line: Line,
        reduces: Sequence[Reduce],
        rank: int,
        received: Sequence[Mapping[int, torch.Tensor]],
    ) -> None:
        self._reduces = reduces
        self._rank = rank
        self._received = received
        super().__init__(
            line, [[reduce.slices[peer] for reduce in reduces] for peer in line.neighbours.ranks]
        )

    def _read(self, starts: Mapping[int, int]) -> None:
        near = self._line.neighbours
        offsets = dict(starts)
        for reduce, received in zip(self._reduces, self._received, strict=True):
            parts = dict(received)
            parts[self._rank] = reduce.slices[self._rank]
            for rank in near.ranks:
                parts[rank], offsets[rank] = near.view(rank, offsets[rank], reduce.out)
            first, second, *rest = (parts[rank] for rank in range(len(parts)))
            torch.add(first, second, out=reduce.out)
            for part in rest:
                reduce.out.add_(part)
        self._reduces = self._received = ()


class NearCombination(_Message):
    """An all-reduce, where all ranks are neighbours: everybody combines everybody's tensors in rank order.

    Args:
        line: Where their tensors come from.
        tensors: Contiguous; sent at once.
        rank: This rank in the group.
        combine: Combines two tensors into the ``out`` it is given.
    """

    def __init__(
        self,
        line: Line,
        tensors: Sequence[torch.Tensor],
        rank: int,
        combine: Callable[..., torch.Tensor],
    ) -> None:
        self._tensors = tensors
        self._rank = rank
        self._combine = combine
        super().__init__(line, [tensors] * len(line.neighbours.ranks))

    def _read(self, starts: Mapping[int, int]) -> None:
        near = self._line.neighbours
        offsets = dict(starts)
        for tensor in self._tensors:
            own = tensor.detach().view(-1)
            parts = {self._rank: own.clone()}
            for rank in near.ranks:
                parts[rank], offsets[rank] = near.view(rank, offsets[rank], own)
            first, second, *rest = (parts[rank] for rank in range(len(parts)))
            self._combine(first, second, out=own)
            for part in rest:
                self._combine(own, part, out=own)
        self._tensors = ()
