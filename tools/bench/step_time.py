"""Time of a whole training step on two gloo ranks, one thread each, for units of about 0.1, 3 and 30 MiB.

A step starts at a barrier; it lasts as long as on its slower rank.  ``plain`` is the unwrapped model on every rank at
once, without communication.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import world
from .contenders import CONTENDERS, VARIANTS, Runner, Setting, build_all
from .models import GPT, Block, Shape
from .report import Report, Table
from .rounds import PHASES, Samples, time_rounds
from .stats import ratio, round_medians, summarize

__all__ = ["SIZES", "add_arguments", "measure", "run", "slowest_rank", "step_seconds", "table"]

# Units of 12 dim^2 fp32 elements.  Four large blocks and fewer tokens keep seven copies within 8 GiB.
SIZES: dict[str, Shape] = {
    "0.1 MiB": Shape(8, dim=48, heads=4, batch=4, sequence=64),
    "3 MiB": Shape(8, dim=256, heads=8, batch=4, sequence=64),
    "30 MiB": Shape(4, dim=800, heads=8, batch=2, sequence=64),
}
REFERENCES = ("ddp", "fsdp1-flat", "fsdp1-orig", "fsdp2")
# Rounds, and timed steps of a contender in each.
_ROUNDS = {"0.1 MiB": (21, 5), "3 MiB": (11, 3), "30 MiB": (7, 1)}
_QUICK = {"0.1 MiB": (5, 3), "3 MiB": (3, 2), "30 MiB": (2, 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``step_time``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")
    parser.add_argument(
        "--size", choices=SIZES, nargs="+", default=list(SIZES), help="of a unit (all)"
    )
    parser.add_argument(
        "--contender",
        choices=(*CONTENDERS, *VARIANTS),
        nargs="+",
        default=list(CONTENDERS),
        metavar="NAME",
        help=f"who (all but {', '.join(VARIANTS)})",
    )
    parser.add_argument("--compile", action="store_true", help="compile each block (torch.compile)")


def run(arguments: argparse.Namespace) -> Report:
    """A fresh world per size."""
    tables: list[Table] = []
    cases: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for size in arguments.size:
        rounds, steps = (_QUICK if arguments.quick else _ROUNDS)[size]
        shape = SIZES[size]
        if arguments.quick:
            shape = dataclasses.replace(shape, blocks=shape.blocks // 2)
        cases[size] = {
            "shape": vars(shape),
            "rounds": rounds,
            "steps": steps,
            "names": arguments.contender,
            "compiled": arguments.compile,
        }
        results = world.run_gloo(measure, arguments.world, seed=arguments.seed, **cases[size])
        samples[size] = [result["samples"] for result in results]
        failures |= {f"{size}: {name}": error for name, error in results[0]["failures"].items()}
        title = f"units of {size}, {shape.blocks} blocks of dim {shape.dim}"
        title += ", compiled" if arguments.compile else ""
        tables.append(table(title, slowest_rank(samples[size])))
    return Report(
        "step_time",
        {
            "world_size": arguments.world,
            "cases": cases,
        },
        arguments.seed,
        tuple(tables),
        samples,
        failures,
        notes=("ms per step of the slower rank and ratios of it, median [quartiles] of rounds.",),
    )


def measure(
    *,
    shape: Mapping[str, int],
    rounds: int,
    steps: int,
    seed: int,
    names: Sequence[str] = tuple(CONTENDERS),
    compiled: bool = False,
) -> dict[str, Any]:
    """This rank's samples and failures.

    Collective: call on all ranks.
    """
    runners, failures = gpt_runners(
        Shape(**shape), seed, warm_up=2, names=tuple(names), compiled=compiled
    )
    samples = time_rounds(runners, rounds=rounds, steps=steps, seed=seed, before_step=dist.barrier)
    return {"samples": samples, "failures": failures}


def gpt_runners(
    shape: Shape,
    seed: int,
    *,
    warm_up: int = 1,
    names: tuple[str, ...] = tuple(CONTENDERS),
    compiled: bool = False,
    group: Any = None,
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Contenders on a GPT in ``group``, or the default one, each rank with its own batch; and what failed."""
    torch.manual_seed(seed)
    model = GPT(shape)
    batch = shape.tokens(seed + dist.get_rank())
    setting = Setting(frozenset({Block}), compiled=compiled, group=group)
    return build_all(names, model, setting, batch, warm_up=warm_up)


def slowest_rank(ranks: list[Samples]) -> Samples:
    """Each step and phase as long as on the rank where it took longest."""
    first = ranks[0]
    return {
        name: {
            phase: [
                [max(step) for step in zip(*steps, strict=True)]
                for steps in zip(*(rank[name][phase] for rank in ranks), strict=True)
            ]
            for phase in first[name]
        }
        for name in first
    }


def step_seconds(phases: Mapping[str, list[list[float]]]) -> list[list[float]]:
    """Rounds of whole steps: the phases added up."""
    return [
        [sum(step) for step in zip(*steps, strict=True)]
        for steps in zip(*(phases[phase] for phase in PHASES), strict=True)
    ]


def table(title: str, samples: Samples) -> Table:
    """Milliseconds per step, ratios to torch's wrappers, and the optimizer's part."""
    medians = {name: round_medians(step_seconds(phases)) for name, phases in samples.items()}
    references = [name for name in REFERENCES if name in medians]
    rows = []
    for name, values in medians.items():
        ratios = [ratio(values, medians[reference]) for reference in references]
        optimizer = summarize(round_medians(samples[name]["optimizer"])).scaled(1e3)
        rows.append(
            (
                name,
                summarize(values).scaled(1e3).text(1),
                *("-" if value is None else value.text(2) for value in ratios),
                f"{optimizer.median:.1f}",
            )
        )
    columns = ("", "step ms", *(f"/ {name}" for name in references), "optimizer ms")
    return Table(title, columns, tuple(rows))
