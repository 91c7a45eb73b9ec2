"""Optimizers and what they need: whole parameters, steps in the backward, states on a disk, ZeRO-1, loss scaling."""

from __future__ import annotations

from .in_backward import OptimizerInBackward, apply_optimizer_in_backward
from .overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from .paged import PagedOptimizer
from .reduce_scatter_hook import reduce_scatter_hook
from .whole_param import WholeParamOptimizer
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "OptimizerInBackward",
    "PagedOptimizer",
    "WholeParamOptimizer",
    "ZeroRedundancyOptimizer",
    "apply_optimizer_in_backward",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
]
