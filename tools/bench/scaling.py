"""How host time and memory per unit grow with units, parameters per unit and world size: they should stay flat.

The model and the group are those of ``host_overhead``; each point is a fresh process with all contenders in it.
Memory is what a contender's construction and first steps left resident, less the unwrapped model's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Iterator, Mapping
from typing import Any

from . import host_overhead, world
from .contenders import PLAIN
from .memory import read_status
from .models import Shape
from .report import Report, Table
from .rounds import Steps, time_rounds
from .stats import summarize

__all__ = ["add_arguments", "measure", "points", "run", "table"]

NAMES = (PLAIN, "fsdp1-flat", "fsdp1-orig", "fsdp2", "ours-flat", "ours-orig")
_BLOCKS = 8  # where units are not what varies
# Along each axis: values, with rounds and steps in each.  Large models take long, and scatter less.
_FULL: dict[str, dict[int, tuple[int, int]]] = {
    "units": {8: (9, 3), 64: (7, 2), 512: (3, 1)},
    "parameters": {12: (9, 3), 44: (9, 3), 140: (7, 2)},
    "world": {2: (9, 3), 8: (9, 3), 64: (9, 3), 512: (7, 2), 4096: (3, 1)},
}
_QUICK: dict[str, dict[int, tuple[int, int]]] = {
    "units": {8: (5, 2), 64: (3, 1)},
    "parameters": {12: (5, 2), 44: (3, 2)},
    "world": {8: (5, 2), 64: (5, 2)},
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting: ``value`` along ``axis``, the rest as in ``host_overhead``."""

    axis: str
    value: int
    shape: Shape
    world_size: int
    rounds: int
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``scaling``."""
    parser.add_argument("--axis", choices=_FULL, nargs="+", default=list(_FULL), help="which (all)")


def points(axes: list[str], *, quick: bool) -> Iterator[Point]:
    """The settings to measure."""
    for axis in axes:
        for value, (rounds, steps) in (_QUICK if quick else _FULL)[axis].items():
            linears = (value - 12) // 2 if axis == "parameters" else 0
            shape = host_overhead.tiny(value if axis == "units" else _BLOCKS, linears=linears)
            yield Point(axis, value, shape, value if axis == "world" else 8, rounds, steps)


def run(arguments: argparse.Namespace) -> Report:
    """A fresh process per point; where axes cross, one for all."""
    measured: dict[str, dict[str, Any]] = {}
    results: list[tuple[Point, dict[str, Any]]] = []
    for point in points(arguments.axis, quick=arguments.quick):
        wanted = {
            "shape": vars(point.shape),
            "world_size": point.world_size,
            "rounds": point.rounds,
            "steps": point.steps,
            "seed": arguments.seed,
        }
        key = repr(wanted)
        if key not in measured:
            measured[key] = world.run_child(measure, **wanted)
        results.append((point, measured[key]))
    return Report(
        "scaling",
        {
            "points": [dataclasses.asdict(point) for point, _ in results],
        },
        arguments.seed,
        tuple(table(axis, results) for axis in arguments.axis),
        {f"{point.axis}={point.value}": result for point, result in results},
        {
            f"{point.axis}={point.value}: {name}": error
            for point, result in results
            for name, error in result["failures"].items()
        },
        notes=(
            "us of forward and backward per unit and step as in host_overhead, then KiB resident per unit,",
            "both less the unwrapped model's; parameters: in each unit.",
        ),
    )


def measure(
    *, shape: Mapping[str, int], world_size: int, rounds: int, steps: int, seed: int
) -> dict[str, Any]:
    """Samples, resident bytes by contender, failures; on a fake group in this process."""
    runners: dict[str, Steps] = {}
    failures: dict[str, str] = {}
    resident: dict[str, int] = {}
    sizes = Shape(**shape)
    with world.fake_group(world_size):
        # The first of each kind imports modules and fills caches: that is not the contender's.
        host_overhead.tiny_runners(host_overhead.tiny(2), seed, NAMES)
        for name in NAMES:
            gc.collect()
            before = read_status("VmRSS")
            built, failed = host_overhead.tiny_runners(sizes, seed, (name,), warm_up=2)
            gc.collect()
            resident[name] = read_status("VmRSS") - before
            runners |= built
            failures |= failed
        runners[host_overhead.COLLECTIVES] = host_overhead.BareCollectives(sizes, world_size)
        samples = time_rounds(runners, rounds=rounds, steps=steps, seed=seed)
    return {"samples": samples, "resident": resident, "failures": failures}


def table(axis: str, results: list[tuple[Point, dict[str, Any]]]) -> Table:
    """One line per contender, one column per value."""
    chosen = [(point, result) for point, result in results if point.axis == axis]
    wrapped = [name for name in NAMES if name != PLAIN]
    rows = tuple(
        (name, *(_cell(name, point, result) for point, result in chosen)) for name in wrapped
    )
    return Table(
        f"{axis}: us, KiB per unit", ("", *(str(point.value) for point, _ in chosen)), rows
    )


def _cell(name: str, point: Point, result: dict[str, Any]) -> str:
    if name not in result["samples"]:
        return "-"
    units = point.shape.blocks + 1
    own = summarize(host_overhead.own_cost(result["samples"], name)).median * 1e6 / units
    kept = (result["resident"][name] - result["resident"][PLAIN]) / 1024 / units
    return f"{own:.0f}, {kept:.0f}"
