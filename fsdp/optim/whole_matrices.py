"""Whole parameters at their owners: who owns which, in which buckets they travel, and how they get there and back.

::

    shards of every rank --parameter, gradient--> whole at the owner --its optimizer's step--> pieces of every rank

Note [Moving whole parameters]
    One exchange brings the pieces of a bucket's parameters and gradients to their owners, another takes the new
    values back: three times the bytes of the parameters a step, where a gather for everybody would move W times as
    many and compute W times as much.  The parameters travel too, although an owner could keep them: a copy would cost
    the memory of a replica over the ranks, and go stale when the user loads or edits values.

    While the optimizer runs on one bucket the next one is on its way in and the last one on its way out.  With
    replicas (the second axis) owners are spread over these as well; new values go to the ranks of the owner's replica,
    and from each of them to the ranks that hold equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.collectives import DONE, Collectives, Work
from ..flat.handle import FlatParamHandle
from ..flat.layout import Slot
from ..flat.parameter import set_grad
from ..runtime.held import Held
from ..runtime.unit import Unit

__all__ = ["Bucket", "Matrix", "Transfer", "assign_owners", "buckets_of", "grad_piece"]


class Matrix:
    """One original parameter that its owner steps whole.

    Attributes:
        item: The parameter.
        group: The parameter group it belongs to.
        owner: ``(shard rank, replica rank)`` that steps it.
        spans: Which of its elements, in memory order, each rank of the shard group holds.
        whole: On the owner what the optimizer holds: the parameter's shape, memory only during its step; else None.
    """

    __slots__ = ("_memory", "group", "item", "owner", "spans", "whole")

    def __init__(self, item: Held, group: int, owner: tuple[int, int]) -> None:
        self.item = item
        self.group = group
        self.owner = owner
        self.whole: nn.Parameter | None = None
        unit = item.unit
        assert unit is not None
        self.spans = tuple(item.span_on(rank) for rank in range(unit.shard.size))
        if owner == (unit.shard.rank, unit.replicate.rank):
            slot, like = self.slot, self.handle.flat_param
            values = torch.empty_strided(
                slot.shape, slot.stride, dtype=like.dtype, device=unit.config.device
            )
            self.whole = nn.Parameter(values)
            self._memory = values.untyped_storage().nbytes()
            self.free()

    @property
    def handle(self) -> FlatParamHandle:
        """The handle the parameter lies in."""
        assert self.item.handle is not None
        return self.item.handle

    @property
    def slot(self) -> Slot:
        """Its place there."""
        return self.handle.layout.slots[self.item.index]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.item.numel * self.handle.dtype.itemsize

    def allocate(self, grad_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the whole parameter memory and a gradient; both as ``[numel]`` in memory order, not filled."""
        whole = self.whole
        assert whole is not None
        whole.untyped_storage().resize_(self._memory)
        grad = torch.empty_strided(
            whole.shape, whole.stride(), dtype=grad_dtype, device=whole.device
        )
        set_grad(whole, grad)
        return _in_memory_order(whole.detach()), _in_memory_order(grad)

    def values(self) -> torch.Tensor:
        """The whole parameter ``[numel]`` in memory order."""
        assert self.whole is not None
        return _in_memory_order(self.whole.detach())

    def free(self) -> None:
        """Give the memory back; state of the optimizer stays."""
        assert self.whole is not None
        self.whole.grad = None
        self.whole.untyped_storage().resize_(0)


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Give each parameter to a rank: the most expensive first, each to the rank with the least so far.  Pure.

    Example:
        >>> assign_owners([3.0, 5.0, 3.0, 1.0], 2)
        [1, 0, 1, 0]
    """
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Parameters that travel together.

    Attributes:
        matrices: In the same order on every rank; of each owner about equally many bytes.
        shard: The ranks that share them.
        replicate: The ranks that hold equal shards.
        unit: One of their units, for what is the same in all.
    """

    matrices: tuple[Matrix, ...]
    shard: Collectives
    replicate: Collectives
    unit: Unit


def buckets_of(
    matrices: Sequence[Matrix], cost_of: Callable[[Matrix], float], nbytes: int
) -> list[Bucket]:
    """Divide parameters over one pair of axes into buckets, of each owner at most about ``nbytes`` in each.

    Each owner contributes its most expensive ones first, so that what the owners do in one bucket takes equally long.
    """
    waiting: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in sorted(matrices, key=cost_of):
        waiting.setdefault(matrix.owner, []).append(matrix)
    buckets = []
    while any(waiting.values()):
        chosen: list[Matrix] = []
        for owner in sorted(waiting):
            filled = 0
            while waiting[owner] and filled < nbytes:
                chosen.append(waiting[owner].pop())
                filled += chosen[-1].nbytes
        unit = chosen[0].item.unit
        assert unit is not None
        buckets.append(Bucket(tuple(chosen), unit.shard, unit.replicate, unit))
    return buckets


def grad_piece(item: Held) -> torch.Tensor | None:
    """This rank's piece of a parameter's gradient, ``[n]``; None if there is none here."""
    grad = item.key.grad
    handle = item.handle
    if grad is None or handle is None:
        return None
    piece = handle.pieces[item.index].in_shard
    if not handle.orig_mode:
        return grad[piece.start : piece.stop]
    return grad if handle.uses_sharded_strategy else item.piece_of(grad)


class Transfer:
    """One bucket's way to its owners and back, for the parameters that have a gradient."""

    def __init__(self, bucket: Bucket, matrices: Sequence[Matrix]) -> None:
        self.bucket = bucket
        self._matrices = matrices
        self._replica = bucket.replicate.rank
        self._peers = range(bucket.shard.size)
        self._received: list[torch.Tensor] = []
        self._work: Work = DONE
        self._kept: list[torch.Tensor] = []

    @property
    def owned(self) -> list[Matrix]:
        """Those this rank steps."""
        me = (self.bucket.shard.rank, self._replica)
        return [matrix for matrix in self._matrices if matrix.owner == me]

    def start_in(self) -> None:
        """Start to send pieces of parameters and gradients to their owners.  Collective: every rank of the axes."""
        sends = [
            self._packed(
                part
                for matrix in self._matrices
                if matrix.owner == (peer, self._replica)
                for part in self._own_parts(matrix)
            )
            for peer in self._peers
        ]
        sizes = [
            sum(
                matrix.spans[peer].numel * (matrix.handle.dtype.itemsize + dtype.itemsize)
                for matrix in self.owned
                for dtype in [self._grad_dtype(matrix)]
            )
            for peer in self._peers
        ]
        self._exchange(sends, sizes)

    def finish_in(self) -> None:
        """Wait, and put the whole parameters and gradients together."""
        self._work.wait()
        self._kept = []
        places = [0] * len(self._peers)
        for matrix in self.owned:
            values, grads = matrix.allocate(self._grad_dtype(matrix))
            for peer in self._peers:
                span = matrix.spans[peer]
                for whole in (values, grads):
                    places[peer] = _unpack(
                        self._received[peer], places[peer], whole[span.start : span.stop]
                    )
        self._received = []

    def start_out(self) -> None:
        """Start to send the new values back, and free the whole parameters.  Collective: every rank of the axes."""
        sends = []
        for peer in self._peers:
            spans = [(matrix, matrix.spans[peer]) for matrix in self.owned]
            sends.append(self._packed(m.values()[span.start : span.stop] for m, span in spans))
        for matrix in self.owned:
            matrix.free()
        me = self.bucket.shard.rank
        sizes = [
            sum(
                matrix.spans[me].numel * matrix.handle.dtype.itemsize
                for matrix in self._matrices
                if matrix.owner == (peer, self._replica)
            )
            for peer in self._peers
        ]
        self._exchange(sends, sizes)

    def finish_out(self) -> None:
        """Wait, write this rank's pieces, and give them to the ranks that hold equal shards."""
        self._work.wait()
        for peer, received in enumerate(self._received):
            place = 0
            for matrix in self._matrices:
                if matrix.owner == (peer, self._replica):
                    place = _write(matrix, received, place)
        self._received, self._kept = [], []
        self._copy_to_replicas()

    def _copy_to_replicas(self) -> None:
        replicate = self.bucket.replicate
        if replicate.size == 1:
            return
        for replica in range(replicate.size):
            theirs = [matrix for matrix in self._matrices if matrix.owner[1] == replica]
            packed = self._packed(_own_values(matrix) for matrix in theirs)
            if not packed.numel():
                continue
            replicate.broadcast([packed], replica).wait()
            place = 0
            for matrix in theirs if replica != self._replica else ():
                place = _write(matrix, packed, place)

    def _own_parts(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        values = _own_values(matrix)
        grad = grad_piece(matrix.item)
        if grad is None:  # nothing of it is here, or only other ranks used it
            grad = torch.zeros(values.numel(), device=values.device)
        return values, grad.to(self._grad_dtype(matrix))

    def _grad_dtype(self, matrix: Matrix) -> torch.dtype:
        assert matrix.item.unit is not None
        return matrix.item.unit.averaging.grad_dtype(matrix.handle)

    def _packed(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        device = self.bucket.unit.config.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        return torch.cat(
            [nothing, *(part.contiguous().view(torch.uint8).to(device) for part in parts)]
        )

    def _exchange(self, sends: list[torch.Tensor], sizes: Sequence[int]) -> None:
        self._kept = sends
        self._received = [sends[0].new_empty(size) for size in sizes]
        self._work = self.bucket.shard.exchange(sends, self._received)


def _own_values(matrix: Matrix) -> torch.Tensor:
    piece = matrix.handle.pieces[matrix.item.index].in_shard
    return matrix.handle.shard[piece.start : piece.stop]


def _write(matrix: Matrix, packed: torch.Tensor, place: int) -> int:
    """Write this rank's piece, ``packed[place:...]``, through the exposed parameter, so that its version counts it."""
    item, handle = matrix.item, matrix.handle
    span = handle.pieces[item.index].in_shard
    stop = place + span.numel * handle.dtype.itemsize
    if span.numel:
        # Through memory of its own: a slice of bytes need not be aligned.
        values = packed[place:stop].clone().view(handle.dtype)
        key = item.key
        target = item.shaped(values) if handle.orig_mode else values
        (key if handle.orig_mode else key[span.start : span.stop]).copy_(target)
    return stop


def _unpack(packed: torch.Tensor, place: int, target: torch.Tensor) -> int:
    stop = place + target.nbytes
    target.view(torch.uint8).copy_(packed[place:stop])
    return stop


def _in_memory_order(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,))
