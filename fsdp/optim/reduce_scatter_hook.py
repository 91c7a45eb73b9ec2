"""A gradient hook that brings gradients to the ranks that own the parameters, and nowhere else.

Note [What gradients hold afterwards]
    With this hook ``param.grad`` is right where this rank owns the elements and zero elsewhere; zero times anything is
    still no update, and nothing reads it in the optimizer.  A loss scaler looks at all gradients of a rank, though, and
    ranks must agree on whether to skip a step: if any rank found an infinity or NaN in what it owns, the zeros are NaN
    on all ranks.  The norm over all gradients is what ``ZeroRedundancyOptimizer.clip_grad_norm_`` computes.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with the classes.

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.collectives import Work
from ..errors import ConfigError, name_some
from .zero import ZeroRedundancyOptimizer

__all__ = ["reduce_scatter_hook"]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

_TAG = 1 << 16  # beyond those of the overlapping hooks
_GATHER_TAG = 1 << 17
_GATHER_NBYTES = 4 << 20  # parameters that travel together into the next forward


def reduce_scatter_hook(
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    gather_in_forward: bool = False,
) -> Hook:
    """Make a gradient hook that averages each gradient on the rank that owns the parameter.

    Together with the parameters that ``zero.step()`` hands out, a step moves what one all-reduce would.

    Collective: none.

    Args:
        ddp: The wrapped model.
        zero: An optimizer over parameters of ``ddp``; parameters it does not hold are averaged on all ranks.
        gather_in_forward: Let ``zero.step()`` return while parameters are still on their way; each module waits for its
            own before its forward, ``state_dict()`` for all.  Code that reads parameters in any other way between
            ``step`` and the next forward must call ``zero.wait_for_parameters()`` first.

    Returns:
        For ``ddp.register_comm_hook(None, ...)``.

    Raises:
        ConfigError: If ``zero`` holds trainable parameters that are not in ``ddp``.

    Example:
        >>> ddp.register_comm_hook(None, reduce_scatter_hook(ddp, zero))  # doctest: +SKIP
    """
    known = set(ddp.parameters())
    strange = [p for p in zero.all_parameters() if p.requires_grad and p not in known]
    if strange:
        raise ConfigError(
            f"ddp does not hold these parameters of the optimizer: {name_some(map(zero.name_of, strange))}."
        )
    if gather_in_forward:
        zero.handing_out.start_by(_ForwardGather(ddp, zero).start)
    return _ReduceToOwners(zero).run


@dataclass(slots=True, eq=False)
class _Launched:
    """A bucket on its way.

    Attributes:
        buffer: Its gradients.
        runs: Parts of the buffer, each with its owner.
        work: Ends when the parts this rank owns are sums over ranks.
        future: What DistributedDataParallel waits for.
    """

    buffer: torch.Tensor
    runs: list[tuple[int, torch.Tensor]]
    work: Work
    future: torch.futures.Future[torch.Tensor]


class _ReduceToOwners:
    """The state of one backward: buckets on their way.  They are finished together when the last one has arrived."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        self._launched: list[_Launched] = []

    def run(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce one bucket."""
        if bucket.index() == 0:  # what an aborted backward left behind is dropped
            self._launched.clear()
            self._zero.received_grads = {}
        buffer = bucket.buffer()
        buffer.div_(self._zero.world_size)
        runs = self._runs(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if buffer.device.type == "cpu" else [buffer.device]
        )
        if self._zero.world_size > 1:
            work = self._zero.handing_out.wire(buffer.device).reduce(
                runs, tag=_TAG + bucket.index()
            )
            self._launched.append(_Launched(buffer, runs, work, future))
            if self._zero.in_join:
                grads = zip(bucket.parameters(), bucket.gradients(), strict=True)
                self._zero.received_grads = {**self._zero.received_grads, **dict(grads)}
        else:
            future.set_result(buffer)
        if bucket.is_last():
            self._finish()
        return future

    def _runs(self, bucket: dist.GradBucket) -> list[tuple[int, torch.Tensor]]:
        """The bucket cut where the owner changes; owner -1 for parameters the optimizer does not hold."""
        buffer = bucket.buffer()
        spans: list[tuple[int, int, int]] = []
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            offset = int(grad.storage_offset() - buffer.storage_offset())
            if self._zero.ownership.holds(param):
                slices = self._zero.ownership.slices(param)
                parts = [(part.rank, offset + part.start, offset + part.stop) for part in slices]
            else:
                parts = [(-1, offset, offset + grad.numel())]
            for owner, start, stop in parts:
                if spans and spans[-1][0] == owner and spans[-1][2] == start:
                    spans[-1] = (owner, spans[-1][1], stop)
                else:
                    spans.append((owner, start, stop))
        return [(owner, buffer[start:stop]) for owner, start, stop in spans]

    def _finish(self) -> None:
        launched, self._launched = self._launched, []
        if not launched:
            return
        for bucket in launched:
            bucket.work.wait()
        poison = self._agree_on_overflow(launched)
        for bucket in launched:
            for owner, run in bucket.runs:
                if owner not in (-1, self._zero.rank):
                    run.copy_(poison.to(run.device, run.dtype))
            bucket.future.set_result(bucket.buffer)

    def _agree_on_overflow(self, launched: Sequence[_Launched]) -> torch.Tensor:
        """NaN if any rank found one, or an infinity, in what it owns; else zero.  See Note above."""
        device = launched[0].buffer.device
        overflow = torch.zeros((), device=device)
        for bucket in launched:
            for owner, run in bucket.runs:
                if owner == self._zero.rank:
                    wide = run.to(torch.float32) if run.dtype.itemsize < 4 else run
                    bad = ~torch.isfinite(wide.sum())
                    overflow = torch.maximum(overflow, bad.to(overflow))
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self._zero.process_group)
        return torch.where(overflow > 0, torch.nan, 0.0)


class _ForwardGather:
    """Parameters that arrive during the next forward, in the order in which modules were registered."""

    def __init__(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = weakref.ref(zero)
        self._works: dict[torch.Tensor, Work] = {}
        for module in ddp.module.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._before_forward)
                module.register_state_dict_pre_hook(self._before_saving)

    def start(self, params: Sequence[torch.Tensor]) -> None:
        """Start to hand out ``params``, in portions."""
        zero = self._zero()
        assert zero is not None
        self._works = {}
        portion: list[torch.Tensor] = []
        portions = [portion]
        for param in params:
            if sum(member.nbytes for member in portion) >= _GATHER_NBYTES:
                portion = []
                portions.append(portion)
            portion.append(param)
        works = []
        for number, members in enumerate(portions):
            regions = zero.ownership.regions(members)
            works.append(zero.handing_out.start(regions, tag=_GATHER_TAG + number))
            self._works.update(dict.fromkeys(members, works[-1]))
        zero.handing_out.leave_in_flight(works)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        for param in module.parameters(recurse=False):
            work = self._works.pop(param, None)
            if work is not None:
                work.wait()

    def _before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        self._before_forward(module, ())
