"""Names that accelerate and torch.distributed.checkpoint import from here."""

from __future__ import annotations

from torch import nn

from .config import TrainingState
from .names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name
from .wrapper import FullyShardedDataParallel

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "TrainingState",
    "_get_module_fsdp_state",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "clean_tensor_name",
]


def _get_module_fsdp_state(module: nn.Module) -> FullyShardedDataParallel | None:
    """``module`` if it is a wrapper, which holds its own state.  Collective: none."""
    return module if isinstance(module, FullyShardedDataParallel) else None


_get_module_fsdp_state_if_fully_sharded_module = _get_module_fsdp_state
