"""Gradient clipping by the norm of the unsharded gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..comm.collectives import Collectives
from ..errors import FsdpWarning
from ..runtime.unit import Unit

__all__ = ["clip_units"]


def clip_units(
    units: Sequence[Unit],
    others: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``.

    Sharded gradients are summed over their shard group, replicated and unmanaged ones counted once.  The norm is
    accumulated in float32 (float64 for float64 gradients) and stays on the device: the host never waits for it.

    Collective: every rank of every unit's shard group.

    Args:
        units: Units whose gradients to clip.
        others: Parameters no unit manages; equal on all ranks for the result to be.
        max_norm: Upper bound.
        norm_type: Any order, ``inf`` and ``-inf`` included.
        device: Where the norm is computed.

    Returns:
        The norm before clipping, 0-dimensional, the same on every rank.
    """
    groups: dict[tuple[int, int, int], tuple[Collectives, list[torch.Tensor]]] = {}
    for unit in units:
        _, grads = groups.setdefault(unit.group_key, (unit.shard, []))
        grads.extend(_grads(param for handle in unit.handles for param in handle.exposed))
    rest = _grads(others)
    every = [grad for _, grads in groups.values() for grad in grads] + rest
    dtype = torch.float64 if any(grad.dtype is torch.float64 for grad in every) else torch.float32
    total = _power_sum(rest, norm_type, dtype, device)
    for collectives, grads in groups.values():
        part = _power_sum(grads, norm_type, dtype, device)
        op = {math.inf: "max", -math.inf: "min"}.get(norm_type, "sum")
        collectives.all_reduce([part], op=op).wait()
        total = _combine(total, part, norm_type)
    if norm_type not in (math.inf, -math.inf, 0.0):
        total = total.pow(1.0 / norm_type)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if every:
        _torch.foreach_mul(every, coefficient)
    else:
        warnings.warn(
            "clip_grad_norm_ was called on rank "
            f"{dist.get_rank()} with no gradients -- returning the total norm in the default dtype "
            f"{_result_dtype(every)}, which is that of the other ranks' gradients.",
            FsdpWarning,
            stacklevel=4,
        )
    return total.to(_result_dtype(every))


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _power_sum(
    grads: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of ``|g| ** p`` over all elements; the maximum, minimum or count for p of inf, -inf and 0."""
    grads = [grad for grad in grads if grad.numel()]
    empty = math.inf if norm_type == -math.inf else 0.0
    if not grads:
        return torch.full((), empty, dtype=dtype, device=device)
    norms = torch.stack(
        [norm.to(device, dtype) for norm in _torch.foreach_norm(grads, norm_type, dtype)]
    )
    if norm_type == math.inf:
        return norms.max()
    if norm_type == -math.inf:
        return norms.min()
    return norms.sum() if norm_type == 0.0 else norms.pow(norm_type).sum()


def _combine(left: torch.Tensor, right: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type == math.inf:
        return torch.maximum(left, right)
    return torch.minimum(left, right) if norm_type == -math.inf else left + right


def _result_dtype(grads: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest dtype among the gradients, float32 where there are none."""
    result = grads[0].dtype if grads else torch.float32
    for grad in grads:
        result = torch.promote_types(result, grad.dtype)
    return result
