"""Optimizer state of experts that other ranks hold (see :mod:`fsdp.state.elsewhere`): completed, and left out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from ..names import clean_tensor_name
from ..runtime.spread import tell_tree
from .elsewhere import Elsewhere, completed, merged_order
from .optim_view import copy_of

__all__ = ["completed_optim_state", "scalars_of_all", "without_elsewhere"]


def completed_optim_state(
    saved: dict[str, Any], elsewhere: Elsewhere, *, whole: bool, keep: bool, to_cpu: bool
) -> dict[str, Any]:
    """``saved``, the canonical state of what this rank holds, with groups that name every parameter of the model.

    Collective: every rank of the tree.

    Args:
        saved: This rank's; on ranks that keep nothing, the experts it is the first to hold.
        elsewhere: What other ranks hold.
        whole: Whether state is whole, so that other ranks' is added too; slices stay with the ranks that have them.
        keep: Whether this rank keeps the result.
        to_cpu: Whether tensors go to the CPU.

    Raises:
        CheckpointError: If ranks have different numbers of parameter groups.
    """
    told = tell_tree(elsewhere.tree, ([group["params"] for group in saved["param_groups"]], keep))
    counts = {len(names) for names, _ in told}
    if len(counts) > 1:
        raise CheckpointError(
            f"ranks have different numbers of optimizer groups, {sorted(counts)}: build the optimizer with the same "
            "groups on every rank, empty ones included."
        )
    state = saved["state"]
    if whole:
        scalars = scalars_of_all(state, elsewhere)
        mine = {
            (fqn, name): value
            for fqn in elsewhere.here & set(state)
            for name, value in state[fqn].items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        to_all = any(keeps for _, keeps in told[1:])
        found = completed(dict(sorted(mine.items())), elsewhere.tree, to_all=to_all)
        state = {**state, **{fqn: dict(values) for fqn, values in scalars.items()}}
        for (fqn, name), value in found.items():
            state.setdefault(fqn, {})[name] = value.cpu() if to_cpu else value
    groups = [
        {**group, "params": merged_order([names[number] for names, _ in told])}
        for number, group in enumerate(saved["param_groups"])
    ]
    return {"state": elsewhere.in_order(state), "param_groups": groups} if keep else {}


def scalars_of_all(
    state: Mapping[str, Mapping[str, Any]], elsewhere: Elsewhere
) -> dict[str, dict[str, Any]]:
    """What the experts of other ranks have that is no sharded tensor: step counts, say.

    Collective: every rank of the tree.
    """
    mine = {
        fqn: {
            name: copy_of(value.cpu()) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
            if not (isinstance(value, torch.Tensor) and value.dim())
        }
        for fqn, values in state.items()
        if fqn in elsewhere.here
    }
    told = tell_tree(elsewhere.tree, mine)
    return {
        fqn: values
        for theirs in reversed(told)
        for fqn, values in theirs.items()
        if fqn not in state
    }


def without_elsewhere(saved: Any, elsewhere: Elsewhere) -> Any:
    """A canonical state without what only other ranks hold.  Collective: none; ``saved`` is not changed."""
    if not isinstance(saved, Mapping) or "state" not in saved:
        return saved

    def is_here(key: Any) -> bool:
        return not isinstance(key, str) or clean_tensor_name(key) not in elsewhere.others

    left = {**saved, "state": {key: kept for key, kept in saved["state"].items() if is_here(key)}}
    if "param_groups" in saved:
        left["param_groups"] = [
            {**group, "params": [key for key in group["params"] if is_here(key)]}
            for group in saved["param_groups"]
        ]
    return left
