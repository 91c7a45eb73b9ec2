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

from .. import _torch
from ..comm.collectives import DONE, DirectSums, InPieces, Reduce, Work, abandon
from ..comm.direct import SHORTEST_SUM, SHORTEST_SUM_INSIDE
from ..comm.entry import raise_named
from ..flat.handle import FlatParamHandle
from ..flat.offloaded import OffloadedHandle
from ..flat.parameter import set_grad
from .buffers import GradBuffer
from .gradients import Collected, Lying
from .guard import remember_accumulating
from .param_hooks import run_post_accumulate_hooks
from .streams import InTwo

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["OffloadedReduction", "Reduction", "publish"]


@dataclass(slots=True)
class Part:
    """One handle's gradient in a reduction.

    Attributes:
        handle: Whose gradient it is.
        collected: This rank's unsharded gradient.
        out: ``[shard_numel]`` reduce dtype, receives the reduced shard.
        grad: ``[shard_numel]``, the same in the dtype of published gradients; ``out`` itself where nothing differs.
        before: What earlier backwards left, summed over the shard axis only; None if nothing.
    """

    handle: FlatParamHandle
    collected: Collected | Lying
    out: torch.Tensor
    grad: torch.Tensor
    before: torch.Tensor | None = None

    @property
    def buffer(self) -> GradBuffer:
        """Where the gradient is, which is in one place."""
        assert isinstance(self.collected, Collected)
        return self.collected.buffer

    @property
    def exposed_used(self) -> Sequence[bool]:
        """For each exposed parameter whether this rank computed a gradient for it."""
        used = self.collected.used
        return used if self.handle.orig_mode else [any(used)]


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
    is_kept_lower = shard.dtype is not handle.flat_param.dtype
    parts = zip(handle.held, handle.held_params, handle.split_held(shard), strict=True)
    for index, param, grad in parts:
        if not used[index] or not param.requires_grad:
            continue
        before = param.grad
        if before is not None:
            totals.append(before)
            terms.append(grad)
        elif is_kept_lower:
            set_grad(param, grad)
        else:
            param.grad = grad
    if totals:
        _torch.foreach_add(totals, terms)


class Reduction:
    """The gradients of one unit, from its leaves to its shards, started when the last of them has arrived.

    Attributes:
        unit: Whose.
        at_once: Whether it may be waited on at once.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._direct = _direct_sums(unit)
        self._parts = [self._collect(handle) for handle in unit.trained_handles]
        self._reduced_over_shards = False
        self._averaged = False
        self._stays = unit.replicate.size > 1 and not unit.requires_all_reduce
        # Nothing of it is on its way any more when it has been built.
        self.at_once = self._direct is not None and unit.replicate.size == 1
        self._work = self._start()

    def wait(self) -> None:
        """Make the gradients visible: to the host on the CPU, to the current stream elsewhere."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise_named(self.unit.reducing, error)
        self._work = (
            DONE  # it holds this object's own methods: a cycle that would keep the buffers alive
        )
        self._give_buffers_back()
        for part in self._parts if not self._stays else ():
            if _torch.any_post_accumulate_hooks(part.handle.held_params):
                run_post_accumulate_hooks(part.handle, part.exposed_used)
        self._parts = []
        if self._stays:
            remember_accumulating(self.unit)
        elif self.unit.on_gradients is not None:
            self.unit.on_gradients()

    def _give_buffers_back(self) -> None:
        for part in self._parts:
            if part.collected.pooled:
                self.unit.root.pool.give_back(part.buffer)

    def _start(self) -> Work:
        apart = self.unit.replicate.size > 1 and self.unit.shard.size > 1
        in_two = apart and self._direct is None and self.unit.averaging.hook is None
        if in_two and self.unit.root.streams.host_synchronous:
            return InTwo(self._launch(), self._over_replicas, self._publish)
        return self.unit.root.streams.run_reduce(self._launch, self._finish, apart=apart)

    def advance(self) -> bool:
        """On the CPU, end the sum over the shard axis and start that over the replicas, which then needs no waiting.

        Collective: every rank of the replicate axis, in the same order of units.

        Returns:
            Whether there are two sums and the second one has begun.
        """
        if not isinstance(self._work, InTwo):
            return False
        try:
            self._work.advance()
        except RuntimeError as error:
            raise_named(self.unit.reducing, error)
        return True

    def abandon(self) -> None:
        """Let the other ranks go on without this rank's part in it; the buffers stay for those that still read them."""
        abandon(self._work)

    def _collect(self, handle: FlatParamHandle) -> Part:
        unit = self.unit
        take = unit.gradients.take if self._direct is None else unit.gradients.take_lying
        collected = take(handle)
        if unit.averaging.may_overflow and isinstance(collected, Collected):
            collected.buffer.flat.div_(unit.averaging.predivide)
        if isinstance(collected, Collected) and unit.shard.size == 1:
            out = collected.buffer.flat
        else:
            dtype = unit.averaging.reduce_dtypes[handle]
            out = torch.empty(handle.layout.shard_numel, dtype=dtype, device=handle.device)
        # Here, in the pool of compute, which frees it; communication hooks may give `out` other memory.
        grad_dtype = unit.averaging.grad_dtype(handle)
        is_other = out.dtype is not grad_dtype or unit.averaging.hook is not None
        grad = torch.empty_like(out, dtype=grad_dtype) if is_other else out
        if handle not in unit.gradients.partial_sums:
            return Part(handle, collected, out, grad)
        before, used = unit.gradients.partial_sums.pop(handle)
        collected.used = [a or b for a, b in zip(collected.used, used, strict=True)]
        return Part(handle, collected, out, grad, before)

    def _launch(self) -> Work:
        unit = self.unit
        if self._direct is not None:
            self._sum(self._direct)
            return self._over_replicas()
        if unit.averaging.hook is not None:
            for part in self._parts:
                unit.averaging.run_hook(part.buffer.flat, part.out)
            if not unit.is_sharded:
                return DONE
            # The hook has averaged over the shard axis only.
            return unit.replicate.all_reduce([part.out for part in self._parts])
        mean = self._averaged = unit.averaging.is_by_summing
        reduces = []
        for part in self._parts:
            buffer = part.buffer
            reduces.append(Reduce(buffer.flat, buffer.slices, part.out, mean))
        work = unit.step_shard.reduce_scatter(reduces)
        if work is not DONE:
            self._reduced_over_shards = True
            return work
        return self._over_replicas()

    def _sum(self, direct: DirectSums) -> None:
        """Sum over the shard axis now, and let the gradients go before those of the next unit come."""
        sums = [InPieces(part.collected.pieces, part.out) for part in self._parts]
        try:
            direct.sum_directly(sums)
        except RuntimeError as error:
            raise_named(self.unit.reducing, error)
        self._give_buffers_back()
        for part in self._parts:
            part.collected = Lying((), part.collected.used)

    def _over_replicas(self) -> Work:
        """Start the sum over the replicas, of this and of what earlier backwards left; or leave it to a later one."""
        for part in self._parts:
            if part.before is not None:
                part.out.add_(part.before)
        if self._stays:
            return DONE
        return self.unit.replicate.all_reduce([part.out for part in self._parts])

    def _finish(self) -> None:
        if self._reduced_over_shards and self.unit.replicate.size > 1:
            self._over_replicas().wait()
        self._publish()

    def _publish(self) -> None:
        unit = self.unit
        if self._stays:
            for part in self._parts:
                unit.gradients.partial_sums[part.handle] = part.out, part.collected.used
            return
        divisor = 1.0 if self._averaged else unit.averaging.postdivide
        for part in self._parts:
            if divisor != 1.0:
                part.out.div_(divisor)
            if part.grad is not part.out:
                part.grad.copy_(part.out)
            self._deliver(part)

    def _deliver(self, part: Part) -> None:
        """Publish the gradient of ``part``."""
        used = part.exposed_used
        publish(part.handle, part.grad, used)
        self.unit.root.usage.note(part.handle, part.grad, used)


def _direct_sums(unit: Unit) -> DirectSums | None:
    """What sums the gradients of ``unit`` from where they lie: only long messages, only between ranks of one host.

    The outermost unit's are the last ones, beside which nothing is computed, so shorter ones of it gain, too.
    """
    least = SHORTEST_SUM if unit.index == 0 else SHORTEST_SUM_INSIDE
    if unit.unsharded_bytes < least or unit.averaging.hook is not None:
        return None
    collectives = unit.step_shard
    nbytes = sum(
        (handle.layout.padded_numel - handle.layout.shard_numel)
        * unit.averaging.reduce_dtypes[handle].itemsize
        for handle in unit.trained_handles
    )
    if nbytes < least or not isinstance(collectives, DirectSums):
        return None
    return collectives if collectives.sums_directly() else None


class OffloadedReduction(Reduction):
    """The gradients of a unit whose shards rest on the host: one copy more, published when it has arrived."""

    def __init__(self, unit: Unit) -> None:
        self._arriving: list[tuple[OffloadedHandle, torch.Tensor, Sequence[bool]]] = []
        super().__init__(unit)

    def _start(self) -> Work:
        return self.unit.root.streams.run_reduce_to_host(
            self._launch, self._finish, self._publish_arrived
        )

    def _deliver(self, part: Part) -> None:
        handle = part.handle
        assert isinstance(handle, OffloadedHandle)
        on_host = handle.home.empty(part.grad.numel(), part.grad.dtype)
        on_host.copy_(part.grad, non_blocking=True)
        self._arriving.append((handle, on_host, part.exposed_used))

    def _publish_arrived(self) -> None:
        # Here and not on the reduce stream: adding to an earlier gradient is the host's own work.
        for handle, grad, used in self._arriving:
            publish(handle, grad, used)
            self.unit.root.usage.note(handle, grad, used)
            handle.home.release([grad, *handle.at_rest()])
        self._arriving = []
