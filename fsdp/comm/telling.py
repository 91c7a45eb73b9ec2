"""Small messages that every rank of a group tells all the others."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch

from .collectives import Collectives, Gather

__all__ = ["tell_all"]


def tell_all(group: Collectives, message: Any, device: torch.device) -> list[Any]:
    """Every rank's message, in rank order.

    Collective: every rank of ``group``; two launches.

    Args:
        group: Who takes part.
        message: Anything that pickles, small.
        device: Where the group communicates.
    """
    if group.size == 1:
        return [message]
    told = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8).to(device)
    sizes = torch.zeros(group.size, dtype=torch.int64, device=device)
    sizes[group.rank] = told.numel()
    group.all_gather([Gather(sizes, sizes.split(1))]).wait()
    longest = int(sizes.max())
    whole = torch.zeros(group.size * longest, dtype=torch.uint8, device=device)
    slices = whole.split(longest)
    slices[group.rank][: told.numel()].copy_(told)
    group.all_gather([Gather(whole, slices)]).wait()
    whole = whole.cpu()
    return [
        pickle.loads(ctypes.string_at(part.data_ptr(), size))
        for part, size in zip(whole.split(longest), sizes.tolist(), strict=True)
    ]
