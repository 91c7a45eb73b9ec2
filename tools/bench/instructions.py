"""Instructions of a wrapper per unit and step, counted by callgrind: what ``host_overhead`` times, without the noise.

Model, group and what is subtracted are those of ``host_overhead``.  A count does not depend on what else runs, and
repeats to the instruction as long as no address decides anything: strings hash alike (``PYTHONHASHSEED=0``) and memory
lies where it lay (``setarch -R``).  It does not see what memory costs that is not in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import host_overhead
from .contenders import CONTENDERS
from .counted import MARKS
from .host_overhead import COLLECTIVES
from .report import Report
from .rounds import PHASES, Samples

__all__ = ["add_arguments", "compile_marks", "read_counts", "run", "scatter", "why_not"]

_NAMES = (*CONTENDERS, COLLECTIVES)
_QUICK_NAMES = tuple(name for name in _NAMES if name not in ("ddp", "fsdp1-orig"))
_SIZES = ((8, 3), (4, 3))  # blocks and counted steps: in full, and quick
_COUNT = re.compile(r"^desc: Trigger: Client Request: (\S+) (\S+) (\d+)$", re.MULTILINE)
_TOTAL = re.compile(r"^totals: (\d+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``instructions``."""
    parser.add_argument("--world", type=int, default=8, metavar="W", help="ranks (8)")
    parser.add_argument("--contender", choices=_NAMES, nargs="+", metavar="NAME", help="who (all)")


def why_not() -> str | None:
    """Why nothing can be counted here, or None if it can."""
    missing = [tool for tool in ("valgrind", "setarch", "cc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder:
        done = compile_marks(Path(folder))
    return f"cc: {done.stderr.strip()[-200:]}" if done.returncode else None


def run(arguments: argparse.Namespace) -> Report:
    """One process under valgrind, a fork of it per contender."""
    blocks, steps = _SIZES[arguments.quick]
    shape = host_overhead.tiny(blocks)
    names = arguments.contender or (_QUICK_NAMES if arguments.quick else _NAMES)
    settings = {
        "names": list(dict.fromkeys((*names, "plain", COLLECTIVES))),
        "shape": vars(shape),
        "world_size": arguments.world,
        "steps": steps,
        "seed": arguments.seed,
    }
    samples: Samples = {}
    failures: dict[str, str] = {}
    if (reason := why_not()) is not None:
        failures["all"] = reason
    else:
        samples, failures = _count(settings)
    title = f"W={arguments.world}, {blocks} blocks of dim {shape.dim}"
    table = host_overhead.table(title, samples, blocks + 1, host_overhead.THOUSANDS)
    return Report(
        "instructions",
        settings,
        arguments.seed,
        (table,) if samples else (),
        samples,
        failures,
        notes=(
            "thousands of instructions per unit and step, median [quartiles] of steps; fwd+bwd less (plain) and",
            f"({COLLECTIVES}) as in host_overhead, the optimizer as it is.  Garbage collection is not counted.",
            *(
                f"the counted steps of {name} differ by {share:.2%}"
                for name, share in scatter(samples)
            ),
        ),
    )


def scatter(samples: Samples) -> Iterable[tuple[str, float]]:
    """Contenders whose counts differ from step to step, and by what part of the median."""
    for name, phases in samples.items():
        counts = [step for steps in phases["forward_backward"] for step in steps]
        if (spread := max(counts) - min(counts)) > 0:
            yield name, spread / statistics.median(counts)


def _count(settings: dict[str, Any]) -> tuple[Samples, dict[str, str]]:
    """Run the counted process; a step is a round of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as name:
        folder = Path(name)
        compile_marks(folder)
        counted = (sys.executable, "-m", f"{__package__}.counted")
        command = [
            *("setarch", "-R", "valgrind", "--tool=callgrind", "--instr-atstart=no"),
            f"--callgrind-out-file={folder}/out.%p",
            *(*counted, str(folder / "marks.so"), name, json.dumps(settings)),
        ]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        failures = {path.stem: path.read_text("utf-8") for path in folder.glob("*.failed")}
        if done.returncode:
            failures["all"] = " ".join(done.stderr.split())[-300:]
        files = sorted(folder.glob("out.*"))
        samples = read_counts(path.read_text("utf-8", "replace") for path in files)
    lost = set(settings["names"]) - samples.keys() - failures.keys()
    return samples, failures | dict.fromkeys(lost, "ended without a count")


def compile_marks(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the client requests, which need valgrind's own header."""
    source = folder / "marks.c"
    source.write_text(MARKS, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(folder / "marks.so"), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read_counts(outputs: Iterable[str]) -> Samples:
    """Counts by contender and phase, steps in order, from what callgrind wrote at each mark."""
    counts: dict[str, dict[str, dict[int, float]]] = {}
    for text in outputs:
        mark, total = _COUNT.search(text), _TOTAL.search(text)
        if mark and total:
            phases = counts.setdefault(mark[1], {phase: {} for phase in PHASES})
            phases[mark[2]][int(mark[3])] = float(total[1])
    return {
        name: {
            phase: [[by_step[step]] for step in sorted(by_step)]
            for phase, by_step in phases.items()
        }
        for name, phases in counts.items()
    }
