"""Host time of a wrapper per unit and step, where compute and collectives are next to nothing.

The model is a stack of tiny transformer blocks, each a unit, the root one more; the group is torch's fake one, in which
rank 0 sees W ranks and collectives copy a few bytes.  Forward and backward: the wrapper's time less the unwrapped
model's and less the bare collectives' in the same round.  Optimizer: step and zero_grad as they are, since wrappers
change what there is to step.
"""

from __future__ import annotations

import argparse
import cProfile
import operator
import pstats
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import world
from .contenders import CONTENDERS, PLAIN, Builder, Runner, Setting, build_all
from .models import GPT, Block, Shape
from .report import Report, Table
from .rounds import PHASES, Samples, Steps, time_rounds
from .stats import combine, ratio, round_medians, summarize

__all__ = [
    "COLLECTIVES",
    "MICROSECONDS",
    "THOUSANDS",
    "BareCollectives",
    "Scale",
    "add_arguments",
    "measure",
    "own_cost",
    "run",
    "table",
    "tiny",
    "tiny_runners",
]

COLLECTIVES = "collectives"
REFERENCES = ("fsdp1-flat", "fsdp1-orig", "fsdp2")
PROFILED = ("ours-flat", "ours-orig")


@dataclass(frozen=True)
class Scale:
    """What a table shows for one of what the samples hold."""

    unit: str
    factor: float


MICROSECONDS = Scale("us", 1e6)  # of seconds
THOUSANDS = Scale("thousand", 1e-3)  # of instructions
_PROFILE_STEPS = 20
_PROFILE_LINES = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``host_overhead``."""
    parser.add_argument("--world", type=int, nargs="+", default=[8], metavar="W", help="ranks (8)")
    parser.add_argument("--units", type=int, default=32, help="transformer blocks (32)")
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show where our time goes (yes)",
    )


def run(arguments: argparse.Namespace) -> Report:
    """One fresh process per world size."""
    shape = tiny(arguments.units)
    rounds, steps = (9, 3) if arguments.quick else (25, 5)
    tables: list[Table] = []
    samples: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for world_size in arguments.world:
        result = world.run_child(
            measure,
            shape=vars(shape),
            world_size=world_size,
            rounds=rounds,
            steps=steps,
            seed=arguments.seed,
            profile=arguments.profile,
        )
        title = f"W={world_size}, {shape.blocks} blocks of dim {shape.dim}"
        units = shape.blocks + 1
        tables.append(table(title, result["samples"], units))
        tables += [profile_table(name, rows) for name, rows in result["profiles"].items()]
        samples[f"W={world_size}"] = result["samples"]
        failures |= {f"W={world_size}: {name}": error for name, error in result["failures"].items()}
    return Report(
        "host_overhead",
        {"shape": vars(shape), "world_sizes": arguments.world, "rounds": rounds, "steps": steps},
        arguments.seed,
        tuple(tables),
        samples,
        failures,
        notes=(
            "us per unit and step, median [quartiles] of rounds; units are the blocks and the root.",
            f"fwd+bwd, and its ratios, are less ({PLAIN}), the unwrapped model, and ({COLLECTIVES}), the fake group's",
            "copies; ddp has one bucket, no units and no such copies.  optimizer is step and zero_grad as they are.",
        ),
    )


def tiny(blocks: int, *, linears: int = 0) -> Shape:
    """Blocks so small that their compute is negligible."""
    return Shape(blocks, dim=16, heads=2, vocabulary=32, linears=linears)


def measure(
    *,
    shape: Mapping[str, int],
    world_size: int,
    rounds: int,
    steps: int,
    seed: int,
    profile: bool = False,
    names: tuple[str, ...] = tuple(CONTENDERS),
) -> dict[str, Any]:
    """Samples, failures and, if asked for, our profiles, on a fake group in this process."""
    with world.fake_group(world_size):
        runners, failures = tiny_runners(Shape(**shape), seed, names, warm_up=3)
        timed: dict[str, Steps] = {**runners}
        timed[COLLECTIVES] = BareCollectives(Shape(**shape), world_size)
        samples = time_rounds(timed, rounds=rounds, steps=steps, seed=seed)
        profiles = {
            name: profile_rows(runners[name], shape["blocks"] + 1)
            for name in PROFILED
            if profile and name in runners
        }
    return {"samples": samples, "failures": failures, "profiles": profiles}


def tiny_runners(
    shape: Shape,
    seed: int,
    names: tuple[str, ...] = tuple(CONTENDERS),
    *,
    warm_up: int = 1,
    builders: Mapping[str, Builder] = CONTENDERS,
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Contenders on a tiny GPT, in the default process group; and what failed."""
    torch.manual_seed(seed)
    setting = Setting(frozenset({Block}))
    batch = shape.tokens(seed)
    return build_all(names, GPT(shape), setting, batch, warm_up=warm_up, builders=builders)


class BareCollectives:
    """What the fake group itself takes for each unit's two gathers and one reduction: it copies W small slices."""

    def __init__(self, shape: Shape, world_size: int) -> None:
        self._units = shape.blocks + 1
        numel = sum(parameter.numel() for parameter in Block(shape).parameters())
        self._shard = torch.zeros(-(-numel // world_size))
        self._whole = torch.zeros(self._shard.numel() * world_size)

    def forward_backward(self) -> None:
        """The collectives of a step of all units."""
        for _ in range(self._units):
            world.all_gather(self._whole, self._shard)
            world.all_gather(self._whole, self._shard)
            world.reduce_scatter(self._shard, self._whole)

    def optimizer_step(self) -> None:
        """Nothing."""


def own_cost(samples: Samples, name: str) -> list[float]:
    """What of forward and backward is the wrapper's, round by round: seconds, or whatever the samples hold.

    That is above the unwrapped model and, for a wrapper that shards, above what the fake group copies for it.
    """
    own = combine(
        operator.sub, samples[name]["forward_backward"], samples[PLAIN]["forward_backward"]
    )
    if name == "ddp" or COLLECTIVES not in samples:
        return own
    copies = round_medians(samples[COLLECTIVES]["forward_backward"])
    return [cost - copied for cost, copied in zip(own, copies, strict=True)]


def table(title: str, samples: Samples, units: int, scale: Scale = MICROSECONDS) -> Table:
    """Cost per unit and step, with ratios to torch's wrappers."""
    factor = scale.factor / units
    wrapped = [name for name in samples if name not in (PLAIN, COLLECTIVES)]
    own = {name: own_cost(samples, name) for name in wrapped}
    references = [name for name in REFERENCES if name in own]
    rows = []
    for name in wrapped:
        optimizer = summarize(round_medians(samples[name]["optimizer"])).scaled(factor)
        ratios = [ratio(own[name], own[reference]) for reference in references]
        rows.append(
            (
                name,
                summarize(own[name]).scaled(factor).text(0),
                *("-" if value is None else value.text(2) for value in ratios),
                optimizer.text(0),
            )
        )
    columns = (
        "",
        f"fwd+bwd {scale.unit}",
        *(f"/ {name}" for name in references),
        f"optimizer {scale.unit}",
    )
    whole = [
        _whole_row(name, samples, factor, len(references))
        for name in (PLAIN, COLLECTIVES)
        if name in samples
    ]
    return Table(title, columns, (*rows, *whole))


def _whole_row(name: str, samples: Samples, factor: float, references: int) -> tuple[str, ...]:
    """A row of what nothing is subtracted from."""
    phases = [
        summarize(round_medians(samples[name][phase])).scaled(factor).text(0) for phase in PHASES
    ]
    return (f"({name})", phases[0], *("" for _ in range(references)), phases[1])


def profile_rows(runner: Runner, units: int) -> list[list[str]]:
    """Where the package's own time goes, by function: calls and microseconds per unit and step under cProfile.

    ``self`` is time in the function's own lines, ``with torch`` also the built-in and torch functions called there.
    """
    import fsdp

    package = Path(fsdp.__file__).parent
    profiler = cProfile.Profile()
    for _ in range(_PROFILE_STEPS):
        profiler.enable()
        runner.forward_backward()
        profiler.disable()
        runner.optimizer_step()
    per_unit = 1.0 / (_PROFILE_STEPS * units)
    entries: dict[Any, Any] = vars(pstats.Stats(profiler))["stats"]
    inside = {place for place in entries if Path(place[0]).is_relative_to(package)}
    outside: dict[Any, float] = dict.fromkeys(inside, 0.0)
    for place, (_, _, _, _, callers) in entries.items():
        if place not in inside:
            for caller in inside & callers.keys():
                outside[caller] += callers[caller][3] if _is_leaf(place) else 0.0
    rows = [(entries[place][2], outside[place], entries[place][1], place) for place in inside]
    rows.sort(key=lambda row: row[0] + row[1], reverse=True)
    total = [sum(row[column] for row in rows) for column in range(3)]
    shown = [
        [
            f"{Path(place[0]).relative_to(package)}:{place[1]} {place[2]}",
            f"{calls * per_unit:.1f}",
            f"{own * per_unit * 1e6:.1f}",
            f"{(own + called) * per_unit * 1e6:.1f}",
        ]
        for own, called, calls, place in rows[:_PROFILE_LINES]
    ]
    every = [f"all {len(rows)} functions", f"{total[2] * per_unit:.1f}"]
    microseconds = [f"{seconds * per_unit * 1e6:.1f}" for seconds in (total[0], sum(total[:2]))]
    return [*shown, [*every, *microseconds]]


def _is_leaf(place: tuple[str, int, str]) -> bool:
    """Whether a function outside the package is built in (torch's kernels and bindings are)."""
    return place[0] == "~"


def profile_table(name: str, rows: list[list[str]]) -> Table:
    """The table of ``profile_rows``."""
    title = (
        f"{name}: where fwd+bwd goes, under cProfile (which inflates calls), us per unit and step"
    )
    columns = ("function", "calls", "self us", "with built-ins us")
    return Table(title, columns, tuple(tuple(row) for row in rows))
