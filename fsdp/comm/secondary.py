"""A second set of shards inside each node, so that a backward gathers over fast links only (ZeRO++'s hpZ)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch
from .collectives import Collectives, Gather, Reduce, Work

__all__ = ["SecondaryShards"]


class SecondaryShards:
    """Collectives whose gathers inside a backward come from the ranks of this node.

    A gather outside of backward leaves a copy of this rank's part of what was gathered: 1 / (ranks of the node) of it.
    Parameters do not change between a forward and its backward (the runtime refuses it), so the copies are those of the
    forward that the backward belongs to.  All ranks of the node must gather in the same phase.

    Args:
        whole_group: Carries everything but these gathers.
        inside: The ranks of this node; their number divides that of ``whole_group``.
    """

    def __init__(self, whole_group: Collectives, inside: Collectives) -> None:
        self._whole_group = whole_group
        self._inside = inside
        self._copies: list[torch.Tensor] = []
        self.rank = whole_group.rank
        self.size = whole_group.size
        self.averages = whole_group.averages

    def name_for_messages(self, name: str) -> None:
        """Pass it on.  Collective: none."""
        self._whole_group.name_for_messages(name)
        self._inside.name_for_messages(name)

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """In a backward gather from this node's ranks, otherwise from all, and keep a copy of a part."""
        parts = [gather.whole.view(self._inside.size, -1).unbind() for gather in gathers]
        own = [part[self._inside.rank] for part in parts]
        if _torch.in_backward() and self._fits(own):
            for place, copy in zip(own, self._copies, strict=True):
                place.copy_(copy)
            return self._inside.all_gather(
                [Gather(gather.whole, part) for gather, part in zip(gathers, parts, strict=True)]
            )
        return _Copied(self._whole_group.all_gather(gathers), self, own)

    def keep(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy ``parts`` for the backward."""
        if not self._fits(parts):
            self._copies = [torch.empty_like(part) for part in parts]
        _torch.foreach_copy(self._copies, list(parts))

    def _fits(self, parts: Sequence[torch.Tensor]) -> bool:
        return [part.shape for part in parts] == [copy.shape for copy in self._copies]

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Pass it on.  Collective: as all ranks' group."""
        return self._whole_group.reduce_scatter(reduces)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Pass it on.  Collective: as all ranks' group."""
        return self._whole_group.all_reduce(tensors, op=op)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Pass it on.  Collective: as all ranks' group."""
        return self._whole_group.broadcast(tensors, source)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Pass it on.  Collective: as all ranks' group."""
        return self._whole_group.exchange(sends, receives)


class _Copied:
    """A gather of which a part is kept when it has been waited on."""

    __slots__ = ("_parts", "_secondary", "_work")

    def __init__(
        self, work: Work, secondary: SecondaryShards, parts: Sequence[torch.Tensor]
    ) -> None:
        self._work = work
        self._secondary = secondary
        self._parts = parts

    def wait(self) -> None:
        """Wait for the gather, then keep the parts."""
        self._work.wait()
        self._secondary.keep(self._parts)
