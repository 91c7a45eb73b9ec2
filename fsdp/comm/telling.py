"""Small messages that every rank of a group tells all the others."""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import torch

from .collectives import Collectives, Gather

__all__ = ["pickled", "tell_all"]


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
    told = torch.frombuffer(bytearray(pickled(message)), dtype=torch.uint8).to(device)
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


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes: what torch makes of one in float8 cannot be read again."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        kept = obj.detach().cpu().contiguous()
        data = ctypes.string_at(kept.data_ptr(), kept.nbytes) if kept.nbytes else b""
        return _tensor_of, (data, kept.dtype, tuple(kept.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def pickled(message: Any) -> bytes:
    """``message`` for ``pickle.loads`` on another rank; its tensors on the host.  Collective: none."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
