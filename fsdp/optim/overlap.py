"""The optimizer step inside DistributedDataParallel's gradient hook, bucket by bucket.

Note [One mechanism, two hooks]
    A bucket arrives, its reduction is started, and once that is done the parameters in the bucket are stepped by
    their owners and handed out.  Which bucket holds which parameters is DistributedDataParallel's business and may
    change from one backward to the next; ownership is by parameter and fixed from construction, so the first
    backward is like any other.  The two hooks differ in when they look for finished reductions: only after the last
    bucket has arrived, or also whenever one arrives.

    Everything happens on the thread that runs the hook, never in a callback of a reduction: gloo would run that on
    the worker threads which the reductions themselves need.  On gloo each rank steps whatever has finished; messages
    carry the number of their bucket, so the order may differ between ranks.  Elsewhere the order has to be the same:
    a bucket is processed when the next one arrives, on a stream of its own, which waits for the reduction in place of
    the host.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with the classes.

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..comm.collectives import Work
from ..errors import ConfigError, UsageError, name_some
from .zero import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001, FBT001, FBT002  # the reference's signature
) -> Hook:
    """Make a gradient hook that also steps ``zero``, once all buckets have arrived.

    The backward computation runs undisturbed; steps and parameters overlap with reductions that are still under way.
    To be preferred where communication is slow.

    Collective: none.

    Args:
        hook: Reduces a bucket, as ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook``.
        ddp: The wrapped model.
        zero: Constructed with ``overlap_with_ddp=True``, over parameters of ``ddp``.
        shard_buckets: Accepted for compatibility: every bucket is shared by the owners of its parameters, who are
            balanced over all parameters.

    Returns:
        For ``ddp.register_comm_hook(None, ...)``.

    Raises:
        ConfigError: If ``zero`` was not constructed so, or holds trainable parameters that are not in ``ddp``.
    """
    return _OverlappedStep(hook, ddp, zero, eager=False).run


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001, FBT001, FBT002  # the reference's signature
) -> Hook:
    """Make a gradient hook that also steps ``zero``, bucket by bucket while backward still computes.

    To be preferred where communication is fast.  Arguments, result and errors as :func:`hook_with_zero_step`.

    Collective: none.
    """
    return _OverlappedStep(hook, ddp, zero, eager=True).run


@dataclass(slots=True, eq=False)
class _Arrived:
    """A bucket whose reduction is under way.

    Attributes:
        bucket: The bucket.
        params: Those of its parameters that the optimizer holds.
        grads: Their places in the bucket.
        reduced: Future of the reduction.
        used: Waits, then says for each of ``params`` whether any rank used it; None where all count as used.
    """

    bucket: dist.GradBucket
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    reduced: torch.futures.Future[torch.Tensor]
    used: Callable[[], list[bool]] | None


class _OverlappedStep:
    """The state of one backward: buckets whose turn has not come, and parameters on their way."""

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        *,
        eager: bool,
    ) -> None:
        _check(ddp, zero)
        self._hook = hook
        self._ddp = weakref.ref(ddp)  # DistributedDataParallel holds this object
        self._zero = zero
        self._eager = eager
        self._on_gloo = dist.get_backend(zero.process_group) == "gloo"
        self._waiting: list[_Arrived] = []
        self._handed_out: list[Work] = []
        self._seen: set[torch.Tensor] = set()
        self._static_use: dict[torch.Tensor, bool] = {}
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Handle one bucket."""
        if bucket.index() == 0:
            self._begin()
        reduced = self._hook(state, bucket)
        self._arrive(bucket, reduced)
        if bucket.is_last():
            self._finish()
        elif self._eager:
            self._step_what_is_ready()
        return reduced

    def _begin(self) -> None:
        """A new backward; what an aborted one left behind is dropped."""
        self._waiting.clear()
        self._handed_out.clear()
        self._seen.clear()
        self._zero.begin_step()

    def _arrive(self, bucket: dist.GradBucket, reduced: torch.futures.Future[torch.Tensor]) -> None:
        held = [
            (param, grad)
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if self._zero.ownership.holds(param)
        ]
        params = [param for param, _ in held]
        self._seen.update(params)
        used = self._start_use_flags(bucket, params)
        grads = [grad for _, grad in held]
        self._waiting.append(_Arrived(bucket, params, grads, reduced, used))

    def _start_use_flags(
        self, bucket: dist.GradBucket, params: list[torch.Tensor]
    ) -> Callable[[], list[bool]] | None:
        """Ask all ranks which parameters were used: one that no rank used keeps its gradient of None, and its value."""
        ddp = self._ddp()
        assert ddp is not None
        if not (ddp.find_unused_parameters or ddp.static_graph):
            return None
        known = self._static_use
        if all(param in known for param in params):
            return lambda: [known[param] for param in params]
        flags = [not self._zero.is_shadowing and param.grad is not None for param in params]
        used = torch.tensor(flags, dtype=torch.float32, device=bucket.buffer().device)
        ready = dist.all_reduce(
            used, dist.ReduceOp.MAX, group=self._zero.process_group, async_op=True
        )
        is_static = ddp.static_graph

        def finish() -> list[bool]:
            ready.wait()
            agreed = [bool(flag) for flag in used.tolist()]
            if is_static:  # every later backward uses the same
                known.update(zip(params, agreed, strict=True))
            return agreed

        return finish

    def _step_what_is_ready(self) -> None:
        if self._on_gloo:
            ready = [arrived for arrived in self._waiting if arrived.reduced.done()]
        else:
            ready = self._waiting[:-1]
        for arrived in ready:
            self._waiting.remove(arrived)
            self._step(arrived)

    def _finish(self) -> None:
        """Step the buckets that are left and wait until all parameters have arrived."""
        missing = [
            param
            for param in self._zero.all_parameters()
            if param.requires_grad and param not in self._seen
        ]
        if missing:
            raise UsageError(
                f"These parameters of the optimizer are in no gradient bucket: "
                f"{name_some(self._zero.name_of(param) for param in missing)}. "
                "With overlap_with_ddp=True all must be trained by the wrapped model."
            )
        while self._waiting:
            self._step(self._waiting.pop(0))
        for work in self._handed_out:
            work.wait()
        self._handed_out.clear()
        for device, stream in self._streams.items():
            # Order: steps and parameters (own stream) -> next forward (compute stream).
            torch.accelerator.current_stream(device).wait_stream(stream)
        self._zero.finish_parts()

    def _step(self, arrived: _Arrived) -> None:
        """Step the parameters of one bucket where they are owned, and start to hand them out."""
        with self._stream_for(arrived.bucket.buffer()):
            _settle(arrived)
            params, grads = arrived.params, arrived.grads
            if arrived.used is not None:
                chosen = arrived.used()
                params = [param for param, use in zip(params, chosen, strict=True) if use]
                grads = [grad for grad, use in zip(grads, chosen, strict=True) if use]
            self._zero.step_part(params, grads)
            regions = self._zero.ownership.regions(params)
            # Tag 0 is that of ordinary steps.
            self._handed_out.append(
                self._zero.handing_out.start(regions, 1 + arrived.bucket.index())
            )

    @contextlib.contextmanager
    def _stream_for(self, buffer: torch.Tensor) -> Iterator[None]:
        """On an accelerator a stream of our own, so that waiting for a reduction does not hold up backward."""
        if buffer.device.type == "cpu" or not self._eager:
            yield
            return
        stream = self._streams.get(buffer.device)
        if stream is None:
            stream = self._streams[buffer.device] = torch.Stream(buffer.device)
        # Order: local gradients, and reads of parameters in backward (compute stream) -> their update (own stream).
        stream.wait_stream(torch.accelerator.current_stream(buffer.device))
        with stream:
            yield


def _settle(arrived: _Arrived) -> None:
    """Wait for the reduction; a hook that returns another tensor than the bucket's has it copied there."""
    result: Any = arrived.reduced.wait()
    if isinstance(result, list | tuple):
        result = result[0]
    buffer = arrived.bucket.buffer()
    if isinstance(result, torch.Tensor) and result.data_ptr() != buffer.data_ptr():
        buffer.copy_(result)


def _check(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    if not zero.overlaps:
        raise ConfigError(
            "ZeroRedundancyOptimizer must be constructed with overlap_with_ddp=True to use this hook."
        )
    known = set(ddp.parameters())
    strange = [
        param for param in zero.all_parameters() if param.requires_grad and param not in known
    ]
    if strange:
        raise ConfigError(
            f"ddp does not hold these parameters of the optimizer: {name_some(map(zero.name_of, strange))}. "
            "With overlap_with_ddp=True all must be trained by the wrapped model."
        )
