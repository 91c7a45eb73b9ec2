"""A unit's gradients on this rank before they are reduced: on the leaves, in a buffer, or kept by ``no_sync``.

::

    leaf.grad --collect (copy, cast)--> buffer --take--> Reduction
                                          |  ^
                                    keep  v  |  the next backward
                                        kept gradients, each exposed parameter marked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from ..flat.handle import FlatParamHandle
from ..flat.layout import FlatLayout
from .buffers import GradBuffer
from .guard import remember_accumulating

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Collected", "Gradients", "Lying"]

_WORTH_NO_COPY = 256 << 10  # elements whose copy takes longer than it takes to do without


@dataclass(slots=True)
class Collected:
    """Gradients of one handle, in a buffer.

    Attributes:
        buffer: ``[padded_numel]`` reduce dtype.
        used: For each parameter whether its slot holds a gradient; a slot that does not holds anything.
        pooled: Whether ``buffer`` goes back to the pool.
    """

    buffer: GradBuffer
    used: Sequence[bool]
    pooled: bool

    @property
    def pieces(self) -> Sequence[Sequence[torch.Tensor]]:
        """What each rank's slice is made of."""
        return [[piece] for piece in self.buffer.slices]

    def clear_unused(self) -> None:
        """Zero what holds no gradient, before the whole buffer is sent."""
        if False in self.used:
            for view, is_used in zip(self.buffer.views, self.used, strict=True):
                if not is_used:
                    view.zero_()


@dataclass(slots=True)
class Lying:
    """Gradients of one handle, where autograd has left them.

    Attributes:
        pieces: For each rank the 1-D tensors that tile its slice, in the dtypes they have; expanded zeros among them.
        used: For each parameter whether there is a gradient.
    """

    pieces: Sequence[Sequence[torch.Tensor]]
    used: Sequence[bool]
    pooled = False


@dataclass(slots=True)
class _Mark:
    """The gradient a parameter shows while its new one is still unsharded; a user's ``zero_grad`` leaves a trace on it.

    Attributes:
        grad: The gradient it had before; if it had none, its part of what this rank alone has computed so far.
        version: That tensor's version.
        invented: Whether it had none.
        any_nonzero: 0-dimensional, where the gradient is: only a gradient that changed makes the host wait for it.
    """

    grad: torch.Tensor
    version: int
    invented: bool
    any_nonzero: torch.Tensor

    @classmethod
    def put_on(cls, param: nn.Parameter, local: torch.Tensor) -> _Mark:
        """Give ``param`` a copy of ``local`` as its gradient if it has none, and remember what it shows."""
        invented = param.grad is None
        if param.grad is None:
            dtype = param.grad_dtype or param.dtype
            param.grad = local.to(param.device, dtype, copy=True)
        return cls(param.grad, _torch.version_of(param.grad), invented, param.grad.any())

    @property
    def tells(self) -> bool:
        """Whether any element was not zero; if none was, zeroing can not be told from other writes."""
        return bool(self.any_nonzero)

    def take_off(self, param: nn.Parameter) -> bool:
        """Take an invented gradient away again; returns whether the user zeroed the gradient in the meantime."""
        if param.grad is None:
            return True
        changed = param.grad is not self.grad or _torch.version_of(self.grad) != self.version
        zeroed = changed and self.tells and not bool(param.grad.any())
        if self.invented and not zeroed:
            param.grad = None
        return zeroed


class Gradients:
    """Where the gradients of one unit are until they are reduced.

    Attributes:
        kept: What ``no_sync`` backwards have left that is not reduced yet, and how it is marked.
        partial_sums: What backwards without all-reduce left: sums over the shard axis ``[shard_numel]``, and which
            parameters were used.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.kept: dict[FlatParamHandle, tuple[Collected, list[_Mark]]] = {}
        self.partial_sums: dict[FlatParamHandle, tuple[torch.Tensor, Sequence[bool]]] = {}

    def take(self, handle: FlatParamHandle) -> Collected:
        """All gradients of ``handle`` there are, off the leaves and out of what ``no_sync`` kept."""
        kept = self._take_kept(handle) if self.kept else None
        is_lone = len(handle.layout.slots) == 1
        if is_lone and kept is None and (whole := self._take_whole(handle)) is not None:
            return whole
        collected = kept or self._start(handle, pooled=True)
        self._collect(handle, collected)
        if collected.used is not handle.all_used:
            collected.clear_unused()
        return collected

    def take_lying(self, handle: FlatParamHandle) -> Collected | Lying:
        """The same, not copied if that can be avoided; what is returned is not to be written to."""
        unit, layout = self._unit, handle.layout
        avoids = not (unit.writes_to_whole or unit.root.differentiable or handle.has_tensor_shards)
        grads = [leaf.grad for leaf in handle.unsharded.leaves]
        if not avoids or handle in self.kept or not _lie_as(layout, grads):
            return self.take(handle)
        for leaf in handle.unsharded.leaves:
            leaf.grad = None
        nothing = torch.zeros((), dtype=unit.averaging.reduce_dtypes[handle], device=handle.device)
        flat = [
            None if grad is None else grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
            for grad in grads
        ]
        pieces: list[list[torch.Tensor]] = []
        for cut in unit.root.pool.cuts(layout):
            of_rank: list[torch.Tensor] = []
            for slot, start, stop in cut:
                grad = None if slot is None else flat[slot]
                of_rank.append(nothing.expand(stop - start) if grad is None else grad[start:stop])
            pieces.append(of_rank)
        return Lying(pieces, [grad is not None for grad in grads])

    def _take_whole(self, handle: FlatParamHandle) -> Collected | None:
        """The gradient of a lone parameter, if it is large (an embedding, say) and can be sent from where it lies.

        Not where the buffer is written to: two gradients of autograd's may share memory.
        """
        unit, layout = self._unit, handle.layout
        if layout.padded_numel < _WORTH_NO_COPY:
            return None
        leaf = handle.unsharded.leaves[0]
        grad = leaf.grad
        if grad is None or handle.has_tensor_shards or not _lie_as(layout, [grad]):
            return None
        if layout.padded_numel != grad.numel():
            return None
        if grad.dtype is not unit.averaging.reduce_dtypes[handle] or unit.root.differentiable:
            return None
        if unit.shard.size == 1 or unit.writes_to_whole:
            return None
        leaf.grad = None
        unit.root.pool.free_large()  # those of the units before stand idle now
        flat = grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
        return Collected(GradBuffer(flat, layout), handle.all_used, pooled=False)

    def keep(self) -> None:
        """Keep what has arrived for a later backward that synchronises."""
        for handle in self._unit.trained_handles:
            collected = self._take_kept(handle) or self._start(handle, pooled=False)
            self._collect(handle, collected)
            collected.clear_unused()
            self._put_aside(handle, collected)
        remember_accumulating(self._unit)

    def check_not_frozen(self, handle: FlatParamHandle) -> None:
        """Refuse to freeze parameters while ``no_sync`` gradients of theirs wait, which nothing would reduce any more.

        Raises:
            UsageError: If the user has, since the last forward; it names one of them.
        """
        collected = self._take_kept(handle)
        if collected is None:
            return
        self._put_aside(handle, collected)
        exposed = handle.exposed if handle.orig_mode else [handle.flat_param] * len(handle.params)
        for fqn, leaf, param in zip(handle.fqns, handle.unsharded.leaves, exposed, strict=True):
            if leaf.requires_grad and not param.requires_grad:
                raise UsageError(
                    describe(
                        "a parameter was frozen while gradients of no_sync backwards are still unreduced",
                        unit=self._unit.name,
                        fqn=fqn,
                        remedy="Run the last backward of the accumulation outside no_sync before freezing, or zero the "
                        "gradients.",
                    ),
                    unit=self._unit.name,
                    fqn=fqn,
                )

    def _put_aside(self, handle: FlatParamHandle, collected: Collected) -> None:
        local = handle.split_shard(collected.buffer.slices[handle.rank])
        marks = [
            _Mark.put_on(param, part) for param, part in zip(handle.exposed, local, strict=True)
        ]
        self.kept[handle] = collected, marks

    def reset(self) -> None:
        """Drop what a failed backward has left; what ``no_sync`` kept stays."""
        for handle in self._unit.handles:
            for leaf in handle.unsharded.leaves:
                leaf.grad = None

    def _collect(self, handle: FlatParamHandle, collected: Collected) -> None:
        """Move the leaves' gradients into the buffer, or add them to what their slots hold; drop them."""
        grads = handle.leaf_grads()
        if self._unit.root.differentiable:
            _refuse_differentiable(handle, grads)
        if collected.used is handle.none_used and _copy(collected.buffer.views, grads):
            collected.used = handle.all_used
        else:
            _add(collected, grads)
        for leaf in handle.unsharded.leaves:
            leaf.grad = None

    def _start(self, handle: FlatParamHandle, *, pooled: bool) -> Collected:
        unit = self._unit
        dtype = unit.averaging.reduce_dtypes[handle]
        used = handle.none_used
        # With one rank on the shard axis the buffer becomes the gradient itself, so it is not lent from the pool.
        if pooled and unit.shard.size > 1:
            buffer = unit.root.pool.take(handle.layout, dtype, handle.device)
            return Collected(buffer, used, pooled=True)
        flat = torch.empty(handle.layout.padded_numel, dtype=dtype, device=handle.device)
        return Collected(GradBuffer(flat, handle.layout), used, pooled=False)

    def _take_kept(self, handle: FlatParamHandle) -> Collected | None:
        """What ``no_sync`` kept of ``handle``, without the parameters whose gradient the user has zeroed since."""
        if handle not in self.kept:
            return None
        collected, marks = self.kept.pop(handle)
        dropped = [mark.take_off(param) for param, mark in zip(handle.exposed, marks, strict=True)]
        if handle.orig_mode:
            # A piece that is empty or zero shows nothing of a zero_(); users zero all parameters of a unit or none.
            rest = any(d and mark.tells for d, mark in zip(dropped, marks, strict=True))
            dropped = [d or (rest and not m.tells) for d, m in zip(dropped, marks, strict=True)]
        if all(dropped):
            return None
        if handle.orig_mode:
            kept = [not is_dropped for is_dropped in dropped]
            collected.used = [a and b for a, b in zip(collected.used, kept, strict=True)]
        return collected


def _lie_as(layout: FlatLayout, grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether the elements of each gradient lie one after another as in its slot, none still to be conjugated."""
    return all(
        grad is None
        or (
            grad.layout is torch.strided
            and grad.stride() == slot.stride
            and not (grad.is_conj() or grad.is_neg())
        )
        for slot, grad in zip(layout.slots, grads, strict=True)
    )


def _copy(views: list[torch.Tensor], grads: list[Any]) -> bool:
    """Copy, with a cast; whether that was possible for all of them, as it is not for sparse ones, or for None."""
    try:
        _torch.foreach_copy(views, grads)
    except (RuntimeError, TypeError):
        return False
    return True


def _add(collected: Collected, grads: Sequence[torch.Tensor | None]) -> None:
    """Copy each gradient into the buffer, or add it to what its slot holds, and note which slots hold one."""
    copied: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    added: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for view, grad, is_used in zip(collected.buffer.views, grads, collected.used, strict=True):
        if grad is not None:
            targets, sources = added if is_used else copied
            targets.append(view)
            sources.append(grad if grad.layout is torch.strided else grad.to_dense())
    if copied[0]:
        _torch.foreach_copy(*copied)
    if added[0]:
        _torch.foreach_add(*added)
    collected.used = [
        is_used or grad is not None for is_used, grad in zip(collected.used, grads, strict=True)
    ]


def _refuse_differentiable(handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> None:
    for fqn, grad in zip(handle.fqns, grads, strict=True):
        if grad is not None and grad.requires_grad:
            raise UsageError(
                describe(
                    "backward ran with create_graph=True: gradients of sharded parameters can not be differentiated "
                    "again",
                    fqn=fqn,
                    remedy="Compute the penalty on the unwrapped module, or drop create_graph.",
                )
            )
