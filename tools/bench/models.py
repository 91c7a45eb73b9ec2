"""Models that the benchmarks train: a byte-level GPT and a Llama-like stack, built from their sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Block", "Llama", "LlamaBlock", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch.

    Attributes:
        blocks: How many repeated blocks: the units that are wrapped, besides the root.
        dim: Width.
        heads: Attention heads; divides ``dim``.
        vocabulary: Number of tokens.
        batch: Sequences a rank sees in a step.
        sequence: Tokens of a sequence.
        linears: Further (dim, dim) layers in each block: more parameters per unit.
        hidden: Width of a Llama block's MLP; 0 for four times ``dim``.
    """

    blocks: int
    dim: int
    heads: int
    vocabulary: int = 256
    batch: int = 1
    sequence: int = 4
    linears: int = 0
    hidden: int = 0

    def tokens(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (batch, sequence), int64, drawn with ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.vocabulary, (self.batch, self.sequence + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Block(nn.Module):
    """A pre-norm transformer block with 12 parameters of 12 dim^2 + 13 dim elements in all."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.out = nn.Linear(shape.dim, shape.dim)
        self.norm2 = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)
        self.extra = nn.ModuleList(nn.Linear(shape.dim, shape.dim) for _ in range(shape.linears))

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, dim)
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        for linear in self.extra:
            x = x + linear(x)
        return x


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and an untied head; returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Parameter(torch.zeros(shape.sequence, shape.dim))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both (batch, sequence)
        x = self.tokens(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    """RMS norms, rotary attention without biases, a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden or 4 * shape.dim
        self.heads = shape.heads
        self.norm1 = nn.RMSNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.norm2 = nn.RMSNorm(shape.dim)
        self.gate = nn.Linear(shape.dim, hidden, bias=False)
        self.up = nn.Linear(shape.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.dim, bias=False)

    def forward(
        self, x: Tensor, turn: Tensor
    ) -> Tensor:  # (batch, sequence, dim), (2, sequence, head / 2)
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(
            rotate(query, turn), rotate(key, turn), value, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        mlp: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + mlp


class Llama(nn.Module):
    """Embedding, Llama blocks, norm and head; returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        half = shape.dim // shape.heads // 2
        angles = torch.outer(
            torch.arange(shape.sequence, dtype=torch.float32),
            10000.0 ** (-torch.arange(half, dtype=torch.float32) / half),
        )
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both (batch, sequence)
        x = self.tokens(inputs)
        turn = self.turn.to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair of features of ``x`` (batch, heads, sequence, head) by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = turn.to(x.dtype).unbind(0)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
