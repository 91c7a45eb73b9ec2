"""Loss scaling whose ranks agree on which steps to skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for sharded gradients: an overflow on one rank skips the step, and lowers the scale, on all.

    Each rank sees only its shard of the gradients, so a plain scaler's ranks would come to different decisions and
    drift apart.  A rank with an empty shard takes part like any other.

    Args:
        device: Device type of the gradients.
        init_scale: First scale factor.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_factor: What it is multiplied by after ``growth_interval`` steps without one.
        growth_interval: Steps without overflow before the scale grows.
        enabled: Whether to scale at all.
        process_group: Ranks that decide together; the default group if None.

    Example::

        scaler = ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 torch's signature
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale and agree on whether any overflowed.

        Collective: every rank of the process group.

        Raises:
            RuntimeError: If called twice for one optimizer between updates.
        """
        super().unscale_(optimizer)
        if self.is_enabled():
            self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What ``step`` calls instead of ``unscale_`` for optimizers that unscale themselves (fused ones)."""
        checked: dict[str, Any] = super()._check_inf_per_device(optimizer)
        self._agree(optimizer)
        return checked

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        found: dict[Any, torch.Tensor] = _torch.found_inf_of(self, optimizer)
        if not found:
            device = optimizer.param_groups[0]["params"][0].device
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        for flag in found.values():
            sent = self._sendable(flag)
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self.process_group)
            if sent is not flag:
                flag.copy_(sent)

    def _sendable(self, flag: torch.Tensor) -> torch.Tensor:
        """``flag`` where the group can send it from: gradients may rest on the host, which NCCL does not know."""
        group = _torch.default_group() if self.process_group is None else self.process_group
        if not _torch.is_process_group(group):
            return flag  # a stand-in that has no backends to ask
        try:
            _torch.group_backend(group, flag.device)
        except RuntimeError:
            return flag.to(torch.accelerator.current_accelerator())
        return flag
