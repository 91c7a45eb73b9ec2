"""One Muon step of a sharded model: at owners, beside gathering whole gradients and stepping on every rank.

Square matrices, float32, gradients in place: the step alone, without forward and backward.  The second contender is
what users write by hand: whole parameters and gradients on every rank, the same optimizer there, own pieces kept.  A
plain step on the unsharded matrices, in every process, shows what the optimizer itself costs.
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

OWNERS, REDUNDANT, ALONE = "at owners (ours)", "on every rank", "unsharded"
CONTENDERS = (OWNERS, REDUNDANT, ALONE)
_FULL = {"matrices": 16, "dim": 512, "rounds": 7}
_QUICK = {"matrices": 8, "dim": 128, "rounds": 3}
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``whole_param``."""
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
        state = max(rank[name]["state"] for rank in ranks) / _MIB
        quartiles = f"{1e3 * times.median:.1f} [{1e3 * times.lower:.1f} {1e3 * times.upper:.1f}]"
        rows.append((name, quartiles, f"{sent:.1f}", f"{state:.1f}"))
    columns = ("Muon step", "ms", "sent, MiB", "state of a rank, MiB")
    total = 4 * sizes["matrices"] * sizes["dim"] ** 2 / _MIB
    return Report(
        "whole_param",
        {"world_size": arguments.world, **sizes},
        arguments.seed,
        (Table(f"{arguments.world} ranks, gloo", columns, tuple(rows)),),
        {"ranks": ranks},
        notes=(
            f"Parameters: {total:.0f} MiB.  Times are those of the slowest rank: median [quartiles] of rounds.",
        ),
    )


def measure(*, matrices: int, dim: int, rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """This rank's seconds of each step, bytes sent by one, and bytes of state, by contender.

    Collective: call on all ranks.
    """
    steps = {name: _make(name, matrices, dim, seed) for name in CONTENDERS}
    samples: dict[str, dict[str, Any]] = {name: {"step": []} for name in CONTENDERS}
    order = list(CONTENDERS)
    shuffle = random.Random(seed)
    for step, _ in steps.values():
        step()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            steps[name][0]()
            samples[name]["step"].append(time.perf_counter() - start)
    for name, (step, state_of) in steps.items():
        before = bytes_sent()
        step()
        dist.barrier()
        samples[name]["sent"] = bytes_sent() - before
        samples[name]["state"] = state_of()
    return samples


def _make(
    name: str, matrices: int, dim: int, seed: int
) -> tuple[Callable[[], object], Callable[[], int]]:
    """The step of one contender, and what tells the bytes of its state."""
    from fsdp import FullyShardedDataParallel as FSDP
    from fsdp.optim import WholeParamOptimizer
    from fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(matrices)))
    if name != ALONE:
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    if name == OWNERS:
        optimizer = WholeParamOptimizer(model, torch.optim.Muon)
        return optimizer.step, lambda: _nbytes(optimizer.state_by_name().values())
    with FSDP.summon_full_params(model):  # Muon looks at shapes when it is built
        muon = torch.optim.Muon(model.parameters())

    def on_every_rank() -> None:
        with FSDP.summon_full_params(model, with_grads=True):
            muon.step()

    step = muon.step if name == ALONE else on_every_rank
    return step, lambda: _nbytes(muon.state.values())


def _nbytes(states: Any) -> int:
    return sum(
        value.nbytes
        for values in states
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
