"""The norm over all gradients where each element is right on its owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .ownership import Piece
from .packed import like_storage_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["clip_owned"]


@torch.no_grad()
def clip_owned(
    pieces: Sequence[Piece],
    params: Sequence[torch.Tensor],
    group: ProcessGroup,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Clip the gradients of ``params`` by the norm over the elements in all ranks' ``pieces``.

    Collective: every rank of ``group``.

    Returns:
        The norm before clipping, zero-dimensional float32, on the device of the first parameter.
    """
    device = params[0].device
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for piece in pieces:
        if (grad := piece.param.grad) is not None:
            owned = like_storage_of(grad, piece.param)[piece.start : piece.stop]
            wide = torch.promote_types(grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(owned, norm_type, dtype=wide)
            norms.append(norm.to(device, torch.float64))
    largest = norm_type == float("inf")
    total = torch.stack(norms)
    total = total.max() if largest else total.pow(norm_type).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = (total if largest else total.pow(1.0 / norm_type)).float()
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total
