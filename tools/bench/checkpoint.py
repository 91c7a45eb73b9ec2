"""Time of saving and loading model and optimizer in shards, 2 gloo ranks, one thread each.

All contenders live in one process and save and load by turns.  A phase starts at a barrier and lasts as long as on its
slower rank; what is loaded goes back into the model that was saved.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import world
from .contenders import CONTENDERS, PLAIN, Runner, Setting, build_all
from .models import GPT, Block, Shape
from .report import Report, Table
from .stats import ratio, summarize

__all__ = ["add_arguments", "load", "measure", "run", "save", "table"]

PHASES = ("save", "load")
REFERENCES = ("fsdp1-flat", "fsdp2")
SHARDED = tuple(name for name in CONTENDERS if name not in (PLAIN, "ddp"))
_SHAPE = Shape(6, dim=768, heads=12, vocabulary=25000, sequence=16)  # 81M parameters
_QUICK = Shape(4, dim=512, heads=8, sequence=16)  # 13M

Seconds = dict[str, dict[str, list[float]]]  # contender -> phase -> round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``checkpoint``."""
    parser.add_argument("--world", type=int, default=2, metavar="W", help="ranks (2)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="with a save and a load each (5; 3)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="where to save (in memory: /dev/shm)"
    )


def run(arguments: argparse.Namespace) -> Report:
    """One world with every contender."""
    shape = _QUICK if arguments.quick else _SHAPE
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-", dir=arguments.folder) as folder:
        ranks = world.run_gloo(
            measure,
            arguments.world,
            shape=vars(shape),
            rounds=rounds,
            seed=arguments.seed,
            folder=folder,
        )
    seconds = _slowest([rank["seconds"] for rank in ranks])
    size = sum(parameter.numel() for parameter in GPT(shape).parameters())
    title = f"{size / 1e6:.0f}M parameters with AdamW, W={arguments.world}, in {arguments.folder}"
    return Report(
        "checkpoint",
        {"shape": vars(shape), "world_size": arguments.world, "rounds": rounds},
        arguments.seed,
        (table(title, seconds, ranks[0]["bytes"]),),
        {"seconds": seconds, "bytes": ranks[0]["bytes"]},
        ranks[0]["failures"],
        notes=(
            "s of the slower rank, and ratios of it, median [quartiles] of rounds.",
            "ours by fsdp.checkpoint, which also writes checksums and commits whole; the others by",
            "torch.distributed.checkpoint with get_state_dict and set_state_dict.",
        ),
    )


def measure(
    *,
    shape: Mapping[str, int],
    rounds: int,
    seed: int,
    folder: str,
    names: Sequence[str] = SHARDED,
) -> dict[str, Any]:
    """This rank's seconds by contender and phase, the bytes of a checkpoint, and what failed.

    Collective: call on all ranks.
    """
    torch.manual_seed(seed)
    sizes = Shape(**shape)
    batch = sizes.tokens(seed + dist.get_rank())
    runners, failures = build_all(names, GPT(sizes), Setting(frozenset({Block})), batch)
    seconds: Seconds = {name: {phase: [] for phase in PHASES} for name in runners}
    written: dict[str, int] = {}
    order, shuffle = list(runners), random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            place, runner = Path(folder, name), runners[name]
            seconds[name]["save"].append(_timed(lambda: save(name, runner, place)))  # noqa: B023
            seconds[name]["load"].append(_timed(lambda: load(name, runner, place)))  # noqa: B023
            written[name] = sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
            dist.barrier()
    return {"seconds": seconds, "bytes": written, "failures": failures}


def save(name: str, runner: Runner, folder: Path) -> None:
    """Save model and optimizer in shards, as the contender's documentation does.

    Collective: call on all ranks.
    """
    if name.startswith("ours"):
        from fsdp import checkpoint

        checkpoint.save(folder, runner.model, runner.optimizer)
        return
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what it uses itself
        dcp.save(_states(runner), checkpoint_id=folder)


def load(name: str, runner: Runner, folder: Path) -> None:
    """Load what :func:`save` has written.

    Collective: call on all ranks.
    """
    if name.startswith("ours"):
        from fsdp import checkpoint

        checkpoint.load(folder, runner.model, runner.optimizer)
        return
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = _states(runner)
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            runner.model,
            runner.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )


def _states(runner: Runner) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(runner.model, runner.optimizer)
    return {"model": model, "optimizer": optimizer}


def _timed(phase: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    phase()
    return time.perf_counter() - start


def _slowest(ranks: Sequence[Seconds]) -> Seconds:
    """Each phase as long as on the rank where it took longest."""
    return {
        name: {
            phase: [
                max(times) for times in zip(*(rank[name][phase] for rank in ranks), strict=True)
            ]
            for phase in PHASES
        }
        for name in ranks[0]
    }


def table(title: str, seconds: Seconds, written: Mapping[str, int]) -> Table:
    """Seconds of both phases with ratios to torch's wrappers, and MiB written."""
    references = [name for name in REFERENCES if name in seconds]
    rows = []
    for name, phases in seconds.items():
        cells = [name]
        for phase in PHASES:
            cells.append(summarize(phases[phase]).text(2))
            for reference in references:
                value = ratio(phases[phase], seconds[reference][phase])
                cells.append("-" if value is None else value.text(2))
        rows.append((*cells, f"{written[name] / (1 << 20):.0f}"))
    columns = [""]
    for phase in PHASES:
        columns += [f"{phase} s", *(f"/ {name}" for name in references)]
    return Table(title, (*columns, "MiB"), tuple(rows))
