"""What a rank writes of a tensor: boxes of it, cut from memory as they are written, so that nothing is copied before.

Flat shards hold a span of each parameter's elements as they lie in memory.  Of a contiguous parameter that is a span of
rows and parts of rows, each box of which is a run of bytes as it lies; of another one (channels last) the boxes are cut
along its own order of dimensions, and turned into rows one at a time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..flat.handle import FlatParamHandle
from ..flat.layout import Slot
from ..state.sharded import local_part
from .boxes import Box, boxes_of

__all__ = ["Part"]


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Some elements of a tensor.

    Attributes:
        memory: They, ``[n]``, on any device: box after box.
        shape: Of the whole tensor.
        boxes: Where they belong; none where this rank has nothing.
        order: The dimensions in which boxes lie, outermost first.
    """

    memory: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    order: tuple[int, ...]

    @staticmethod
    def of_piece(handle: FlatParamHandle, index: int, memory: torch.Tensor) -> Part:
        """This rank's piece of parameter ``index`` of ``handle``, or of a state of its shape.

        Args:
            handle: Whose layout counts.
            index: Which parameter.
            memory: The elements ``[n]``, in the order in which the slot keeps them.
        """
        slot, span = handle.layout.slots[index], handle.pieces[index].in_slot
        shard = handle.params[index].tensor_shard
        order = _order_of(slot)
        begin = (0,) * len(order) if shard is None else shard.offsets
        boxes = tuple(
            Box(
                tuple(map(operator.add, begin, _put_back(box.offsets, order))),
                _put_back(box.sizes, order),
            )
            for box in boxes_of([slot.shape[dim] for dim in order], span)
        )
        shape = handle.whole_shape(index)
        # A tensor without elements is one box, which one rank writes for all.
        return Part(memory, shape, boxes if math.prod(shape) else (_everything(shape),), order)

    @staticmethod
    def of_tensor(value: torch.Tensor) -> Part:
        """All of a tensor, or of a DTensor that every rank has alike."""
        shape = tuple(value.shape)
        memory = local_part(value).detach().reshape(-1)
        return Part(memory, shape, (_everything(shape),), tuple(range(len(shape))))

    def kept(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> Part:
        """The same with what ``keep`` makes of its memory."""
        return replace(self, memory=keep(self.memory))

    def values(self, offsets: Sequence[int]) -> torch.Tensor:
        """The box that begins at ``offsets``, row-major on the host: a view where it lies so, else a copy."""
        start = 0
        for box in self.boxes:
            if box.offsets == tuple(offsets):
                inner = self.memory[start : start + box.numel]
                lying = inner.view([box.sizes[dim] for dim in self.order])
                return (
                    lying.permute(_put_back(range(len(self.order)), self.order)).cpu().contiguous()
                )
            start += box.numel
        raise AssertionError(f"no box begins at {offsets}")


def _order_of(slot: Slot) -> tuple[int, ...]:
    """The dimensions of ``slot`` as they lie in memory, outermost first.  Pure."""
    return tuple(sorted(range(len(slot.shape)), key=slot.stride.__getitem__, reverse=True))


def _put_back(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """What is listed in ``order`` by dimension again.  Pure."""
    return tuple(value for _, value in sorted(zip(order, values, strict=True)))


def _everything(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor.  Pure."""
    return Box((0,) * len(shape), shape)
