"""Long reductions between ranks of one host, from where their gradients lie.

Note [Direct sums]
    A reduction that runs beside the computation holds a unit's whole gradient until it has ended, while those of the
    next unit come.  Between hosts that is the price of hiding it.  Ranks of one host have nothing to hide: the cores
    that would move the bytes meanwhile are those that compute.  So they sum at once, chunk by chunk through memory
    that they share, reading gradients where autograd has left them: no buffer, no copy into it, nothing in flight.
    It also takes less time than gloo (measured, docs/explanation/performance.md).

    Each rank posts its part of a chunk, waits for those of the others, adds them up, and posts the next one when all
    have read its own: one region of :data:`CHUNK_BYTES` is all the memory there is.  A rank that is interrupted, from
    the keyboard or by another signal, sends the rest before it says so: the others have begun to sum.  It goes on with
    the very step where it was: a chunk sent twice would wait for ever to be read twice.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from .collectives import InPieces
from .neighbours import Line

__all__ = ["CHUNK_BYTES", "SHORTEST_SUM", "SHORTEST_SUM_INSIDE", "DirectSum"]

SHORTEST_SUM = 512 << 10
"""Bytes that a rank sends; of shorter ones several run at once, and ranks meet once for all of them."""

SHORTEST_SUM_INSIDE = 2 << 20
"""The same where the computation goes on: what is shorter is hidden beside it for less than waiting costs."""

CHUNK_BYTES = 512 << 10
"""What a rank sends at a time, to all neighbours together."""

_HEADER_BYTES = 4 << 10  # for a region's header and padding, which a power of two is to hold, too


class DirectSum:
    """A reduce-scatter among neighbours that are all of a group, made when waited on (see Note [Direct sums]).

    Args:
        line: Where messages come from and go to.
        rank: This rank in the group.
        sums: What to sum.
    """

    def __init__(self, line: Line, rank: int, sums: Sequence[InPieces]) -> None:
        self._line = line
        self._rank = rank
        self._nbytes = (CHUNK_BYTES - _HEADER_BYTES) // len(line.neighbours.ranks)
        self._slices = [([_Slice(pieces) for pieces in one.pieces], one.out) for one in sums]
        self._chunks = [
            (index, start)
            for index, (_, out) in enumerate(self._slices)
            for start in range(0, out.numel(), self._step(out))
        ]
        self._first = line.reserve(len(self._chunks))
        self._done = self._added = self._let_go = 0

    def wait(self) -> None:
        """Sum all chunks, in turn with the neighbours."""
        try:
            self._sum()
        except RuntimeError:
            raise  # communication has failed
        except BaseException:  # from a signal's handler
            with contextlib.suppress(RuntimeError):  # what has interrupted is what to tell
                self._sum()
            raise

    def _step(self, out: torch.Tensor) -> int:
        """Elements of a chunk."""
        return max(1, self._nbytes // out.itemsize)

    def _sum(self) -> None:
        """Go on after what has been done, which may be a part of a chunk."""
        line = self._line
        peers = line.neighbours.ranks
        while self._done < len(self._chunks):
            index, start = self._chunks[self._done]
            slices, whole = self._slices[index]
            out = whole[start : start + self._step(whole)]
            parts = [of_rank.part(start, start + out.numel()) for of_rank in slices]
            number = self._first + self._done
            if not line.has_sent(number):
                line.send_pieces(number, [parts[peer] for peer in peers], out.dtype)
            if self._added == self._done:
                line.read(number, _Addition(line, self._rank, parts[self._rank], out).run)
                self._added += 1
            while self._let_go < (self._done + 1) * len(peers):
                line.let_go(number, peers[self._let_go % len(peers)])
                self._let_go += 1
            self._done += 1


class _Addition:
    """This rank's ``own`` part of a chunk and what comes from the neighbours, summed into ``out`` in rank order."""

    __slots__ = ("_line", "_out", "_own", "_rank")

    def __init__(
        self, line: Line, rank: int, own: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        self._line = line
        self._rank = rank
        self._own = own
        self._out = out

    def run(self, starts: Mapping[int, int]) -> None:
        """Sum; ``starts`` tells where the neighbours' parts begin."""
        near, out = self._line.neighbours, self._out
        received = {rank: near.view(rank, at, out)[0] for rank, at in starts.items()}
        start = 0
        for own in self._own:
            stop = start + own.numel()
            terms = {rank: whole[start:stop] for rank, whole in received.items()}
            terms[self._rank] = own.to(out.dtype)
            total = out[start:stop]
            first, second, *rest = (terms[rank] for rank in range(len(terms)))
            torch.add(first, second, out=total)
            for term in rest:
                total.add_(term)
            start = stop


class _Slice:
    """What one rank will have summed, as this rank has it: 1-D ``pieces``, one after another."""

    __slots__ = ("_ends", "_pieces")

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(piece.numel() for piece in pieces))

    def part(self, start: int, stop: int) -> list[torch.Tensor]:
        """Elements ``start`` to ``stop``, in pieces."""
        found: list[torch.Tensor] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            piece, end = self._pieces[index], self._ends[index]
            begin = end - piece.numel()
            found.append(piece[start - begin : stop - begin])
            start = end
            index += 1
        return found
