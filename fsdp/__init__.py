"""Fully sharded data parallel training on torch.distributed."""

from __future__ import annotations

from .config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .errors import FsdpError, FsdpWarning
from .flat.parameter import FlatParameter
from .names import clean_tensor_name
from .optim import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from .optim.clip import clip_grad_norm_
from .optim.ema import ShardedEMA
from .optim.groups import split_decay_groups
from .wrapper import FullyShardedDataParallel

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FsdpError",
    "FsdpWarning",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedEMA",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "ZeroRedundancyOptimizer",
    "clean_tensor_name",
    "clip_grad_norm_",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "split_decay_groups",
]
