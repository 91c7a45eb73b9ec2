"""What users change in units that a rank gathers for others without running them is taken over there, too."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_kept_ranks

WIDTH = 5


class Branches(nn.Module):
    """One branch a rank."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Conv1d(1, 1, 1)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def forward(self, x, which):
        return torch.tanh(self.branches[which](self.inp(x.unsqueeze(1))))


def new_values(model):
    for param in model.parameters():
        param.data = param.data * 0.5


def written(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def frozen(model):
    model.requires_grad_(requires_grad=False)


def thawed(model):
    model.requires_grad_(requires_grad=True)


PROGRAM = (new_values, frozen, thawed, written, frozen, new_values, thawed)


def run(model, ranks, number):
    """Losses, and the sum of the gradients of ``ranks``, after each change."""
    found = []
    for turn, change in enumerate(PROGRAM):
        change(model)
        model.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(rank + 7 * turn)
            x = torch.randn(3, WIDTH, generator=generator).requires_grad_()
            loss = model(x, (rank + turn // 2) % number).square().sum()
            loss.backward()
            found.append(loss.detach())
    return found, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def run_wrapped(orig, joined):
    rank, number = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = FSDP(
        Branches(number),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=orig,
        allow_unused=None if joined else "any_rank",
    )
    model.set_gradient_divisor(1.0)
    with Join([model]) if joined else contextlib.nullcontext():
        losses, _ = run(model, [rank], number)
    with FSDP.summon_full_params(model, with_grads=True):
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return losses, grads


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_changes_of_units_that_only_other_ranks_run_are_followed(world_size, orig, joined):
    wanted, grads = run(Branches(world_size), range(world_size), world_size)

    for rank, (losses, found) in enumerate(run_kept_ranks(run_wrapped, world_size, orig, joined)):
        torch.testing.assert_close(losses, wanted[rank::world_size])
        torch.testing.assert_close(found, grads)
