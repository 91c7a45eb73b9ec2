"""One step and one consolidation of ZeroRedundancyOptimizer beside torch's: time and bytes sent, gloo ranks.

200 parameters of 100,000 elements, Adam, gradients in place: the step alone, without a model.  Bytes are those of the
step's exchange; ``backward`` adds DDP's reduction, with our hook where it says so.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import world
from .report import Report, Table
from .stats import ratio, summarize

__all__ = ["CONTENDERS", "add_arguments", "bytes_sent", "measure", "run"]

TORCH = "torch"
# Name -> whose class, and its options.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    TORCH: ("torch", {}),
    "torch, bucket views": ("torch", {"parameters_as_bucket_view": True}),
    "ours": ("ours", {}),
    "ours, bucket views": ("ours", {"parameters_as_bucket_view": True}),
    "ours, by element": ("ours", {"partition": "element"}),
}
BACKWARDS = ("DDP alone", "torch", "ours", "ours, reduce-scatter hook")
_FULL = {"tensors": 200, "numel": 100_000, "rounds": 15, "consolidations": 2}
_QUICK = {"tensors": 40, "numel": 25_000, "rounds": 3, "consolidations": 1}
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``zero``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")


def run(arguments: argparse.Namespace) -> Report:
    """One fresh world for all contenders, and one for the traffic of a whole training step."""
    sizes = _QUICK if arguments.quick else _FULL
    ranks = world.run_gloo(measure, arguments.world, seed=arguments.seed, **sizes)
    traffic = world.run_gloo(
        measure_traffic, arguments.world, tensors=sizes["tensors"] // 10, seed=arguments.seed
    )
    total = 4 * sizes["tensors"] * sizes["numel"]
    return Report(
        "zero",
        {"world_size": arguments.world, **sizes},
        arguments.seed,
        (_times(ranks), _traffic(traffic)),
        {"ranks": ranks, "traffic": traffic},
        notes=(
            f"Parameters: {total / _MIB:.0f} MiB.  Times are those of the slowest rank: median [quartiles] of rounds.",
            "sent: MiB that all ranks together put on the wire.",
        ),
    )


def measure(
    *, tensors: int, numel: int, rounds: int, consolidations: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """This rank's seconds of each step and consolidation, and bytes of one step, by contender.

    Collective: call on all ranks.
    """
    optimizers = {name: _build(name, tensors, numel, seed) for name in CONTENDERS}
    samples: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "consolidate": [], "bytes": [], "bytes_consolidate": []}
        for name in CONTENDERS
    }
    shuffle = random.Random(seed)
    order = list(CONTENDERS)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            optimizers[name].step()
            samples[name]["step"].append(_seconds(optimizers[name].step))
    for name, optimizer in optimizers.items():
        samples[name]["bytes"].append(_bytes(optimizer.step))
        for _ in range(consolidations):
            samples[name]["consolidate"].append(_seconds(optimizer.consolidate_state_dict))
        samples[name]["bytes_consolidate"].append(_bytes(optimizer.consolidate_state_dict))
    return samples


def measure_traffic(*, tensors: int, seed: int) -> dict[str, int]:
    """Bytes that this rank sends in backward and step of a small model, by name in ``BACKWARDS``.

    Collective: call on all ranks.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from fsdp.optim import reduce_scatter_hook

    sent = {}
    for name in BACKWARDS:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(max(tensors, 4))))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        params = list(wrapped.parameters())
        if name == "DDP alone":
            optimizer: Any = torch.optim.Adam(params)
        else:
            optimizer = _class("torch" if name == "torch" else "ours")(params, torch.optim.Adam)
        hook = allreduce_hook
        if name == BACKWARDS[-1]:
            hook = reduce_scatter_hook(wrapped, optimizer)
        wrapped.register_comm_hook(None, hook)

        def step(wrapped=wrapped, optimizer=optimizer) -> None:
            wrapped(torch.ones(1, 300)).sum().backward()
            optimizer.step()

        step()
        step()  # DDP has rebuilt its buckets
        sent[name] = _bytes(step)
    return sent


def bytes_sent() -> int:
    """Bytes that this process's TCP connections have sent (Linux)."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=int(path.name))
        except OSError:
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
        sock.detach()  # the descriptor belongs to gloo
    return total


def _build(name: str, tensors: int, numel: int, seed: int) -> Any:
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(numel)) for _ in range(tensors)]
    whose, options = CONTENDERS[name]
    optimizer = _class(whose)(params, torch.optim.Adam, lr=1e-3, **options)
    _set_grads(params)
    optimizer.step()
    return optimizer


def _class(whose: str) -> Callable[..., Any]:
    if whose == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torch

        return Torch
    from fsdp.optim import ZeroRedundancyOptimizer as Ours

    return Ours


def _set_grads(params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.randn_like(param)


def _seconds(function: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _bytes(function: Callable[[], object]) -> int:
    dist.barrier()
    before = bytes_sent()
    function()
    dist.barrier()
    return bytes_sent() - before


def _times(ranks: list[dict[str, dict[str, list[float]]]]) -> Table:
    slowest = {
        name: {
            what: [
                max(values) for values in zip(*(rank[name][what] for rank in ranks), strict=True)
            ]
            for what in ("step", "consolidate")
        }
        for name in CONTENDERS
    }
    rows = []
    for name in CONTENDERS:
        steps, consolidations = slowest[name]["step"], slowest[name]["consolidate"]
        speed = ratio(slowest[TORCH]["step"], steps)
        sent = sum(rank[name]["bytes"][0] for rank in ranks) / _MIB
        sent_state = sum(rank[name]["bytes_consolidate"][0] for rank in ranks) / _MIB
        best = min(consolidations)
        rows.append(
            (
                name,
                summarize(steps).scaled(1e3).text(0),
                "-" if speed is None else speed.text(2),
                f"{sent:.0f}",
                f"{best:.2f}",
                f"{min(slowest[TORCH]['consolidate']) / best:.1f}",
                f"{sent_state:.0f}",
            )
        )
    columns = ("", "step ms", "x torch's speed", "sent", "consolidate s", "x torch's speed", "sent")
    return Table("step and consolidation", columns, tuple(rows))


def _traffic(ranks: list[dict[str, int]]) -> Table:
    totals = {name: sum(rank[name] for rank in ranks) for name in BACKWARDS}
    rows = tuple(
        (name, f"{total / _MIB:.2f}", f"{total / totals[BACKWARDS[0]]:.2f}")
        for name, total in totals.items()
    )
    return Table("backward and step of a model behind DDP", ("", "sent", "/ DDP alone"), rows)
