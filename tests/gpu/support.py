"""One model, trained by the wrapper and by hand, on either device; and a GPU whose streams are slow at random."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp.init.build
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.collectives import Gather, Reduce
from fsdp.comm.process_group import NativeCollectives, PointToPointCollectives, StagedCollectives
from fsdp.runtime.held import units_in
from fsdp.runtime.root import Root
from fsdp.runtime.streams import DeviceStreams
from fsdp.wrap import ModuleWrapPolicy

# Test code that needs no streams runs on the CPU as well.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIM = 96
STEPS = 4


class Block(nn.Module):
    """A residual layer with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a head in the root."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def build() -> Model:
    """The same weights every time."""
    torch.manual_seed(0)
    return Model()


def batch(rank: int, step: int, device: str) -> torch.Tensor:
    """``[5, DIM]``, drawn on the CPU: the same on both devices."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, DIM, generator=generator).to(device)


@dataclass(frozen=True)
class Setup:
    """What is trained.

    Attributes:
        orig: ``use_orig_params``.
        strategy: Name of the sharding strategy.
        low_precision: Compute in bf16, reduce in fp32.
        accumulate: Micro batches of a step; all but the last inside ``no_sync``.
        clip: Bound of the gradient norm.
    """

    orig: bool = True
    strategy: str = "FULL_SHARD"
    low_precision: bool = False
    accumulate: int = 1
    clip: float = 0.05


SETUPS = {
    "flat": Setup(orig=False),
    "orig": Setup(),
    "zero2": Setup(strategy="SHARD_GRAD_OP"),
    "no shard": Setup(strategy="NO_SHARD"),
    "hybrid": Setup(strategy="HYBRID_SHARD"),
    "bf16": Setup(low_precision=True),
    "bf16 flat": Setup(orig=False, low_precision=True),
    "accumulating": Setup(accumulate=3),
    "accumulating bf16": Setup(accumulate=2, low_precision=True),
}


def wrap(setup: Setup, device: str) -> FSDP:
    """The model, sharded over the default group."""
    precision = MixedPrecision(torch.bfloat16, torch.float32) if setup.low_precision else None
    return FSDP(
        build(),
        process_group=_shard_and_replicate() if setup.strategy == "HYBRID_SHARD" else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=setup.orig,
        sharding_strategy=ShardingStrategy[setup.strategy],
        mixed_precision=precision,
        device_id=torch.device("cuda", 0) if device == "cuda" else None,
    )


def _shard_and_replicate() -> tuple[Any, Any]:
    """Groups of this rank: neighbours in pairs, and every second rank; of all there are where there are fewer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inside = min(2, size)
    first = rank - rank % inside
    shard = list(range(first, first + inside))
    replicate = list(range(rank % inside, size, inside))
    groups = [dist.new_group(ranks, use_local_synchronization=True) for ranks in (shard, replicate)]
    return groups[0], groups[1]


def root_of(model: FSDP) -> Root:
    """The runtime of a wrapped model."""
    (root,) = {unit.root for unit in units_in(model)}
    return root


def train(model: FSDP, setup: Setup, device: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The whole parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        take_step(model, optimizer, setup, device, step)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def take_step(
    model: FSDP, optimizer: torch.optim.Optimizer, setup: Setup, device: str, step: int
) -> None:
    """Micro batches, clipping, optimizer."""
    rank = dist.get_rank()
    for micro in range(setup.accumulate):
        inputs = batch(rank, 10 * step + micro, device)
        if micro < setup.accumulate - 1:
            with model.no_sync():
                model(inputs).backward()
        else:
            model(inputs).backward()
    model.clip_grad_norm_(setup.clip)
    optimizer.step()
    optimizer.zero_grad()


def train_wrapped(device: str, setup: Setup, over: str) -> dict[str, torch.Tensor]:
    """As one rank: wrap, train.

    ``over`` says how ranks talk: ``"backend"`` by its own collectives, of one rank too; ``"host"`` through host memory,
    wherever tensors are.
    """
    if device == "cuda":
        torch.cuda.set_device(0)
    fsdp.init.build.collectives_for = {"backend": _native, "host": _staged}[over]
    return train(wrap(setup, device), setup, device)


def _native(group: Any, device: torch.device) -> Any:
    if group is None or device.type == "cpu":
        return fsdp.comm.process_group.collectives_for(group, device)
    return NativeCollectives(group, device)


def native_collectives(device: str) -> list[torch.Tensor]:
    """What the backend's collectives of one rank leave behind, each waited on."""
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    group = dist.group.WORLD
    collectives = NativeCollectives(group, on)
    wholes = [torch.arange(4.0, device=on), torch.arange(6, dtype=torch.bfloat16, device=on)]
    gathers = [Gather(whole, [whole]) for whole in wholes]
    collectives.all_gather(gathers[:1]).wait()
    collectives.all_gather(gathers).wait()
    outs = [torch.empty_like(whole) for whole in wholes]
    reduces = [Reduce(whole, [whole], out) for whole, out in zip(wholes, outs, strict=True)]
    collectives.reduce_scatter(reduces[:1]).wait()
    collectives.reduce_scatter(reduces).wait()
    collectives.all_reduce(outs).wait()
    collectives.all_reduce(outs[:1], op="max").wait()
    collectives.broadcast(outs).wait()
    told, heard = wholes[0].view(torch.uint8), torch.zeros(16, dtype=torch.uint8, device=on)
    collectives.exchange([told], [heard]).wait()
    return [*outs, heard.view(torch.float32)]


def _staged(group: Any, device: torch.device) -> Any:
    if group is None or group.size() == 1:
        return fsdp.comm.process_group.Loopback()
    return StagedCollectives(PointToPointCollectives(group))


def train_dense(device: str, setup: Setup, world_size: int) -> dict[str, torch.Tensor]:
    """One process on the whole batch; in low precision a copy computes and fp32 parameters are stepped."""
    master = build().to(device)
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world_size):
            for micro in range(setup.accumulate):
                _add_gradients(master, batch(rank, 10 * step + micro, device), setup, world_size)
        nn.utils.clip_grad_norm_(master.parameters(), setup.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in master.state_dict().items()}


def _add_gradients(master: Model, inputs: torch.Tensor, setup: Setup, world_size: int) -> None:
    computes = copy.deepcopy(master)
    if setup.low_precision:
        computes, inputs = computes.bfloat16(), inputs.bfloat16()
    computes.zero_grad()
    computes(inputs).backward()
    for param, low in zip(master.parameters(), computes.parameters(), strict=True):
        grad = low.grad.float() / world_size
        param.grad = grad if param.grad is None else param.grad + grad


class SlowStreams(DeviceStreams):
    """Keeps the gather, reduce and compute streams busy for random times, so that whatever is not ordered shows."""

    def __init__(self, device: torch.device, spin: Callable[[int], None], seed: int) -> None:
        super().__init__(device)
        self._spin = spin
        self._random = random.Random(seed)

    def run_gather(self, launch: Callable[[], Any]) -> Any:
        self._delay()
        return super().run_gather(self._between(launch))

    def run_reduce(
        self, launch: Callable[[], Any], finish: Callable[[], None], *, apart: bool = False
    ) -> Any:
        self._delay()
        return super().run_reduce(self._between(launch), self._between(finish), apart=apart)

    def released(self) -> None:
        self._delay()
        super().released()

    def _between(self, function: Callable[[], Any]) -> Callable[[], Any]:
        def delayed() -> Any:
            self._delay()
            result = function()
            self._delay()
            return result

        return delayed

    def _delay(self) -> None:
        self._spin(self._random.choice((0, 0, 200_000, 2_000_000)))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An error for whatever makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
