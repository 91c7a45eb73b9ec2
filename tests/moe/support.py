"""A mixture of experts of odd sizes, dense on one process or with its experts spread over ranks.

The dense form holds every expert.  The spread form is the same module with other ranks' experts left out, named by
their global number; its tokens travel by an all-to-all that autograd knows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import CustomPolicy
from tests.support.oracles import mean_grads

DIM, EXPERTS = 5, 4


class AllToAll(torch.autograd.Function):
    """``[ranks, ...]``: row r goes to rank r of the group; so do gradients, back."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        received = torch.empty(x.shape, dtype=x.dtype)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        received = torch.empty(grad.shape, dtype=grad.dtype)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return None, received


class Expert(nn.Module):
    """``[n, DIM]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM, bias=False)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """The experts of this rank; every token visits every expert, weighted, so that no gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleDict({str(number): Expert() for number in range(EXPERTS)})
        self.group: Any = None

    def keep(self, numbers: range, group: Any) -> None:
        """Drop all experts but ``numbers``; the ranks of ``group`` together have all."""
        for number in set(range(EXPERTS)) - set(numbers):
            del self.each[str(number)]
        self.group = group

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """``[n, DIM]`` tokens and ``[n, EXPERTS]`` weights."""
        if self.group is None:
            return self._own(x, gates)
        ranks = self.group.size()
        tokens, weights = (
            AllToAll.apply(self.group, t.expand(ranks, *t.shape)).flatten(0, 1) for t in (x, gates)
        )
        mine = self._own(tokens, weights).unflatten(0, (ranks, len(x)))
        return AllToAll.apply(self.group, mine).sum(0)

    def _own(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return sum(gates[:, int(number), None] * expert(x) for number, expert in self.each.items())


class Block(nn.Module):
    """Router, experts, and a dense layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.shared = nn.Linear(DIM, DIM)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(self.router(x), -1)
        return x + self.shared(x) + self.experts(x, gates)


class Moe(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build(seed: int = 0) -> Moe:
    """The dense model, the same everywhere."""
    torch.manual_seed(seed)
    return Moe()


def data(rank: int, step: int = 0) -> torch.Tensor:
    """One rank's rows at one step."""
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Scalar loss of one rank's rows."""
    return model(data(rank, step)).square().mean()


@dataclass(frozen=True)
class Place:
    """Where a rank is: experts spread over ``across``, each expert's copies over ``along``."""

    across: Any
    along: Any
    numbers: range


def place(expert_ranks: int) -> Place:
    """Divide the world into rows of ``expert_ranks`` neighbours that hold all experts together.

    Collective: every rank.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [
        dist.new_group(range(start, start + expert_ranks))
        for start in range(0, world, expert_ranks)
    ]
    columns = [dist.new_group(range(offset, world, expert_ranks)) for offset in range(expert_ranks)]
    each = EXPERTS // expert_ranks
    mine = rank % expert_ranks
    numbers = range(mine * each, (mine + 1) * each)
    return Place(rows[rank // expert_ranks], columns[mine], numbers)


def spread(model: Moe, where: Place) -> Moe:
    """``model`` with this rank's experts only; changed in place."""
    for block in model.blocks:
        block.experts.keep(where.numbers, where.across)
    return model


def wrap(
    model: Moe,
    where: Place,
    *,
    strategy: str = "FULL_SHARD",
    divisor: float | None = -1,
    **kwargs: Any,
) -> FSDP:
    """Experts over their own ranks, everything else over all."""
    world = float(dist.get_world_size())
    options = {
        "process_group": where.along,
        "sharding_strategy": ShardingStrategy[strategy],
        "gradient_divisor": world if divisor == -1 else divisor,
    }

    def choose(module: nn.Module) -> Any:
        return options if isinstance(module, Expert) else isinstance(module, Block)

    return FSDP(model, auto_wrap_policy=CustomPolicy(choose), **kwargs)


def dense_mean(world: int, step: int = 0, model: Moe | None = None) -> dict[str, Any]:
    """The dense model's gradients of the mean loss of all ranks."""
    return mean_grads(
        copy.deepcopy(model) if model is not None else build(),
        lambda m, rank: loss_of(m, rank, step).backward(),
        range(world),
    )
