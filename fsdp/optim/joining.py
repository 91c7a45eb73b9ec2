"""Uneven inputs: what a rank does in a ``Join`` context once it is out of inputs.

Note [Gradients of a rank without inputs]
    A rank that has run out still owns parameters, and so has to step them with the gradients of this iteration, which
    DistributedDataParallel leaves on the ranks that still train.  So in a ``Join`` context every step begins with a
    few bytes that say who has run out, and if someone has, the first rank that still trains sends the gradients of
    what they own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from .shared_group import copy_settings

if TYPE_CHECKING:
    from .zero import ZeroRedundancyOptimizer

__all__ = ["Idle", "ZeroJoinHook", "share_grads", "share_settings"]


class ZeroJoinHook(JoinHook):
    """Steps along with the ranks that still train."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        super().__init__()

    def main_hook(self) -> None:
        """Step what this rank owns with the others' gradients, and exchange parameters.

        Under ``overlap_with_ddp`` the gradient hook does, which DistributedDataParallel's join hook calls.

        Collective: every rank of the process group.
        """
        self._zero.is_shadowing = True
        if not self._zero.overlaps:
            self._zero.step()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001  # torch's signature
        """All ranks are out of inputs: back to ordinary steps.  Collective: none."""
        self._zero.is_shadowing = False
        self._zero.leave_join()


@dataclass(frozen=True, slots=True)
class Idle:
    """Who is out of inputs, and who speaks for those that still train.

    Attributes:
        ranks: Ranks without inputs; none of them outside a ``Join`` context.
        source: The first rank that still trains.
    """

    ranks: tuple[int, ...] = ()
    source: int = 0


def share_settings(zero: ZeroRedundancyOptimizer) -> Idle:
    """Find out who is out of inputs, and give them the settings of those that still train.

    Collective: every rank of the process group, inside a ``Join`` context; otherwise none.
    """
    if not zero.in_join or zero.world_size == 1:
        return Idle()
    training = torch.zeros(zero.world_size, device=zero.join_device)
    training[zero.rank] = 0.0 if zero.is_shadowing else 1.0
    dist.all_reduce(training, group=zero.process_group)
    flags = training.tolist()
    if all(flags) or not any(flags):
        return Idle()
    idle = Idle(tuple(rank for rank, trains in enumerate(flags) if not trains), flags.index(1.0))
    _send_settings(zero, idle.source)
    return idle


def share_grads(zero: ZeroRedundancyOptimizer, idle: Idle) -> None:
    """Give ranks that are out of inputs the gradients of what they own.

    Collective: every rank of the process group if any is out of inputs; otherwise none.
    """
    params = [
        param
        for param in zero.all_parameters()
        if any(part.rank in idle.ranks for part in zero.ownership.slices(param))
    ]
    if params:
        _send_grads(zero, params, idle.source)


def _send_settings(zero: ZeroRedundancyOptimizer, source: int) -> None:
    """Learning rates and the like as they are on rank ``source``: schedulers no longer run on idle ranks."""
    sent = [[{k: v for k, v in group.items() if k != "params"} for group in zero.param_groups]]
    dist.broadcast_object_list(
        sent, dist.get_global_rank(zero.process_group, source), zero.process_group
    )
    if zero.is_shadowing:
        for settings, group in zip(sent[0], zero.param_groups, strict=True):
            copy_settings(settings, group)


def _send_grads(zero: ZeroRedundancyOptimizer, params: list[torch.Tensor], source: int) -> None:
    """Copy gradients of ``params`` from rank ``source`` to the ranks that are out of inputs."""
    has = torch.tensor([param.grad is not None for param in params], dtype=torch.float32)
    has = has.to(zero.join_device)
    dist.broadcast(has, dist.get_global_rank(zero.process_group, source), zero.process_group)
    present = [param for param, flag in zip(params, has.tolist(), strict=True) if flag]
    received = [torch.empty_like(param.detach()) for param in present]
    if zero.rank == source:
        for param, buffer in zip(present, received, strict=True):
            assert param.grad is not None
            buffer.copy_(param.grad)
    for device in dict.fromkeys(param.device for param in present):
        by_rank: list[list[torch.Tensor]] = [[] for _ in range(zero.world_size)]
        by_rank[source] = [grad for grad in received if grad.device == device]
        zero.handing_out.wire(device).hand_out(by_rank).wait()
    if zero.is_shadowing:
        for param in params:
            param.grad = None
        for param, grad in zip(present, received, strict=True):
            param.grad = zero.received_grads.get(param, grad)
