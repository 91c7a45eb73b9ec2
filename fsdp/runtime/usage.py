"""Which parameters any rank computed a gradient for, when this rank did not.

A parameter that no rank used keeps ``.grad`` None, so that an optimizer leaves it alone.  A rank that did
not use it can not tell by itself, and must not ask alone: so in each backward every rank tells all others once, in one
small all-reduce, and a rank reads the answer only if it left something out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import Collectives
from ..flat.handle import FlatParamHandle
from .param_hooks import run_post_accumulate_hooks
from .reduction import publish

__all__ = ["Usage", "agree"]


class Usage:
    """What this rank used and what it left out in the running backward."""

    def __init__(self) -> None:
        self.flags: dict[FlatParamHandle, Sequence[bool]] = {}
        self.withheld: list[tuple[FlatParamHandle, torch.Tensor, Sequence[bool]]] = []

    def note(self, handle: FlatParamHandle, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """``grad`` ``[shard_numel]`` was published for the parameters that ``used`` says this rank used."""
        before = self.flags.get(handle)
        self.flags[handle] = (
            used if before is None else [a or b for a, b in zip(before, used, strict=True)]
        )
        if False in used:
            self.withheld.append((handle, grad, used))

    def clear(self) -> None:
        """Forget this backward."""
        self.flags.clear()
        self.withheld.clear()


def agree(
    usage: Usage, handles: Sequence[FlatParamHandle], collectives: Sequence[Collectives]
) -> None:
    """Publish what this rank withheld of parameters that another rank used.

    Collective: every rank of ``collectives``, with the same handles.
    """
    mine = [
        used
        for handle in handles
        for used in usage.flags.get(handle, [False] * len(handle.exposed))
    ]
    flags = _on_device(mine, handles[0].device)
    for group in collectives:
        group.all_reduce([flags], op="max").wait()
    if not usage.withheld:
        return
    answers = iter(flags.tolist())
    anyone = {handle: [bool(next(answers)) for _ in handle.exposed] for handle in handles}
    for handle, grad, here in usage.withheld:
        if handle not in anyone:
            continue  # of another group's units
        only_elsewhere = [a and not h for a, h in zip(anyone[handle], here, strict=True)]
        publish(handle, grad, only_elsewhere)
        run_post_accumulate_hooks(handle, only_elsewhere)


def _on_device(flags: list[bool], device: torch.device) -> torch.Tensor:
    """``flags`` as uint8 on ``device``, without making the host wait for it."""
    if device.type == "cpu":
        return torch.tensor(flags, dtype=torch.uint8)
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    pinned = torch.tensor(flags, dtype=torch.uint8, pin_memory=True)
    return pinned.to(device, non_blocking=True)
