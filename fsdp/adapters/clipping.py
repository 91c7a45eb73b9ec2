"""``torch.nn.utils.clip_grad_norm_`` would take the norm of one rank's pieces, and every rank scale by another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import torch

from .imports import replace_named

__all__ = ["Clip", "teach_clipping"]

Clip = Callable[..., torch.Tensor | None]
"""Clips parameters of which ranks have pieces, as :func:`fsdp.clip_grad_norm_`; None if there are none."""


def teach_clipping(module: ModuleType, clip: Clip) -> None:
    """Let ``clip`` have what it takes.  Collective: none; calls with pieces are."""
    asked = module.clip_grad_norm_

    @functools.wraps(asked)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        foreach: bool | None = None,  # noqa: FBT001
    ) -> torch.Tensor:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = clip(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if norm is None:
            is_used_up = isinstance(parameters, Iterator) and params
            again = params if is_used_up else parameters
            norm = asked(again, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm

    replace_named(module, "clip_grad_norm_", clip_grad_norm_)
