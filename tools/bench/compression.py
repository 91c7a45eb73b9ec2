"""A training step with rounded communication, beside exact communication and a bfloat16 hook.

Square linear layers with tanh, a unit each, float32, AdamW; the target is a fixed network of the same shape, so that
losses can be compared.  Ranks of one host would exchange exact values through shared memory, so switch that off; for a
slow link run it in a network of its own (root)::

    unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 100ms &&
        FSDP_SHARED_MEMORY=0 GLOO_SOCKET_IFNAME=lo python -m tools.bench compression'
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import world
from .report import Report, Table
from .stats import summarize
from .zero import bytes_sent

__all__ = ["CONTENDERS", "add_arguments", "measure", "run"]

EXACT, HOOK = "exact", "bf16_compress_hook"
_COMPRESSIONS: dict[str, dict[str, Any]] = {
    "weights bfloat16": {"weights": "bfloat16", "gradients": None},
    "weights bfloat16, gradients bfloat16": {"weights": "bfloat16", "gradients": "bfloat16"},
    "weights int8": {"gradients": None},
    "weights int8, gradients int8": {},
    "weights int8, gradients int4": {"gradients": "int4"},
    "the same, error feedback": {"gradients": "int4", "error_feedback": True},
}
CONTENDERS = (EXACT, HOOK, *_COMPRESSIONS)
_FULL: dict[str, Any] = {"layers": 8, "dim": 768, "rounds": 20}
_QUICK: dict[str, Any] = {"layers": 2, "dim": 64, "rounds": 3}
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``compression``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")


def run(arguments: argparse.Namespace) -> Report:
    """One fresh world for all contenders."""
    sizes = _QUICK if arguments.quick else _FULL
    ranks = world.run_gloo(measure, arguments.world, seed=arguments.seed, **sizes)
    rows = []
    for name in CONTENDERS:
        seconds = [
            max(parts) for parts in zip(*(rank[name]["step"] for rank in ranks), strict=True)
        ]
        times = summarize(seconds)
        sent = sum(rank[name]["sent"] for rank in ranks) / _MIB
        exact = sum(rank[EXACT]["sent"] for rank in ranks) / _MIB
        quartiles = f"{1e3 * times.median:.0f} [{1e3 * times.lower:.0f} {1e3 * times.upper:.0f}]"
        loss = sum(rank[name]["loss"] for rank in ranks) / len(ranks)
        rows.append((name, quartiles, f"{sent:.1f}", f"{sent / exact:.2f}", f"{loss:.2e}"))
    columns = ("communication", "step, ms", "sent, MiB", "/ exact", "loss at the end")
    return Report(
        "compression",
        {"world_size": arguments.world, **sizes},
        arguments.seed,
        (Table(f"{arguments.world} ranks, gloo", columns, tuple(rows)),),
        {"ranks": ranks},
        notes=("Times are those of the slowest rank: median [quartiles] of steps in turns.",),
    )


def measure(*, layers: int, dim: int, rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """This rank's seconds of each step, bytes sent by one, and the last loss, by contender.

    Collective: call on all ranks.
    """
    steps = {name: _make(name, layers, dim, seed) for name in CONTENDERS}
    samples: dict[str, dict[str, Any]] = {name: {"step": []} for name in CONTENDERS}
    order = list(CONTENDERS)
    shuffle = random.Random(seed)
    for name in CONTENDERS:
        before = bytes_sent()
        steps[name]()
        dist.barrier()
        samples[name]["sent"] = bytes_sent() - before
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            samples[name]["loss"] = steps[name]()
            samples[name]["step"].append(time.perf_counter() - start)
    return samples


def _make(name: str, layers: int, dim: int, seed: int) -> Callable[[], float]:
    """The training step of one contender; returns its loss."""
    from fsdp import FullyShardedDataParallel as FSDP
    from fsdp.comm.compression import Compression
    from fsdp.comm.hooks import LowPrecisionState, bf16_compress_hook
    from fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    target, model = _network(layers, dim), _network(layers, dim)
    batch = torch.randn(64, dim, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        wanted = target(batch)
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    if name == HOOK:
        wrapped.register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    elif name != EXACT:
        wrapped.compress_communication(Compression(**_COMPRESSIONS[name]))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = (wrapped(batch) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _network(layers: int, dim: int) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(dim, dim, bias=False), nn.Tanh()]
    return nn.Sequential(*blocks)
