"""A small byte-level GPT: nothing in here knows that it will be sharded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # every value of a byte


class Block(nn.Module):
    """Pre-norm causal self-attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is tied to the head."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.5 * dim**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` bytes to ``[batch, length, 256]`` logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of channels of ``[..., length, channels]`` by position, so that attention sees distances."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 100.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def next_byte_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of each next byte of ``[batch, length + 1]``, in nats."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, context: int, device: torch.device) -> str:
    """Continue ``prompt`` by ``length`` bytes.

    Collective if ``model`` is sharded: every process runs the same forwards and draws the same bytes.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)
        weights = torch.softmax(model(window)[0, -1].float() / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(weights.cpu(), 1, generator=generator)))
    model.train()
    return bytes(tokens).decode("utf-8", errors="replace")
