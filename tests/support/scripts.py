"""Run the same script of forwards and backwards on the dense model and on the wrapped one, and compare gradients.

Oracle: one dense copy a rank, each run on that rank's data; the mean of their gradients is what the wrapped model's
gathered gradient must be.  A script sees a model and a rank and may do anything a user could.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy

Script = Callable[[nn.Module, int], Any]


class Block(nn.Module):
    """A residual block of odd sizes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two linear layers that belong to the root unit."""

    def __init__(self, dim: int = 7, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.out = nn.Linear(dim, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(x))


def batch(rank: int, step: int = 0, rows: int = 4) -> torch.Tensor:
    """Input of one rank, a pure function of rank and step."""
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


def build(cls: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """The same model on every rank."""
    # Of the CPU alone: torch.manual_seed notes a stack for each absent kind of device, for which it reads source files.
    torch.default_generator.manual_seed(seed)
    return cls()


def wrap(model: nn.Module, classes: set[type[nn.Module]] | None = None, **kwargs: Any) -> FSDP:
    """Wrap the blocks and the root."""
    policy = ModuleWrapPolicy(classes if classes is not None else {Block})
    return FSDP(model, auto_wrap_policy=policy, **kwargs)


def dense_grads(
    model: nn.Module, script: Script, world_size: int
) -> dict[str, torch.Tensor | None]:
    """Mean over ranks of the gradients the script leaves on a dense copy; None where no rank has one."""
    total: dict[str, torch.Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for rank in range(world_size):
        replica = copy.deepcopy(model)
        script(replica, rank)
        for name, param in replica.named_parameters():
            if param.grad is not None:
                part = param.grad / world_size
                before = total[name]
                total[name] = part if before is None else before + part
    return total


def full_grads(model: FSDP) -> dict[str, torch.Tensor | None]:
    """The gathered gradient of every parameter."""
    with FSDP.summon_full_params(model, with_grads=True):
        return {
            name: None if param.grad is None else param.grad.clone()
            for name, param in model.named_parameters()
        }


def assert_same_gradients(
    expected: dict[str, torch.Tensor | None],
    actual: dict[str, torch.Tensor | None],
    *,
    none_is_zero: bool,
) -> None:
    """Equal names, equal values within a few roundings, and None only where nothing was computed."""
    assert list(expected) == list(actual)
    for name, want in expected.items():
        got = actual[name]
        if want is None:
            assert got is None or (none_is_zero and not got.any()), (
                f"{name}: expected no gradient, got {got}"
            )
            continue
        assert got is not None, f"{name}: no gradient"
        torch.testing.assert_close(
            got, want, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_script(
    script: Script, cls: Callable[[], nn.Module] = Net, classes: Any = None, **kwargs: Any
) -> None:
    """On this rank of a world: the wrapped model's gradients equal the oracle's, for both exposures."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = dense_grads(build(cls), script, world_size)
    for use_orig_params in (False, True):
        model = wrap(build(cls), classes, use_orig_params=use_orig_params, **kwargs)
        script(model, rank)
        assert_same_gradients(expected, full_grads(model), none_is_zero=not use_orig_params)
