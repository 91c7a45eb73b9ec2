"""How much communication over a slow link costs: two gloo ranks on two hosts joined by 1, 2 and 5 Gbit/s.

Hosts are network namespaces (see ``hosts``) with cores of their own: hosts do not wake each other's threads on the core
that a message comes from, as two of one machine do.  Each contender also trains alone, in the same processes and
rounds: over a fake group, so that it computes the same and sends nothing.  What a step over the link takes longer than
one alone is the communication that its overlap did not hide.
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
from .step_time import gpt_runners, slowest_rank, step_seconds

__all__ = ["SHAPE", "add_arguments", "measure", "run", "table"]

# Enough compute for each parameter that a good overlap hides the transfers at 2 Gbit/s: 3 MiB a unit, 2048 tokens.
SHAPE = Shape(8, dim=256, heads=8, batch=16, sequence=128)
_ROUNDS, _QUICK_ROUNDS = (5, 1), (3, 1)
_ALONE = " alone"  # after the name of a contender
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
    parser.add_argument("--rounds", type=int, metavar="N", help="with a step each (5; 3)")


def run(arguments: argparse.Namespace) -> Report:
    """A fresh world per speed."""
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
        for gigabits in arguments.gigabits or ([2] if arguments.quick else [1, 2, 5]):
            with hosts.linked_hosts(gigabits) as names:
                results = world.run_gloo(measure, 2, hosts=names, **case)
            samples[f"{gigabits:g} Gbit/s"] = [result["samples"] for result in results]
            failures |= {
                f"{gigabits:g}: {name}": text for name, text in results[0]["failures"].items()
            }
        tables = [table(title, slowest_rank(ranks)) for title, ranks in samples.items()]
    return Report(
        "slow_link",
        case,
        arguments.seed,
        tuple(tables),
        samples,
        failures,
        notes=(
            "ms per step of the slower rank, median [quartiles] of rounds; exposed: step less the same contender's",
            "step over a fake group; / alone: their ratio, 1.00 where communication is hidden whole.",
        ),
    )


def measure(
    *, shape: dict[str, int], rounds: int, steps: int, seed: int, names: Sequence[str]
) -> dict[str, Any]:
    """This rank's samples and failures, each contender over the link and alone.

    Collective: call on all ranks.
    """
    wanted = tuple(names)
    runners, failures = gpt_runners(Shape(**shape), seed, warm_up=2, names=wanted)
    with world.fake_subgroup() as nobody:
        alone, others = gpt_runners(Shape(**shape), seed, warm_up=2, names=wanted, group=nobody)
        both = runners | {f"{name}{_ALONE}": runner for name, runner in alone.items()}
        samples = time_rounds(both, rounds=rounds, steps=steps, seed=seed, before_step=dist.barrier)
    return {"samples": samples, "failures": failures | others}


def table(title: str, samples: Samples) -> Table:
    """Steps over the link beside the same without communication, and beside DDP, FSDP1 and FSDP2."""
    medians = {name: round_medians(step_seconds(phases)) for name, phases in samples.items()}
    rows = []
    for name, values in medians.items():
        bare = medians.get(f"{name}{_ALONE}")
        if bare is None:  # alone itself
            continue
        exposed = [step - without for step, without in zip(values, bare, strict=True)]
        beside = [
            ratio(values, medians[reference]) if reference in medians else None
            for reference in ("ddp", "fsdp1-flat", "fsdp2")
        ]
        rows.append(
            (
                name,
                *(summarize(ms).scaled(1e3).text(1) for ms in (values, bare, exposed)),
                *(
                    "-" if value is None else value.text(2)
                    for value in (ratio(values, bare), *beside)
                ),
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
