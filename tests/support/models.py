"""Twelve tiny models of odd sizes that divide by nothing, each with its data, its loss and its blocks.

Batches are pure functions of rank and step.  No model has a parameter whose gradient is zero up to rounding (a bias
before a batch norm, a key bias in attention): AdamW would turn the rounding into a full step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ENTRIES", "Entry", "build_gan_pair", "entry"]

VOCABULARY = 13


@dataclass(frozen=True)
class Entry:
    """A model and how to train it.

    Attributes:
        name: Key in :data:`ENTRIES`.
        model: Makes the module; called after the seed is set.
        make_batch: The inputs of one rank at one step.
        loss: Scalar loss of a (wrapped or plain) model on a batch.
        blocks: Classes that become units under ``ModuleWrapPolicy``.
        min_num_params: For ``size_based_auto_wrap_policy``: makes some units and leaves something to the root.
        skips_parameters: Whether a step leaves parameters out; the flat exposure then gives zeros for None, which
            only an optimizer without decay and momentum treats alike.
    """

    name: str
    model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    blocks: frozenset[type[nn.Module]]
    min_num_params: int = 100
    skips_parameters: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        """The model, a pure function of the seed."""
        torch.default_generator.manual_seed(seed)
        return self.model()


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(7919 * (step + 1) + rank)


def _vectors(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = _generator(rank, step)
    return torch.randn(4, 5, generator=rng), torch.randn(4, 3, generator=rng)


def _tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=_generator(rank, step))


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """In the target's dtype: torch 2.11 has no gradient of the loss of a low-precision output and another target."""
    return F.mse_loss(output.to(target.dtype), target)


def _regression(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, target = batch
    return _squared_error(model(x), target)


def _next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class MlpBlock(nn.Module):
    """A residual block, ``[..., dim]`` to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Three blocks between two linear layers that belong to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(MlpBlock(7) for _ in range(3))
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Attention(nn.Module):
    """Causal attention with two heads of three; rotary if given a table ``[length, 3]`` of angles."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        if angles is not None:
            q, k = q * angles[:length].cos(), k * angles[:length].sin()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class GptBlock(nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = MlpBlock(dim)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        return self.mlp(x + self.attn(self.norm(x), angles))


class Gpt(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 6)
        self.pos = nn.Parameter(0.1 * torch.randn(5, 6))
        self.blocks = nn.ModuleList(GptBlock(6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RopeTable(nn.Module):
    """Angles that no checkpoint holds: a non-persistent buffer ``[5, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(5, 3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the angles."""
        steps = torch.arange(1.0, 16.0, device=self.angles.device)
        self.angles.copy_(steps.view(5, 3) / 10)


class RopeGpt(nn.Module):
    """A language model with rotary positions, head not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RopeTable()
        self.emb = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(GptBlock(6) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, self.table.angles)
        return self.head(x)


class ConvBlock(nn.Module):
    """Convolution, batch norm, ReLU-like."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inp, out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions in channels_last with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(1, 3), ConvBlock(3, 5))
        self.out = nn.Linear(5, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.repeat(1, 4).view(-1, 1, 4, 5).contiguous(memory_format=torch.channels_last)
        return self.out(self.blocks(image).square().mean((2, 3)))


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps its weights a second time, in ``_flat_weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(torch.stack([x, x.flip(0), -x], 1))
        return self.out(states[:, -1])


class LoraBlock(nn.Module):
    """Frozen bf16 base, frozen packed uint8 weight, trainable fp32 adapter and norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).bfloat16().requires_grad_(False)
        packed = torch.randint(256, (dim, 3), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.down = nn.Linear(dim, 2, bias=False)
        self.up = nn.Linear(2, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = self.packed.float().mean(1) / 255
        # Computed in float32: a sum rounded differently in the last bit would be another bfloat16 altogether.
        frozen = F.linear(x, self.base.weight.float(), self.base.bias.float()) + offset
        return x + self.norm(frozen + self.up(self.down(x)))


class Lora(nn.Module):
    """Two adapted blocks; the layers around them are trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(LoraBlock(7) for _ in range(2))
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class OddBlock(nn.Module):
    """A scalar, an empty, a one-element and two non-contiguous parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.full((1, 1), 0.3))
        self.transposed = nn.Parameter(torch.randn(dim, dim + 2).t())
        self.strided = nn.Parameter(torch.randn(dim, 2 * (dim + 2))[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.tanh(x @ self.transposed.t()) @ self.strided.t()
        return x + self.scale * mixed + self.one + self.empty.sum()


class Odd(nn.Module):
    """Blocks of odd parameters, and a scalar in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(OddBlock(7) for _ in range(2))
        self.out = nn.Linear(7, 3)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.temperature


class Outer(nn.Module):
    """A block within which another block is a unit of its own, around a layer that others use too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((7,), 0.9))
        self.inner = MlpBlock(7)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.inner(x) * self.scale)


class SharedLayer(nn.Module):
    """Nested units, and one layer that is used three times by two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.shared = MlpBlock(7)
        self.blocks = nn.ModuleList(Outer(self.shared) for _ in range(2))
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Experts(nn.Module):
    """Three experts, of which the step (the same on every rank) chooses one; none for step 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.experts = nn.ModuleList(MlpBlock(7) for _ in range(3))
        self.gate = nn.Linear(7, 1)
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = self.inp(x)
        if choice < len(self.experts):
            x = x + torch.sigmoid(self.gate(x)) * self.experts[choice](x)
        return self.out(x)


def _routed(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    return (*_vectors(rank, step), step % 4)


def _routed_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
    x, target, choice = batch
    return _squared_error(model(x, choice=choice), target)


class Named(NamedTuple):
    """An output with names."""

    hidden: torch.Tensor
    extras: tuple[torch.Tensor, ...]


@dataclass
class Record:
    """An output as Hugging Face models give it."""

    hidden: torch.Tensor
    note: str
    extras: list[torch.Tensor]


class OutputBlock(nn.Module):
    """Returns a dict, a dataclass or a named tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = MlpBlock(7)
        self.side = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        side = self.side(x)
        if self.kind == "dict":
            return {"hidden": hidden, "deep": {"side": [side]}, "count": 3}
        if self.kind == "record":
            return Record(hidden, "note", [side])
        return Named(hidden, (side,))


class Outputs(nn.Module):
    """Blocks that return nested containers; the root returns one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.first = OutputBlock("dict")
        self.second = OutputBlock("record")
        self.third = OutputBlock("named")
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> Record:
        first = self.first(self.inp(x))
        second = self.second(first["hidden"])
        third = self.third(second.hidden)
        sides = [first["deep"]["side"][0], second.extras[0], third.extras[0]]
        return Record(self.out(third.hidden), "root", sides)


def _outputs_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    record = model(batch[0])
    sides = torch.stack([side.square().mean() for side in record.extras]).sum()
    return _squared_error(record.hidden, batch[1]) + sides


class Generator(nn.Module):
    """Noise ``[n, 3]`` to samples ``[n, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 11)
        self.out = nn.Linear(11, 5)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.up(noise)))


class Discriminator(nn.Module):
    """Samples ``[n, 5]`` to logits ``[n, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 9)
        self.out = nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inp(x)))


class Gan(nn.Module):
    """A pair that is used in turns: the discriminator three times, the generator once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        judged = self.discriminator(real), self.discriminator(fake.detach())
        fooled = self.discriminator(fake)
        return (
            F.softplus(-judged[0]).mean()
            + F.softplus(judged[1]).mean()
            + F.softplus(-fooled).mean()
        )


def build_gan_pair(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator, to be wrapped one by one."""
    torch.default_generator.manual_seed(seed)
    return Generator(), Discriminator()


class RootOnly(nn.Module):
    """All parameters sit in the outermost module; its children have none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(11, 5))
        self.bias = nn.Parameter(torch.randn(11))
        self.act = nn.Tanh()
        self.drop = nn.Sequential(nn.Identity(), nn.Dropout(0.0))
        self.head = nn.Parameter(0.3 * torch.randn(3, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.drop(self.act(F.linear(x, self.weight, self.bias))), self.head)


def _entries() -> list[Entry]:
    def vectors(
        name: str, model: Callable[[], nn.Module], *blocks: type[nn.Module], **kwargs: Any
    ) -> Entry:
        settings = {"make_batch": _vectors, "loss": _regression, **kwargs}
        return Entry(name, model, blocks=frozenset(blocks), **settings)

    return [
        vectors("mlp", Mlp, MlpBlock),
        Entry("gpt_tied", Gpt, _tokens, _next_token, frozenset({GptBlock, nn.Embedding})),
        Entry("gpt_rope", RopeGpt, _tokens, _next_token, frozenset({GptBlock})),
        vectors("conv", ConvNet, ConvBlock, min_num_params=30),
        vectors("lstm", Recurrent, nn.LSTM),
        vectors("lora", Lora, LoraBlock),
        vectors("odd", Odd, OddBlock),
        vectors("shared", SharedLayer, Outer, MlpBlock),
        vectors(
            "experts",
            Experts,
            MlpBlock,
            make_batch=_routed,
            loss=_routed_loss,
            skips_parameters=True,
        ),
        vectors("outputs", Outputs, OutputBlock, loss=_outputs_loss),
        vectors(
            "gan",
            Gan,
            Generator,
            Discriminator,
            loss=lambda model, batch: model(batch[0], batch[1]),
            min_num_params=60,
        ),
        vectors("root_only", RootOnly, nn.Sequential),
    ]


ENTRIES: dict[str, Entry] = {item.name: item for item in _entries()}


def entry(name: str) -> Entry:
    """The entry called ``name``."""
    return ENTRIES[name]
