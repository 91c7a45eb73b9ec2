"""The dense one-process model, trained on the batches of all ranks: it cannot share a bug with the wrapper."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.models import ENTRIES, Entry

__all__ = [
    "Case",
    "Recipe",
    "Trajectory",
    "WRAPPINGS",
    "full_grads",
    "full_params",
    "make_optimizer",
    "mean_grads",
    "train_cases",
    "train_dense",
    "train_wrapped",
    "wrap_entry",
]

WRAPPINGS = ("root", "blocks", "size")


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: Optimizer steps.
        clip: Bound of the gradient norm, or None; small enough to bite.
        norm_type: Order of that norm.
        micro_batches: Backwards a step; all but the last inside ``no_sync``.
    """

    steps: int = 4
    clip: float | None = None
    norm_type: float = 2.0
    micro_batches: int = 1


@dataclass(frozen=True)
class Case:
    """A model, a wrapping and a recipe."""

    entry: str
    strategy: str = "FULL_SHARD"
    wrapping: str = "blocks"
    use_orig_params: bool = False
    recipe: Recipe = Recipe()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        exposure = "orig" if self.use_orig_params else "flat"
        parts = [self.entry, self.strategy, self.wrapping, exposure]
        if self.recipe.clip is not None:
            parts.append(f"clip{self.recipe.norm_type:g}")
        if self.recipe.micro_batches > 1:
            parts.append(f"k{self.recipe.micro_batches}")
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.kwargs)])


@dataclass
class Trajectory:
    """What training leaves.

    Attributes:
        params: Every parameter by FQN, tied ones under each name, as in a state dict without buffers.
        losses: Mean loss over ranks, a step.
        norms: Norm of the whole gradient before clipping, a step; empty without clipping.
        error: Traceback, if it did not get through.
    """

    params: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    error: str = ""


def make_optimizer(item: Entry, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, or plain SGD where zeros and None must be alike."""
    params = [param for param in model.parameters() if param.requires_grad]
    if item.skips_parameters:
        return torch.optim.SGD(params, lr=0.05)
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@functools.cache
def train_dense(name: str, world_size: int, recipe: Recipe) -> Trajectory:
    """Train the plain model on the mean of the losses of ``world_size`` ranks."""
    item = ENTRIES[name]
    model = item.build()
    optimizer = make_optimizer(item, model)
    result = Trajectory()
    for step in range(recipe.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(recipe.micro_batches):
            for rank in range(world_size):
                batch = item.make_batch(rank, step * recipe.micro_batches + micro)
                loss = item.loss(model, batch) / (world_size * recipe.micro_batches)
                loss.backward()
                total += loss.item()
        if recipe.clip is not None:
            # torch's own function fails on the infinity norm of an empty tensor.
            params = [param for param in model.parameters() if param.numel()]
            norm = nn.utils.clip_grad_norm_(params, recipe.clip, recipe.norm_type)
            result.norms.append(norm.item())
        optimizer.step()
        result.losses.append(total)
    result.params = _params(model, model.state_dict())
    return result


def train_wrapped(case: Case) -> Trajectory:
    """Train the wrapped model on this rank's batches.  Collective: every rank."""
    item, recipe = ENTRIES[case.entry], case.recipe
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = item.build()
    names = _params(plain, plain.state_dict())
    model = wrap_entry(
        item,
        plain,
        case.wrapping,
        sharding_strategy=ShardingStrategy[case.strategy],
        use_orig_params=case.use_orig_params,
        **dict(case.kwargs),
    )
    optimizer = make_optimizer(item, model)
    result = Trajectory()
    for step in range(recipe.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(recipe.micro_batches):
            batch = item.make_batch(rank, step * recipe.micro_batches + micro)
            if micro < recipe.micro_batches - 1:
                with model.no_sync():
                    loss = item.loss(model, batch) / recipe.micro_batches
                    loss.backward()
            else:
                loss = item.loss(model, batch) / recipe.micro_batches
                loss.backward()
            total += loss.detach()
        if recipe.clip is not None:
            norm = model.clip_grad_norm_(recipe.clip, recipe.norm_type)
            result.norms.append(norm.item())
        optimizer.step()
        dist.all_reduce(total)
        result.losses.append(total.item() / world_size)
    state = model.state_dict()
    result.params = {name: state[name] for name in names}
    return result


def train_cases(cases: Sequence[Case]) -> dict[Case, Trajectory]:
    """Train several cases one after the other; one that raises does not stop the others.  Collective: every rank."""
    results = {}
    for case in cases:
        print("training", case, flush=True)  # a hang shows which one it was
        try:
            results[case] = train_wrapped(case)
        except Exception:  # noqa: BLE001 - the message belongs to the case's own test
            results[case] = Trajectory(error=traceback.format_exc())
    return results


def wrap_entry(item: Entry, model: nn.Module, wrapping: str = "blocks", **kwargs: Any) -> FSDP:
    """Wrap ``model`` as one unit, by its block classes, or by size."""
    policies: dict[str, Any] = {
        "root": None,
        "blocks": ModuleWrapPolicy(item.blocks),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=item.min_num_params),
    }
    return FSDP(model, auto_wrap_policy=policies[wrapping], **kwargs)


def mean_grads(
    model: nn.Module, script: Callable[[nn.Module, int], Any], ranks: Sequence[int]
) -> dict[str, torch.Tensor | None]:
    """Mean over ``ranks`` of the gradients that ``script(copy, rank)`` leaves on dense copies of ``model``."""
    total: dict[str, torch.Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for rank in ranks:
        replica = copy.deepcopy(model)
        script(replica, rank)
        for name, param in replica.named_parameters():
            if param.grad is not None:
                part = param.grad / len(ranks)
                before = total[name]
                total[name] = part if before is None else before + part
    return total


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gathered gradient of every parameter.  Collective: every rank."""
    with FSDP.summon_full_params(model, with_grads=True):
        return {
            name: None if param.grad is None else param.grad.clone()
            for name, param in model.named_parameters()
        }


def full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gathered value of every parameter.  Collective: every rank."""
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def _params(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters among the entries of a state dict, tied ones under each name."""
    buffers = {name for name, _ in model.named_buffers()}
    return {name: value for name, value in state.items() if name not in buffers}
