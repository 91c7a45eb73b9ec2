"""Parameters packed into one flat tensor, and tensors looked at as one run of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch

__all__ = ["Packed", "flat_view", "is_dense", "like_storage_of"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as ``[numel]``, in storage order; without a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def like_storage_of(values: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``values``, of ``model``'s shape, as ``[numel]`` in ``model``'s storage order; a view where that is possible."""
    if values.stride() == model.stride() and is_dense(values):
        return flat_view(values)
    # `preserve_format`: the strides of a dense `model`, contiguous for any other.
    ordered = torch.empty_like(model, dtype=values.dtype, device=values.device)
    return flat_view(ordered.copy_(values))


class Packed:
    """Parameters of one dtype and device whose data are views into one flat tensor.

    A parameter that is dense keeps its strides; any other becomes contiguous.

    Attributes:
        flat: ``[sum of numels]``, in the order of ``params``.
        params: The parameters packed.
    """

    __slots__ = ("_views", "flat", "params")

    def __init__(
        self, params: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.params = tuple(params)
        numels = [param.numel() for param in self.params]
        self.flat = torch.empty(sum(numels), dtype=dtype, device=device)
        self._views = [
            _shaped_like(param, part)
            for param, part in zip(self.params, self.flat.split(numels), strict=True)
        ]
        if params:
            _torch.foreach_copy(self._views, [param.data for param in self.params])
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def restore(self) -> None:
        """Copy back and re-point any parameter whose ``.data`` was replaced since."""
        for param, view in zip(self.params, self._views, strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.data)
                param.data = view

    def spans(self) -> list[tuple[int, int]]:
        """Where each parameter lies in ``flat``: half-open, in elements."""
        spans, offset = [], 0
        for param in self.params:
            spans.append((offset, offset + param.numel()))
            offset += param.numel()
        return spans


def _shaped_like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """``part`` with ``param``'s shape, and with its strides if it is dense."""
    if is_dense(param.data):
        return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)
