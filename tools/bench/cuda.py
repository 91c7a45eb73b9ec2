"""Step time and memory of a Llama-like stack on one GPU, bf16 compute, as one of 8 and of 64 ranks; in two parts.

``fake``: gathers and reductions move nothing between devices, so what is seen is the wrapper's host time, copies and
memory at real sizes.  ``loopback`` is ``cuda_overlap``.  Times are of interleaved rounds in one process; memory is of a
fresh process per contender.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from . import cuda_overlap, world
from .cuda_overlap import llama_runners
from .models import Shape
from .report import Report, Table
from .rounds import time_rounds
from .stats import ratio, round_medians, summarize
from .step_time import step_seconds

__all__ = ["add_arguments", "measure_memory", "measure_time", "run", "table"]

# Not the unwrapped model nor DDP: torch gives neither fp32 master weights beside bf16, so their job is another.
NAMES = ("fsdp1-flat", "fsdp1-orig", "fsdp2", "ours-flat", "ours-orig")
REFERENCES = ("fsdp1-flat", "fsdp1-orig", "fsdp2")
FULL = Shape(8, dim=4096, heads=32, vocabulary=32000, batch=1, sequence=2048, hidden=14336)
QUICK = Shape(4, dim=4096, heads=32, vocabulary=32000, batch=1, sequence=1024, hidden=14336)
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``cuda``."""
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64], metavar="W", help="(8 64)")
    parser.add_argument(
        "--part",
        choices=("fake", "loopback"),
        nargs="+",
        default=["fake", "loopback"],
        help="(both)",
    )
    cuda_overlap.add_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """The parts, in one report."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("cuda: no CUDA device here; run this benchmark on a machine with a GPU")
    parts = {"fake": run_fake, "loopback": cuda_overlap.run}
    if arguments.device == "cpu":
        arguments.part = ["loopback"]
    first, *rest = [parts[part](arguments) for part in arguments.part]
    for other in rest:
        first = dataclasses.replace(
            first,
            settings={**first.settings, **other.settings},
            tables=(*first.tables, *other.tables),
            samples={**first.samples, **other.samples},
            failures={**first.failures, **other.failures},
            notes=(*first.notes, *other.notes),
        )
    return first


def run_fake(arguments: argparse.Namespace) -> Report:
    """A fresh process per world size for times, and one per contender for memory."""
    shape = QUICK if arguments.quick else FULL
    rounds, steps = (4, 3) if arguments.quick else (15, 5)
    every: list[Table] = []
    samples: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for world_size in arguments.world:
        common = {"shape": vars(shape), "world_size": world_size, "seed": arguments.seed}
        timed = world.run_child(measure_time, rounds=rounds, steps=steps, **common)
        memory = {
            name: world.run_child(measure_memory, name=name, **common) for name in timed["samples"]
        }
        case = f"fake, W={world_size}"
        samples[case] = {"seconds": timed["samples"], "memory": memory}
        failures |= {f"{case}: {name}": text for name, text in timed["failures"].items()}
        every.append(table(case, timed["samples"], memory))
    settings = {
        "shape": vars(shape),
        "world_sizes": arguments.world,
        "rounds": rounds,
        "steps": steps,
    }
    return Report(
        "cuda",
        {"fake": settings},
        arguments.seed,
        tuple(every),
        samples,
        failures,
        notes=(
            "ms per step with AdamW, median [quartiles] of rounds; GiB of later steps on the device.",
            "fp32 shards and reductions, bf16 compute and gathers.",
        ),
    )


def measure_time(
    *, shape: Mapping[str, int], world_size: int, rounds: int, steps: int, seed: int
) -> dict[str, Any]:
    """Samples and failures, on a fake group in this process."""
    with world.fake_group(world_size):
        runners, failures = llama_runners(Shape(**shape), seed, NAMES, _device())
        samples = time_rounds(
            runners,
            rounds=rounds,
            steps=steps,
            seed=seed,
            before_step=torch.cuda.synchronize,
            finish=torch.cuda.synchronize,
        )
    return {"samples": samples, "failures": failures}


def measure_memory(
    *, name: str, shape: Mapping[str, int], world_size: int, seed: int
) -> dict[str, int]:
    """Peak allocated and reserved bytes of steps after the second, and the allocator's retries."""
    with world.fake_group(world_size):
        runners, _ = llama_runners(Shape(**shape), seed, (name,), _device())
        return cuda_overlap.peak_memory(runners[name])


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def table(title: str, samples: Mapping[str, Any], memory: Mapping[str, Mapping[str, int]]) -> Table:
    """Milliseconds, ratios, GiB and retries."""
    medians = {name: round_medians(step_seconds(phases)) for name, phases in samples.items()}
    references = [name for name in REFERENCES if name in medians]
    rows = []
    for name, values in medians.items():
        ratios = [ratio(values, medians[reference]) for reference in references]
        rows.append(
            (
                name,
                summarize(values).scaled(1e3).text(1),
                *("-" if value is None else value.text(2) for value in ratios),
                f"{memory[name]['allocated'] / _GIB:.2f}",
                f"{memory[name]['reserved'] / _GIB:.2f}",
                str(memory[name]["retries"]),
            )
        )
    columns = (
        "",
        "step ms",
        *(f"/ {name}" for name in references),
        "allocated",
        "reserved",
        "retries",
    )
    return Table(title, columns, tuple(rows))
