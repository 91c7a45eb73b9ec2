"""A unit's gradients on their way from leaves to shards: collect, reduce, scale, publish.

::

    leaves' .grad --copy, cast--> buffer --reduce-scatter--> out --all-reduce over replicas-->  out
                                                              --scale, cast--> .grad of the exposed parameters

A feature of the reduction is one more step here, not one more argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import _torch
from ..comm.collectives import DONE, Reduce, Work
from ..errors import UsageError, describe
from ..flat.handle import FlatParamHandle
from ..flat.parameter import set_grad
from .buffers import GradBuffer

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Accumulated", "Mark", "Reduction", "collect", "publish"]


@dataclass(slots=True)
class Part:
    """One handle's gradient in a reduction.

    Attributes:
        handle: Whose gradient it is.
        buffer: ``[padded_numel]`` reduce dtype, this rank's unsharded gradient.
        used: For each parameter whether this rank computed a gradient for it.
        out: ``[shard_numel]`` reduce dtype, receives the reduced shard.
        pooled: Whether ``buffer`` goes back to the pool.
    """

    handle: FlatParamHandle
    buffer: GradBuffer
    used: list[bool]
    out: torch.Tensor
    pooled: bool


@dataclass(slots=True)
class Accumulated:
    """Gradients that ``no_sync`` backwards have left unsharded, in the reduce dtype.

    Attributes:
        buffer: Their sum so far.
        used: For each parameter whether any backward computed a gradient for it.
        marks: What each exposed parameter shows as its gradient meanwhile.
    """

    buffer: GradBuffer
    used: list[bool]
    marks: list[Mark]


@dataclass(slots=True)
class Mark:
    """The gradient a parameter shows while its new one is still unsharded; a user's ``zero_grad`` leaves a trace on it.

    Attributes:
        grad: The gradient it had before, or NaN if it had none.
        version: That tensor's version.
        invented: Whether it had none.
        nonzero: Whether any element was not zero; if none was, zeroing can not be told from other writes.
    """

    grad: torch.Tensor
    version: int
    invented: bool
    nonzero: bool

    @classmethod
    def put_on(cls, param: nn.Parameter) -> Mark:
        """Give ``param`` a gradient if it has none, and remember what it is."""
        invented = param.grad is None
        if param.grad is None:
            # NaN, so that zeroing it and scaling it leave different traces, and stepping on it would not go unnoticed.
            param.grad = torch.full_like(param, float("nan"))
        return cls(param.grad, _torch.version_of(param.grad), invented, bool(param.grad.any()))

    def take_off(self, param: nn.Parameter) -> bool:
        """Take an invented gradient away again; returns whether the user zeroed the gradient in the meantime."""
        if param.grad is None:
            return True
        changed = param.grad is not self.grad or _torch.version_of(self.grad) != self.version
        zeroed = changed and self.nonzero and not bool(param.grad.any())
        if self.invented and not zeroed:
            param.grad = None
        return zeroed


def collect(handle: FlatParamHandle, buffer: GradBuffer, *, add: bool) -> list[bool]:
    """Move the leaves' gradients into ``buffer`` (or add them to it) and drop them.

    Returns:
        For each parameter whether its leaf had a gradient; slots without one are zeroed (or left, with ``add``).
    """
    leaves = handle.unsharded.leaves
    grads = [leaf.grad for leaf in leaves]
    used = [grad is not None for grad in grads]
    targets = [view for view, is_used in zip(buffer.views, used, strict=True) if is_used]
    sources = [
        grad if grad.layout is torch.strided else grad.to_dense()
        for grad in grads
        if grad is not None
    ]
    if True in [source.requires_grad for source in sources]:
        raise _differentiable(handle, grads)
    for leaf in leaves:
        leaf.grad = None
    if not add and len(targets) < len(leaves):
        for view, is_used in zip(buffer.views, used, strict=True):
            if not is_used:
                view.zero_()
    if targets:
        (_torch.foreach_add if add else _torch.foreach_copy)(targets, sources)
    return used


def _differentiable(handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> UsageError:
    names = [
        fqn
        for fqn, grad in zip(handle.fqns, grads, strict=True)
        if grad is not None and grad.requires_grad
    ]
    return UsageError(
        describe(
            "backward ran with create_graph=True: gradients of sharded parameters can not be differentiated again",
            fqn=names[0],
            remedy="Compute the penalty on the unwrapped module, or drop create_graph.",
        )
    )


def publish(handle: FlatParamHandle, shard: torch.Tensor, used: Sequence[bool]) -> None:
    """Make ``shard`` ``[shard_numel]`` the gradient of the exposed parameters, or add it to the one they have.

    A parameter that nothing used, or of which this rank holds nothing, keeps the gradient it has, None included.

    Args:
        handle: Whose parameters.
        shard: ``[shard_numel]``.
        used: For each exposed parameter whether it was used.
    """
    totals: list[torch.Tensor] = []
    terms: list[torch.Tensor] = []
    for param, grad, is_used, held in zip(
        handle.exposed, handle.split_shard(shard), used, handle.holds, strict=True
    ):
        if not is_used or not held or not param.requires_grad:
            continue
        if param.grad is None:
            set_grad(param, grad)
        else:
            totals.append(param.grad)
            terms.append(grad)
    if totals:
        _torch.foreach_add(totals, terms)


class Reduction:
    """The gradients of one unit, from its leaves to its shards, started when the last of them has arrived."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._parts = [self._collect(handle) for handle in unit.handles if handle.requires_grad]
        self._reduced_over_shards = False
        self._work = unit.root.streams.run_reduce(self._launch, self._finish)

    def wait(self) -> None:
        """Make the gradients visible: to the host on the CPU, to the current stream elsewhere."""
        with self.unit.reducing:
            self._work.wait()
        self._work = (
            DONE  # it holds this object's own methods: a cycle that would keep the buffers alive
        )
        pool = self.unit.root.pool
        for part in self._parts:
            if part.pooled:
                pool.give_back(part.buffer)
        self._parts = []
        if self.unit.on_gradients is not None:
            self.unit.on_gradients()

    def _collect(self, handle: FlatParamHandle) -> Part:
        unit = self.unit
        dtype = unit.reduce_dtype(handle)
        earlier = unit.take_accumulated(handle)
        # With one rank on the shard axis the buffer becomes the gradient itself, so it is not lent from the pool.
        pooled = earlier is None and unit.shard.size > 1
        if earlier is not None:
            buffer = earlier.buffer
            now = collect(handle, buffer, add=True)
            used = [a or b for a, b in zip(now, earlier.used, strict=True)]
        else:
            buffer = (
                unit.root.pool.take(handle.layout, dtype, handle.device)
                if pooled
                else unit.new_buffer(handle)
            )
            used = collect(handle, buffer, add=False)
        if unit.predivide != 1.0:
            buffer.flat.div_(unit.predivide)
        out = buffer.flat
        if unit.shard.size > 1:
            out = torch.empty(handle.layout.shard_numel, dtype=dtype, device=handle.device)
        return Part(handle, buffer, used, out, pooled)

    def _launch(self) -> Work:
        unit = self.unit
        if unit.comm_hook is not None:
            for part in self._parts:
                unit.run_comm_hook(part.buffer.flat, part.out)
            return DONE
        reduces = [Reduce(part.buffer.flat, part.buffer.slices, part.out) for part in self._parts]
        work = unit.shard.reduce_scatter(reduces)
        if work is not DONE:
            self._reduced_over_shards = True
            return work
        return unit.replicate.all_reduce([part.out for part in self._parts])

    def _finish(self) -> None:
        unit = self.unit
        if self._reduced_over_shards:
            unit.replicate.all_reduce([part.out for part in self._parts]).wait()
        for part in self._parts:
            if unit.postdivide != 1.0 and unit.comm_hook is None:
                part.out.div_(unit.postdivide)
            dtype = unit.grad_dtype(part.handle)
            grad = part.out if part.out.dtype is dtype else part.out.to(dtype)
            used = part.used if part.handle.orig_mode else [any(part.used)]
            publish(part.handle, grad, used)
            unit.root.usage.note(part.handle, grad, used)
