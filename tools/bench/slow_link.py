"""How much communication over a slow link costs: two gloo ranks on two hosts joined by 1, 2 and 5 Gbit/s.

Hosts are network namespaces (see ``hosts``) with cores of their own: hosts do not wake each other's threads on the core
that a message comes from, as two of one machine do.  Each contender also trains on two ranks with a fake group, which
computes the same and sends nothing: what a step over the link takes longer is the communication that its overlap did
not hide.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from . import hosts, world
from .contenders import VARIANTS
from .models import Shape
from .report import Report, Table
from .rounds import Samples, time_rounds
from .stats import ratio, round_medians, summarize
from .step_time import gpt_runners, measure, slowest_rank, step_seconds

__all__ = ["SHAPE", "add_arguments", "measure_alone", "run", "table"]

# Enough compute for each parameter that a good overlap hides the transfers at 2 Gbit/s: 3 MiB a unit, 2048 tokens.
SHAPE = Shape(8, dim=256, heads=8, batch=16, sequence=128)
_ROUNDS, _QUICK_ROUNDS = (9, 2), (3, 1)
_CONTENDERS = (
    "ddp",
    "fsdp1-flat",
    "fsdp1-orig",
    "fsdp2",
    "ours-flat",
    "ours-orig",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``slow_link``."""
    parser.add_argument(
        "--gigabits", type=float, nargs="+", metavar="G", help="of the link (1 2 5; 2 if --quick)"
    )
    parser.add_argument(
        "--contender",
        choices=(*_CONTENDERS, *VARIANTS),
        nargs="+",
        default=list(_CONTENDERS),
        help="(all)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="of a few steps each (9)")


def run(arguments: argparse.Namespace) -> Report:
    """A fresh world per speed, and one that sends nothing."""
    rounds, steps = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    rounds = arguments.rounds or rounds
    shape = dataclasses.replace(SHAPE, blocks=3, batch=8) if arguments.quick else SHAPE
    case = {
        "shape": vars(shape),
        "rounds": rounds,
        "steps": steps,
        "seed": arguments.seed,
        "names": arguments.contender,
    }
    tables: list[Table] = []
    samples: dict[str, Any] = {}
    failures: dict[str, str] = {}
    if (reason := hosts.why_not()) is not None:
        failures["all"] = reason
    else:
        alone = world.run_fake(measure_alone, 2, own_cores=True, **case)
        samples["no communication"] = [result["samples"] for result in alone]
        for gigabits in arguments.gigabits or ([2] if arguments.quick else [1, 2, 5]):
            with hosts.linked_hosts(gigabits) as names:
                results = world.run_gloo(measure, 2, hosts=names, **case)
            samples[f"{gigabits:g} Gbit/s"] = [result["samples"] for result in results]
            failures |= {
                f"{gigabits:g}: {name}": text for name, text in results[0]["failures"].items()
            }
        bare = slowest_rank(samples["no communication"])
        for title, ranks in samples.items():
            if title != "no communication":
                tables.append(table(title, slowest_rank(ranks), bare))
    return Report(
        "slow_link",
        case,
        arguments.seed,
        tuple(tables),
        samples,
        failures,
        notes=(
            "ms per step of the slower rank, median [quartiles] of rounds; exposed: step less the same contender's",
            "step on a fake group; / alone: their ratio, 1.00 where communication is hidden whole.",
        ),
    )


def measure_alone(
    *, shape: dict[str, int], rounds: int, steps: int, seed: int, names: Sequence[str]
) -> dict[str, Any]:
    """This rank's samples with a group that sends nothing."""
    runners, failures = gpt_runners(Shape(**shape), seed, warm_up=2, names=tuple(names))
    samples = time_rounds(runners, rounds=rounds, steps=steps, seed=seed)
    return {"samples": samples, "failures": failures, "rank": dist.get_rank()}


def table(title: str, samples: Samples, alone: Samples) -> Table:
    """Steps over the link beside the same without communication, and beside DDP and FSDP1."""
    medians = {name: round_medians(step_seconds(phases)) for name, phases in samples.items()}
    bare = {name: round_medians(step_seconds(phases)) for name, phases in alone.items()}
    rows = []
    for name, values in medians.items():
        if name not in bare:
            continue
        step, without = summarize(values), summarize(bare[name])
        beside = [
            ratio(values, medians[reference]) if reference in medians else None
            for reference in ("ddp", "fsdp1-flat", "fsdp2")
        ]
        rows.append(
            (
                name,
                step.scaled(1e3).text(1),
                without.scaled(1e3).text(1),
                f"{1e3 * (step.median - without.median):.1f}",
                f"{step.median / without.median:.2f}",
                *("-" if value is None else value.text(2) for value in beside),
            )
        )
    columns = (
        "",
        "step ms",
        "alone ms",
        "exposed ms",
        "/ alone",
        "/ ddp",
        "/ fsdp1-flat",
        "/ fsdp2",
    )
    return Table(title, columns, tuple(rows))
