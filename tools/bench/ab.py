"""Host time of two versions of this package, by turns in one process: what a change saves.

    git worktree add /tmp/before HEAD~1
    python -m tools.bench ab /tmp/before

Model and group are those of ``host_overhead``.  Times are processor time of the thread, so that what else runs does not
count; where the allocator has put things does, so several processes are asked, and their medians shown.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import host_overhead, world
from .contenders import CONTENDERS, PLAIN, Builder, ours
from .models import Shape
from .report import Report, Table
from .rounds import Samples, Steps, time_rounds
from .stats import combine, summarize

__all__ = ["OTHER", "add_arguments", "import_as", "measure", "run", "saved", "table"]

EXPOSURES = {"flat": False, "orig": True}
OTHER = "fsdp_of_the_other_checkout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ab``."""
    parser.add_argument("other", type=Path, help="a checkout with the version to compare with")
    parser.add_argument("--world", type=int, default=8, metavar="W", help="ranks (8)")
    parser.add_argument("--units", type=int, default=32, help="transformer blocks (32)")
    parser.add_argument("--processes", type=int, metavar="N", help="fresh ones (5; 1 if --quick)")


def run(arguments: argparse.Namespace) -> Report:
    """Fresh processes, each with both versions in both exposures."""
    package = arguments.other.resolve() / "fsdp" / "__init__.py"
    if not package.exists():
        raise SystemExit(f"ab: {arguments.other} is no checkout: it has no fsdp/__init__.py")
    shape = host_overhead.tiny(arguments.units)
    settings = {
        "other": str(package),
        "shape": vars(shape),
        "world_size": arguments.world,
        "rounds": 20 if arguments.quick else 40,
    }
    processes = arguments.processes or (1 if arguments.quick else 5)
    results = [
        world.run_child(measure, seed=arguments.seed + number, **settings)
        for number in range(processes)
    ]
    return Report(
        "ab",
        {**settings, "processes": processes},
        arguments.seed,
        (table([result["samples"] for result in results], shape.blocks + 1),),
        {f"process {number}": result["samples"] for number, result in enumerate(results)},
        {
            f"process {number}: {name}": error
            for number, result in enumerate(results)
            for name, error in result["failures"].items()
        },
        notes=(
            "processor us of forward and backward per unit and step, less the unwrapped model's; of each process the",
            "median of its rounds, of those the median [quartiles].  saved: other less this, in the same round.",
        ),
    )


def measure(
    *, other: str, shape: Mapping[str, int], world_size: int, rounds: int, seed: int
) -> dict[str, Any]:
    """Samples and failures, on a fake group in this process."""
    import_as(OTHER, Path(other))
    builders: dict[str, Builder] = {PLAIN: CONTENDERS[PLAIN]}
    for exposure, use_orig_params in EXPOSURES.items():
        for version, package in {"other": OTHER, "this": "fsdp"}.items():
            builders[f"{version}-{exposure}"] = functools.partial(
                ours, use_orig_params=use_orig_params, package=package
            )
    with world.fake_group(world_size):
        runners, failures = host_overhead.tiny_runners(
            Shape(**shape), seed, tuple(builders), warm_up=3, builders=builders
        )
        timed: dict[str, Steps] = {**runners}
        samples = time_rounds(timed, rounds=rounds, steps=1, seed=seed, clock=time.thread_time)
    return {"samples": samples, "failures": failures}


def import_as(name: str, package: Path) -> None:
    """Import the package whose ``__init__.py`` is ``package`` under ``name``: its own imports are relative."""
    spec = importlib.util.spec_from_file_location(
        name, package, submodule_search_locations=[str(package.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def saved(samples: Samples, exposure: str) -> list[float]:
    """Seconds of forward and backward that this version takes less than the other, round by round."""
    this, other = (samples[f"{version}-{exposure}"] for version in ("this", "other"))
    return combine(
        lambda less, more: more - less, this["forward_backward"], other["forward_backward"]
    )


def table(processes: list[Samples], units: int) -> Table:
    """A line per exposure."""
    factor = 1e6 / units
    rows = []
    for exposure in EXPOSURES:
        costs = [
            summarize(
                [summarize(host_overhead.own_cost(samples, name)).median for samples in processes]
            )
            for name in (f"other-{exposure}", f"this-{exposure}")
        ]
        gains = summarize([summarize(saved(samples, exposure)).median for samples in processes])
        rows.append((exposure, *(cost.scaled(factor).text(1) for cost in (*costs, gains))))
    return Table("fwd+bwd us per unit", ("", "other", "this", "saved"), tuple(rows))
