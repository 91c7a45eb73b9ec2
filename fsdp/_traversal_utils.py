"""Walks over wrappers and handles, under the path that tools import them from."""

from __future__ import annotations

from torch import nn

from .flat.handle import FlatParamHandle
from .wrapper import FullyShardedDataParallel

__all__ = ["_get_fsdp_handles", "_get_fsdp_states"]


def _get_fsdp_states(module: nn.Module) -> list[FullyShardedDataParallel]:
    """Every wrapper in ``module``, itself included."""
    return FullyShardedDataParallel.fsdp_modules(module)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Every handle of every wrapper in ``module``."""
    return [handle for wrapper in _get_fsdp_states(module) for handle in wrapper._handles]  # noqa: SLF001
