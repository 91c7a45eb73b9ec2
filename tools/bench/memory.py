"""Peak resident memory of construction, steps and a checkpoint, 2 gloo ranks, against the analytic minimum.

Each contender has fresh processes: a peak is of a process.  The kernel's high-water mark (VmHWM) is reset before each
phase, and glibc maps every allocation of 64 KiB and more by itself, so that what is freed leaves the resident set.
The minimum is that of :mod:`tools.bench.memory_minimum`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import world
from .checkpoint import save
from .contenders import CONTENDERS, Builder, Setting, build_runner
from .memory_minimum import Minimum, minimum
from .models import GPT, Block, Shape
from .report import Report, Table
from .stats import summarize

__all__ = ["CASES", "Case", "add_arguments", "measure", "read_status", "run", "table"]

PHASES = ("construction", "first step", "step", "rest", "checkpoint")
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
LATER_STEPS = 4  # what grows from step to step shows
_MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A model and what of it is a unit.

    Attributes:
        shape: Sizes.
        large: Names of modules that are units besides the blocks.
    """

    shape: Shape
    large: tuple[str, ...] = ()

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all modules that are units besides the model."""
        return (*(f"blocks.{index}" for index in range(self.shape.blocks)), *self.large)

    @property
    def setting(self) -> Setting:
        """The same for the contenders' builders."""
        return Setting(frozenset({Block}), large=frozenset(self.large))

    def minimum(self, world_size: int) -> Minimum:
        """The least peak of a step."""
        return minimum(GPT(self.shape), self.units, self.shape.tokens(0), world_size)


_VOCABULARY = Shape(6, dim=768, heads=12, vocabulary=25000, batch=1, sequence=128)
CASES = {
    "small": Case(Shape(4, dim=512, heads=8, batch=1, sequence=128)),  # 13M parameters
    "blocks": Case(Shape(12, dim=768, heads=12, batch=1, sequence=128)),  # 85M, all in the blocks
    "vocabulary": Case(
        _VOCABULARY
    ),  # 81M, half of them in embedding and head, which are the root's
    "apart": Case(_VOCABULARY, ("tokens", "head")),
}


def _lean(model: nn.Module, setting: Setting) -> nn.Module:
    """FSDP2 without a gather of the embedding in the backward, for which it has to be asked."""
    wrapped = CONTENDERS["fsdp2"](model, setting)
    tokens: Any = wrapped.tokens
    tokens.set_unshard_in_backward(False)
    return wrapped


LEAN: dict[str, Builder] = {"fsdp2-lean": _lean}
_ALL: dict[str, Builder] = {**CONTENDERS, **LEAN}
_QUICK = ("ddp", "fsdp1-flat", "fsdp2", "ours-flat", "ours-orig")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``memory``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")
    parser.add_argument(
        "--case", choices=CASES, nargs="+", help="which (all but small; small if --quick)"
    )
    parser.add_argument(
        "--contender", choices=_ALL, nargs="+", help=f"who (all; {' '.join(_QUICK)} if --quick)"
    )
    parser.add_argument("--repetitions", type=int, metavar="N", help="fresh runs of each (3; 1)")


def run(arguments: argparse.Namespace) -> Report:
    """Fresh ranks per contender and repetition, contenders in turn."""
    cases = arguments.case or (["small"] if arguments.quick else [c for c in CASES if c != "small"])
    repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    samples: dict[str, dict[str, dict[str, list[int]]]] = {case: {} for case in cases}
    failures: dict[str, str] = {}
    for case in cases:
        for _ in range(repetitions):
            for name in arguments.contender or (_QUICK if arguments.quick else _ALL):
                if name in LEAN and "tokens" not in CASES[case].large:
                    continue  # its embedding is no unit
                try:
                    ranks = _fresh_ranks(arguments.world, name, case, arguments.seed)
                except Exception as error:  # noqa: BLE001  # any failure of a contender is a result
                    failures[f"{case}: {name}"] = " ".join(str(error).split())[-300:]
                    continue
                phases = samples[case].setdefault(name, {phase: [] for phase in PHASES})
                for phase in PHASES:
                    phases[phase].append(max(rank[phase] for rank in ranks))
    least = {case: CASES[case].minimum(arguments.world) for case in cases}
    return Report(
        "memory",
        {
            "cases": {case: vars(CASES[case].shape) for case in cases},
            "world_size": arguments.world,
            "repetitions": repetitions,
        },
        arguments.seed,
        tuple(table(case, samples[case], least[case], arguments.world) for case in cases),
        {case: {**samples[case], "minimum": least[case].alone.parts()} for case in cases},
        failures,
        notes=(
            "MiB of the larger rank above the process before the model, median [quartiles] of repetitions.",
            "construction: unwrapped model, wrapping, optimizer object; first step: AdamW's moments included;",
            "rest: resident after a step.  / minimum: of the step, to the minimum and to the overlapped one.",
            "checkpoint: model and optimizer saved in shards, by torch.distributed.checkpoint or our own.",
            *(line for case in cases for line in _explained(case, least[case])),
        ),
    )


def _fresh_ranks(world_size: int, name: str, case: str, seed: int) -> list[dict[str, int]]:
    """The peaks of every rank."""
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder:
        return world.run_gloo(
            measure, world_size, environment=_MAPPED, name=name, case=case, seed=seed, folder=folder
        )


def _explained(case: str, least: Minimum) -> tuple[str, str]:
    alone, overlapped = least.alone, least.overlapped
    parts = ", ".join(f"{part} {size / _MIB:.0f}" for part, size in alone.parts().items() if size)
    return (
        f"{case}: minimum {alone.total / _MIB:.0f} ({alone.name}: {parts});",
        f"    {overlapped.total / _MIB:.0f} ({overlapped.name}) if a unit's reduction runs beside the next backward.",
    )


def measure(*, name: str, case: str, seed: int, folder: str) -> dict[str, int]:
    """This rank's peaks in bytes above what the process had before, by phase; checkpoints go to ``folder``.

    Collective: call on all ranks.
    """
    shape, setting = CASES[case].shape, CASES[case].setting
    torch.manual_seed(seed)
    tiny = Shape(1, dim=16, heads=2, vocabulary=32)  # loads what every contender needs anyway
    runner = build_runner(name, GPT(tiny), setting, tiny.tokens(0), _ALL)
    runner.forward_backward()
    runner.optimizer_step()
    save(name, runner, Path(folder, "tiny"))
    del runner
    gc.collect()
    before = read_status("VmRSS")

    def peak(phase: Any) -> tuple[Any, int]:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return phase(), read_status("VmHWM") - before

    def construct() -> Any:
        batch = shape.tokens(seed + dist.get_rank())
        return build_runner(name, GPT(shape), setting, batch, _ALL)

    def step() -> None:
        runner.forward_backward()
        runner.optimizer_step()

    runner, construction = peak(construct)
    gc.collect()
    _, first = peak(step)
    later = max(peak(step)[1] for _ in range(LATER_STEPS))
    rest = read_status("VmRSS") - before
    _, saving = peak(lambda: save(name, runner, Path(folder, "checkpoint")))
    return dict(zip(PHASES, (construction, first, later, rest, saving), strict=True))


def read_status(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def table(
    case: str,
    samples: Mapping[str, Mapping[str, list[int]]],
    least: Minimum,
    world_size: int,
) -> Table:
    """MiB per phase, and the step's ratio to both minima."""
    rows = []
    for name, phases in samples.items():
        step = summarize(phases["step"]).median
        rows.append(
            (
                name,
                *(summarize(phases[phase]).scaled(1 / _MIB).text(0) for phase in PHASES),
                *(f"{step / moment.total:.3f}" for moment in (least.alone, least.overlapped)),
            )
        )
    shape = CASES[case].shape
    large = f", {' and '.join(CASES[case].large)} apart" if CASES[case].large else ""
    title = (
        f"{case}: {shape.blocks} blocks of dim {shape.dim}, vocabulary {shape.vocabulary}{large}, "
        f"W={world_size}"
    )
    return Table(title, ("", *PHASES, "/ minimum", "/ overlapped"), tuple(rows))
