"""Collectives that send fewer bytes: of weights when they are gathered, of gradients when they are summed (ZeRO++).

Note [Rounding]
    A :class:`Rounding` says how numbers travel: as integers in blocks (:class:`Blocks`), or as bfloat16
    (:class:`Halves`), which is what a link wants whose hosts compute in float32 because they have nothing faster.

Note [Blocks]
    A row of n floating-point numbers travels as blocks of ``block_size`` integers with one float32 scale each: the
    largest magnitude of a block becomes the largest integer.  Integers come first, scales after them, all as bytes of
    one message.  A NaN or an infinity makes the scale, and so the whole block, NaN.

Note [The same weights everywhere]
    A gather also rounds this rank's own slice of the gathered memory, never the shard itself, so that all ranks
    compute with equal weights while the optimizer steps exact ones.

Note [Sums]
    Each rank rounds what it sends, once a hop; what it keeps for itself is exact.  Sums are float32 and do not depend
    on the order in which messages arrive, so that a run can be repeated bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .collectives import Collectives, Gather, Pending, Reduce, Work

__all__ = ["Blocks", "Halves", "Hops", "QuantizedCollectives", "Rounding"]

_SCALE_NBYTES = 4
_NIBBLE = 4
_AT_ONCE = 1 << 24  # numbers that are decoded together


class Rounding(Protocol):
    """How numbers become bytes and numbers again."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` numbers."""

    def pays(self, part: torch.Tensor) -> bool:
        """Whether rounding a tensor of which each rank has ``part`` saves anything."""

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Round ``rows`` ``[r, n]``, any floating dtype, into ``out`` ``[r, nbytes(n)]`` uint8."""

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """The numbers of ``coded`` ``[r, nbytes(numel)]`` uint8: ``[r, numel]`` float32, in memory of their own."""

    def decode_into(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """The same into ``out`` ``[r, numel]``, any floating dtype."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Numbers as bfloat16: two bytes each, eight bits of precision, float32's range, NaN and infinities included."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` numbers."""
        return 2 * numel

    def pays(self, part: torch.Tensor) -> bool:
        """Where numbers take more than two bytes."""
        return part.is_floating_point() and part.element_size() > 2 and part.numel() > 0

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Round ``rows`` ``[r, n]``, any floating dtype, to even, into ``out`` ``[r, 2 n]`` uint8."""
        out.view(torch.bfloat16).copy_(rows)

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """The numbers of ``coded`` ``[r, 2 numel]`` uint8, ``[r, numel]`` float32."""
        return coded.view(torch.bfloat16).float()

    def decode_into(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """The same into ``out``, without float32 numbers in between."""
        out.copy_(coded.view(torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Numbers as integers (see Note [Blocks]).

    Attributes:
        bits: 8 or 4.
        size: Numbers that share a scale; a multiple of 8.
    """

    bits: int
    size: int

    @property
    def largest(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` numbers."""
        blocks = self._count(numel)
        return blocks * (self.size * self.bits // 8 + _SCALE_NBYTES)

    def pays(self, part: torch.Tensor) -> bool:
        """Where each rank has a block at least."""
        return part.is_floating_point() and part.numel() >= self.size

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Round ``rows`` ``[r, n]``, any floating dtype, into ``out`` ``[r, nbytes(n)]`` uint8."""
        count, numel = rows.shape
        blocks = self._count(numel)
        padded = torch.zeros(count, blocks * self.size, dtype=torch.float32, device=rows.device)
        padded[:, :numel] = rows
        values = padded.view(count, blocks, self.size)
        scales = values.abs().amax(2, keepdim=True).div_(self.largest)
        values.div_(torch.where(scales == 0, 1.0, scales)).round_()
        codes = values.nan_to_num_(0.0).to(torch.int8).view(count, -1)
        if self.bits == _NIBBLE:
            codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << _NIBBLE)
        split = codes.shape[1]
        out[:, :split] = codes.view(torch.uint8)
        # An infinite scale times zero is NaN, but a finite code would make an infinity of it.
        scales = torch.where(scales.isfinite(), scales, torch.nan).view(count, blocks)
        out[:, split:] = scales.view(torch.uint8)

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """The numbers of ``coded`` ``[r, nbytes(numel)]`` uint8, ``[r, numel]`` float32."""
        count = coded.shape[0]
        blocks = self._count(numel)
        split = blocks * self.size * self.bits // 8
        codes = coded[:, :split].view(torch.int8)
        if self.bits == _NIBBLE:
            # Shifting left and back repeats the sign of the low half.
            codes = torch.stack(((codes << _NIBBLE) >> _NIBBLE, codes >> _NIBBLE), dim=2)
        values = codes.reshape(count, blocks, self.size).to(torch.float32)
        scales = coded[:, split:].contiguous().view(torch.float32)
        return values.mul_(scales.view(count, blocks, 1)).view(count, -1)[:, :numel]

    def decode_into(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """The same into ``out``."""
        out.copy_(self.decode(coded, out.shape[1]))

    def _count(self, numel: int) -> int:
        return -(-numel // self.size)


@dataclass(frozen=True, slots=True)
class Hops:
    """The two groups of a reduction in two hops.

    Attributes:
        inside: The ranks of this node.
        across: The ranks that have this one's place in every node.
    """

    inside: Collectives
    across: Collectives


class QuantizedCollectives:
    """Collectives that round what they gather and sum, and do everything else as ``exact``.

    Tensors for which rounding does not pay (no floating-point numbers, too few of them, too narrow ones) stay exact.

    Args:
        exact: Carries the bytes.
        weights: How gathers travel; exact if None.
        gradients: How contributions to sums travel; exact if None.
        hops: Sum inside a node first, then across; at once if None.
        error_feedback: Add what rounding took from a contribution to the next one of the same tensor.
    """

    averages = False

    def __init__(
        self,
        exact: Collectives,
        *,
        weights: Rounding | None,
        gradients: Rounding | None,
        hops: Hops | None = None,
        error_feedback: bool = False,
    ) -> None:
        self.exact = exact
        self.rank = exact.rank
        self.size = exact.size
        self._weights = weights
        self._gradients = gradients
        self._hops = hops
        self._residuals: dict[int, torch.Tensor] | None = {} if error_feedback else None

    def name_for_messages(self, name: str) -> None:
        """Pass it on.  Collective: none."""
        self.exact.name_for_messages(name)
        if self._hops is not None:
            self._hops.inside.name_for_messages(name)
            self._hops.across.name_for_messages(name)

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Send rounded numbers; the work ends when their values are in ``whole``."""
        if self._weights is None:
            return self.exact.all_gather(gathers)
        rounding = self._weights
        coded = [gather for gather in gathers if rounding.pays(gather.slices[0])]
        carriers = [self._encode_own(gather, rounding) for gather in coded]
        plain = [gather for gather in gathers if not rounding.pays(gather.slices[0])]
        work = self.exact.all_gather([*plain, *carriers])
        return _Decoded(work, coded, carriers, rounding)

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Send rounded numbers, add up in float32; with two hops the second begins when the work is waited on."""
        if self._gradients is None:
            return self.exact.reduce_scatter(reduces)
        rounding = self._gradients
        plain = [reduce for reduce in reduces if not rounding.pays(reduce.out)]
        works = [self.exact.reduce_scatter(plain)] if plain else []
        for index, reduce in enumerate(reduces):
            if rounding.pays(reduce.out):
                works.append(self._launch(index, reduce, rounding))
        return Pending(works)

    def _encode_own(self, gather: Gather, rounding: Rounding) -> Gather:
        """This rank's slice as bytes, in a gather of everyone's."""
        nbytes = rounding.nbytes(gather.slices[0].numel())
        whole = torch.empty(self.size * nbytes, dtype=torch.uint8, device=gather.whole.device)
        slices = whole.split(nbytes)
        own = gather.slices[self.rank]
        rounding.encode(own.view(1, -1), slices[self.rank].view(1, -1))
        return Gather(whole, slices)

    def _launch(self, index: int, reduce: Reduce, rounding: Rounding) -> Work:
        """Start to sum one tensor; ``index`` is its place among those of the launch."""
        rows = reduce.whole.view(self.size, -1).float()
        if self._residuals is not None:
            earlier = self._residuals.get(index)
            if earlier is not None and earlier.shape == rows.shape:
                rows = rows + earlier
        hops = self._hops
        if hops is None:
            sent = _Sent(self.exact, rows, rounding)
            self._remember(index, rows, sent.arrives)
            return _Summed(sent, reduce.out)
        # Each rank of a node sums what goes to its own place in every node.
        nodes, places = hops.across.size, hops.inside.size
        by_place = rows.view(nodes, places, -1).transpose(0, 1)
        sent = _Sent(hops.inside, by_place.reshape(places, -1), rounding)
        self._remember(
            index,
            rows,
            lambda: sent.arrives().view(places, nodes, -1).transpose(0, 1).reshape(rows.shape),
        )
        return _SummedTwice(sent, hops.across, reduce.out, rounding)

    def _remember(
        self, index: int, rows: torch.Tensor, arrives: Callable[[], torch.Tensor]
    ) -> None:
        if self._residuals is not None:
            lost = rows - arrives()
            # A step that overflowed is skipped, and must leave nothing behind.
            lost = lost.nan_to_num_(0.0, 0.0, 0.0)
            earlier = self._residuals.get(index)
            if earlier is not None and earlier.shape == lost.shape:
                earlier.copy_(lost)  # where it was: a captured graph reads it there
            else:
                self._residuals[index] = lost.to(torch.bfloat16)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Exact.  Collective: as ``exact``."""
        return self.exact.all_reduce(tensors, op=op)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Exact.  Collective: as ``exact``."""
        return self.exact.broadcast(tensors, source)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Exact.  Collective: as ``exact``."""
        return self.exact.exchange(sends, receives)


class _Decoded:
    """A gather of bytes, which become numbers when it is waited on."""

    __slots__ = ("_carriers", "_gathers", "_rounding", "_work")

    def __init__(
        self, work: Work, gathers: Sequence[Gather], carriers: Sequence[Gather], rounding: Rounding
    ) -> None:
        self._work = work
        self._gathers = gathers
        self._carriers = carriers
        self._rounding = rounding

    def wait(self) -> None:
        """Wait for the bytes, then fill every slice, this rank's own included."""
        self._work.wait()
        for gather, carrier in zip(self._gathers, self._carriers, strict=True):
            ranks = len(gather.slices)
            places, coded = gather.whole.view(ranks, -1), carrier.whole.view(ranks, -1)
            for start, stop in _portions(ranks, places.shape[1]):
                self._rounding.decode_into(coded[start:stop], places[start:stop])
        self._gathers = self._carriers = ()


class _Sent:
    """Rows on their way, one to each rank of a group; this rank's own stays exact.

    Args:
        group: The group.
        rows: ``[size, n]`` float32; row r goes to rank r.
        rounding: How rows travel.
    """

    __slots__ = ("_coded", "_group", "_received", "_rounding", "_rows", "_work")

    def __init__(self, group: Collectives, rows: torch.Tensor, rounding: Rounding) -> None:
        self._group = group
        self._rows = rows
        self._rounding = rounding
        nbytes = rounding.nbytes(rows.shape[1])
        self._coded = torch.empty(group.size, nbytes, dtype=torch.uint8, device=rows.device)
        rounding.encode(rows, self._coded)
        self._received = torch.empty_like(self._coded)
        self._work = group.exchange(self._coded.unbind(), self._received.unbind())

    def arrives(self) -> torch.Tensor:
        """What ranks get of the rows, ``[size, n]``."""
        rounded = self._rounding.decode(self._coded, self._rows.shape[1]).clone()
        rounded[self._group.rank] = self._rows[self._group.rank]
        return rounded

    def total(self) -> torch.Tensor:
        """Wait, then the sum over ranks of what each had for this one, ``[n]`` float32."""
        self._work.wait()
        numel = self._rows.shape[1]
        total = torch.zeros(numel, dtype=torch.float32, device=self._rows.device)
        own = self._group.rank
        for start, stop in _portions(self._group.size, numel):
            parts = self._rounding.decode(self._received[start:stop], numel)
            if start <= own < stop:
                parts[own - start] = self._rows[own]
            total += parts.sum(0)
        return total


@dataclass(slots=True)
class _Summed:
    """A sum over ranks, taken when it is waited on."""

    sent: _Sent | None
    out: torch.Tensor

    def wait(self) -> None:
        """Wait for the rows and add them up."""
        if self.sent is not None:
            self.out.copy_(self.sent.total())
            self.sent = None


@dataclass(slots=True)
class _SummedTwice:
    """A sum over the ranks of a node, and then over nodes."""

    sent: _Sent | None
    across: Collectives
    out: torch.Tensor
    rounding: Rounding

    def wait(self) -> None:
        """Wait for the first hop, make the second and wait for it."""
        if self.sent is not None:
            rows = self.sent.total().view(self.across.size, -1)
            self.sent = None
            self.out.copy_(_Sent(self.across, rows, self.rounding).total())


def _portions(count: int, numel: int) -> list[tuple[int, int]]:
    """Spans of rows of ``numel`` numbers that are decoded together: few operations, and little memory."""
    step = max(1, _AT_ONCE // max(1, numel))
    return [(start, min(start + step, count)) for start in range(0, count, step)]
