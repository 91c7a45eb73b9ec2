"""Casting: inputs on the way into a unit, buffers once before the first forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from .._pytree import map_tensors

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["cast_buffers", "cast_inputs"]


def cast_inputs(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, entering: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Move the inputs of the outermost unit to its device and cast floating ones to the compute dtype.

    The cast is differentiable, so gradients reach whatever produced the input.  Integer and boolean tensors keep
    their dtype.  Returns None where nothing changes.
    """
    policy = unit.config.mixed_precision
    wanted = policy.cast_root_forward_inputs if entering else policy.cast_forward_inputs
    dtype = policy.param_dtype if wanted else None
    if dtype is None and not entering:
        return None
    device = unit.config.device

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        to_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.dtype == to_dtype and tensor.device == device:
            return tensor
        return tensor.to(device, to_dtype)

    return map_tensors(convert, args), map_tensors(convert, kwargs)


def cast_buffers(unit: Unit) -> None:
    """Cast the unit's own floating-point buffers to ``buffer_dtype``, remembering what they were."""
    dtype = unit.config.mixed_precision.buffer_dtype
    if dtype is None:
        return
    for module, name, buffer in unit.own_buffers():
        if buffer.is_floating_point() and buffer.dtype != dtype:
            unit.buffer_dtypes[module, name] = buffer.dtype
            _torch.buffer_table(module)[name] = buffer.to(dtype)


def restore_dtype(
    saved: torch.Tensor,
    original: dict[tuple[nn.Module, str], torch.dtype],
    key: tuple[nn.Module, str],
) -> torch.Tensor:
    """``saved`` in the dtype its buffer had before :func:`cast_buffers`."""
    return saved.to(original.get(key, saved.dtype))
