"""Optimizers and what they need: ZeroRedundancyOptimizer and its hooks, clipping, loss scaling."""

from __future__ import annotations

from .overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from .reduce_scatter_hook import reduce_scatter_hook
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
]
