"""Peak resident memory of construction, first step and later steps, 2 gloo ranks, against the analytic minimum.

Each contender has fresh processes: a peak is of a process.  The kernel's high-water mark (VmHWM) is reset before each
phase, and glibc maps every allocation of 64 KiB and more by itself, so that what is freed leaves the resident set.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import world
from .contenders import CONTENDERS, Setting, build_runner
from .models import GPT, Block, Shape
from .report import Report, Table
from .stats import summarize

__all__ = ["add_arguments", "measure", "minimum", "read_status", "run", "saved_bytes", "table"]

PHASES = ("construction", "first step", "step")
FULL = Shape(12, dim=768, heads=12, batch=1, sequence=128)
QUICK = Shape(4, dim=512, heads=8, batch=1, sequence=128)
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
LATER_STEPS = 4  # what grows from step to step shows
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``memory``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")


def run(arguments: argparse.Namespace) -> Report:
    """Fresh ranks per contender and repetition, contenders in turn."""
    shape = QUICK if arguments.quick else FULL
    repetitions = 1 if arguments.quick else 3
    samples: dict[str, dict[str, list[int]]] = {}
    failures: dict[str, str] = {}
    for _ in range(repetitions):
        for name in CONTENDERS:
            try:
                ranks = world.run_gloo(
                    measure,
                    arguments.world,
                    environment=_MAPPED,
                    name=name,
                    shape=vars(shape),
                    seed=arguments.seed,
                )
            except Exception as error:  # noqa: BLE001  # any failure of a contender is a result
                failures[name] = " ".join(str(error).split())[-300:]
                continue
            phases = samples.setdefault(name, {phase: [] for phase in PHASES})
            for phase in PHASES:
                phases[phase].append(max(rank[phase] for rank in ranks))
    least = minimum(shape, arguments.world)
    states = 4 * sum(parameter.nbytes for parameter in GPT(shape).parameters())
    title = f"{shape.blocks} blocks of dim {shape.dim}, W={arguments.world}"
    return Report(
        "memory",
        {"shape": vars(shape), "world_size": arguments.world, "repetitions": repetitions},
        arguments.seed,
        (table(title, samples, least, states, arguments.world),),
        {**samples, "minimum": least},
        failures,
        notes=(
            "MiB of the larger rank above the process before the model, median [quartiles] of repetitions.",
            "construction: unwrapped model, wrapping, optimizer object; first step: AdamW's moments included.",
            "above states: peak less parameters, gradients and two moments (all / W where sharded).",
            "minimum: " + ", ".join(f"{part} {size / _MIB:.0f}" for part, size in least.items()),
        ),
    )


def minimum(shape: Shape, world_size: int) -> dict[str, int]:
    """The parts of the analytic minimum of a sharded step's peak, in bytes.

    While the backward goes on, activations are freed as gradient shards appear: the larger of both counts, not the sum.
    """
    model = GPT(shape)
    total = sum(parameter.nbytes for parameter in model.parameters())
    unit = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    activations = saved_bytes(model, shape.tokens(0))
    return {
        "parameters and moments": 3 * total // world_size,
        "gradients or activations": max(total // world_size, activations),
        "two units unsharded": 2 * unit,
        "gradients of a unit": unit,
    }


def saved_bytes(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> int:
    """Bytes that autograd keeps from forward to backward, each storage once, the parameters' left out."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in kept.values())


def measure(*, name: str, shape: Mapping[str, int], seed: int) -> dict[str, int]:
    """This rank's peaks in bytes above what the process had before, by phase.

    Collective: call on all ranks.
    """
    sizes = Shape(**shape)
    torch.manual_seed(seed)
    warm = GPT(Shape(1, dim=16, heads=2, vocabulary=32))  # loads what every contender needs anyway
    runner = build_runner(name, warm, Setting(frozenset({Block})), Shape(1, 16, 2, 32).tokens(0))
    runner.forward_backward()
    runner.optimizer_step()
    del warm, runner
    gc.collect()
    before = read_status("VmRSS")

    def peak(phase: Any) -> tuple[Any, int]:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return phase(), read_status("VmHWM") - before

    def construct() -> Any:
        batch = sizes.tokens(seed + dist.get_rank())
        return build_runner(name, GPT(sizes), Setting(frozenset({Block})), batch)

    def step() -> None:
        runner.forward_backward()
        runner.optimizer_step()

    runner, construction = peak(construct)
    gc.collect()
    _, first = peak(step)
    later = max(peak(step)[1] for _ in range(LATER_STEPS))
    return dict(zip(PHASES, (construction, first, later), strict=True))


def read_status(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def table(
    title: str,
    samples: Mapping[str, Mapping[str, list[int]]],
    least: Mapping[str, int],
    states: int,
    world_size: int,
) -> Table:
    """MiB per phase, the peak of a step above the states, and its ratio to the minimum."""
    rows = []
    for name, phases in samples.items():
        sharded = name not in ("plain", "ddp")
        peak = summarize(phases["step"]).median
        above = peak - states // (world_size if sharded else 1)
        rows.append(
            (
                name,
                *(summarize(phases[phase]).scaled(1 / _MIB).text(0) for phase in PHASES),
                f"{above / _MIB:.0f}",
                f"{peak / sum(least.values()):.2f}",
            )
        )
    return Table(title, ("", *PHASES, "above states", "/ minimum"), tuple(rows))
