"""An optimizer's own state dict, for the same wrapping and world size: copied, checked, never communicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, describe
from .optim_view import copy_of

__all__ = ["local_optim_state", "local_optim_state_to_load"]


def local_optim_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None, *, to_cpu: bool
) -> dict[str, Any]:
    """The optimizer's own state dict, sharing no memory with it.  Collective: none."""
    copied = _copied(optimizer.state_dict() if state_dict is None else state_dict)
    if to_cpu:
        for values in copied["state"].values():
            for name, value in values.items():
                values[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return copied


def local_optim_state_to_load(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """``saved`` for ``optimizer.load_state_dict``.

    Collective: none.

    Raises:
        CheckpointError: If it has other groups than the optimizer, or tensors of other shards.
    """
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        raise CheckpointError(
            f"the local optimizer state dict has groups of {sizes} parameters: expected {expected}. Local state dicts "
            "load only at the same world size and wrapping; save a full or sharded one instead."
        )
    keys = [key for group in groups for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in zip(keys, params, strict=True):
        for name, value in saved["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() not in (1, param.numel()):
                raise CheckpointError(
                    describe(
                        f"the local optimizer state {name!r} of parameter {key!r} has {value.numel()} elements: this "
                        f"rank's shard has {param.numel()}",
                        remedy="Local state dicts load only at the same world size and wrapping.",
                    )
                )
    return _copied(saved)


def _copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    state = {
        key: {name: copy_of(value) for name, value in values.items()}
        for key, values in state_dict["state"].items()
    }
    groups = [
        {name: copy_of(value) for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
