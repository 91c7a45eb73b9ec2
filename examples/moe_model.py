"""A small byte-level mixture of experts that may leave experts to other processes: tokens travel, experts stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_model import VOCABULARY, rotate
from torch import nn


@dataclass(frozen=True)
class Place:
    """Where this process is: with whom it exchanges tokens, who holds the same experts, and which these are."""

    row: Any
    column: Any
    experts: range


class Exchange(torch.autograd.Function):
    """``[n, dim]`` rows to other processes, ``send[p]`` to process p of the group; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list, receive: list, group: Any) -> torch.Tensor:
        """``receive[p]`` rows come from process p."""
        ctx.plan = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The same with both sides changed."""
        send, receive, group = ctx.plan
        return Exchange.apply(grad, receive, send, group), None, None, None


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, dim]`` to the same, also for n = 0: an expert without tokens still takes part."""
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """One expert that every token visits, and two of the others, which a router chooses."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.shared = Expert(dim)
        # By global number: the name of a parameter means the same one on every process.
        self.experts = nn.ModuleDict({str(number): Expert(dim) for number in range(experts)})
        self.group: Any = None

    def keep(self, where: Place) -> None:
        """Leave the other processes' experts to them."""
        for number in set(range(len(self.experts))) - set(where.experts):
            del self.experts[str(number)]
        self.group = where.row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        tokens = x.flatten(0, 1)  # [n, dim]
        weights, chosen = torch.softmax(self.router(tokens).float(), -1).topk(2)  # [n, 2] each
        order = chosen.flatten().argsort(stable=True)  # [2 n]: places, by expert
        counts = chosen.flatten().bincount(minlength=self.router.out_features)  # [experts]
        outputs = self.visit(tokens[order // 2], counts)
        weighted = outputs * weights.flatten()[order, None].to(outputs.dtype)
        routed = torch.zeros_like(tokens).index_add(0, order // 2, weighted.to(tokens.dtype))
        return (self.shared(tokens) + routed).view_as(x)

    def visit(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``[n, dim]`` tokens, ``counts[e]`` for each expert e in turn, through their experts."""
        ranks = self.group.size()
        coming = torch.empty_like(
            counts
        )  # [ranks * experts here]: from each process for each of ours
        dist.all_to_all_single(coming, counts, group=self.group)
        send, receive = (c.view(ranks, -1).sum(1).tolist() for c in (counts, coming))
        here = Exchange.apply(tokens, send, receive, self.group)
        parts = here.split(coming.tolist())  # process by process, expert by expert
        each = len(self.experts)
        done: list[tuple[torch.Tensor, ...]] = []
        for index, expert in enumerate(self.experts.values()):
            mine = parts[index::each]
            done.append(expert(torch.cat(mine)).split([len(part) for part in mine]))
        back = torch.cat([done[index][rank] for rank in range(ranks) for index in range(each)])
        return Exchange.apply(back, receive, send, self.group)


class Block(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mixture = Mixture(dim, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, dim: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` bytes to ``[batch, length, 256]`` logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
