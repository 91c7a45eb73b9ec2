"""Ways to have an optimizer step other parameters, or with other gradients, than those it holds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["and_then", "lent_grads", "narrowed"]


def and_then(closure: Callable[[], Any], finish: Callable[[], None]) -> Callable[[], Any]:
    """``closure``, followed by ``finish``; returns the closure's loss."""

    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        finish()
        return loss

    return run


@contextlib.contextmanager
def lent_grads(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """Give parameters other gradients for a while."""
    before = [param.grad for param in params]
    try:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextlib.contextmanager
def narrowed(optim: Optimizer, chosen: set[torch.Tensor]) -> Iterator[None]:
    """Let an optimizer see only some of its parameters: any optimizer then steps just these, in its own way."""
    before = [group["params"] for group in optim.param_groups]
    try:
        for group, params in zip(optim.param_groups, before, strict=True):
            group["params"] = [param for param in params if param in chosen]
        yield
    finally:
        for group, params in zip(optim.param_groups, before, strict=True):
            group["params"] = params
