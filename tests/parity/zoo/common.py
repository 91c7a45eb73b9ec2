"""What the tables of the zoo share: rows, losses and small blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.zoo import ROWS, Architecture, register

__all__ = [
    "DTYPE",
    "Mlp",
    "Seq",
    "SmoothMlp",
    "Stack",
    "add",
    "ids",
    "randn",
    "regression",
    "vectors",
]

DTYPE = torch.float64


def add(name, build, batch, loss, blocks=(), **kwargs):
    """Enter an architecture that is built in any dtype and trained in float64."""
    register(Architecture(name, lambda: build().double(), batch, loss, tuple(blocks), **kwargs))


def randn(generator, *shape):
    return torch.randn(ROWS, *shape, generator=generator, dtype=DTYPE)


def ids(generator, high, *shape):
    return torch.randint(high, (ROWS, *shape), generator=generator)


def vectors(generator, inp=5, out=3):
    return randn(generator, inp), randn(generator, out)


def regression(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


class Mlp(nn.Module):
    """A residual block with a scalar parameter."""

    def __init__(self, dim=7):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.act = nn.PReLU()
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class SmoothMlp(nn.Module):
    """One that has second derivatives."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between two layers of the root."""

    def __init__(self, *blocks, inp=5, dim=7, out=3):
        super().__init__()
        self.inp = nn.Linear(inp, dim)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(dim, out)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Seq(nn.Sequential):
    """A sequence that is a unit."""
