"""The process that callgrind counts: each contender takes a few steady steps in a fork of its own.

    python -m tools.bench.counted MARKS.so FOLDER '{"names": [...], ...}'

``instructions`` starts it under valgrind, which translates every instruction; forks share what the imports cost.
Counting is on within the phases of the counted steps alone, switched by client requests (``MARKS``), so that building
and warming up run at the speed of valgrind without a tool.  Garbage is collected before each counted step, never in it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from . import host_overhead, world
from .models import Shape
from .rounds import Steps

__all__ = ["MARKS", "Marks", "count_steps", "main"]

MARKS = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(const char *label) { CALLGRIND_DUMP_STATS_AT(label); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_WARM_UP = 8  # ours looks closely at its first, second, fourth, eighth ... forward
_IMPORTED = ("torch.distributed.fsdp", "torch.distributed.device_mesh", "fsdp", "fsdp.wrap")


class Marks(Protocol):
    """The client requests, as C functions."""

    def start(self) -> None:
        """Count from here on, from zero."""

    def stop(self, label: bytes) -> None:
        """Write the count under ``label`` and count no more."""


def main(library: str, folder: str, settings: str) -> int:
    """Count every contender of ``settings``, as many at once as there are cores."""
    torch.set_num_threads(1)
    for module in _IMPORTED:
        importlib.import_module(module)
    marks: Any = ctypes.CDLL(library)
    wanted = json.loads(settings)
    running: set[int] = set()
    for name in wanted.pop("names"):
        if len(running) == len(os.sched_getaffinity(0)):
            running.discard(os.wait()[0])
        process = os.fork()
        if not process:
            _be_counted(name, marks, Path(folder), wanted)
        running.add(process)
    while running:
        running.discard(os.wait()[0])
    return 0


def _be_counted(name: str, marks: Marks, folder: Path, settings: dict[str, Any]) -> None:
    """The fork's whole life: it never returns into its parent's loop."""
    failure = ""
    try:
        with world.fake_group(settings["world_size"]):
            runner, failure = _runner(name, Shape(**settings["shape"]), settings)
            if not failure:
                count_steps(name, runner, marks, settings["steps"])
    except Exception as error:  # noqa: BLE001  # any failure of a contender is a result
        failure = f"{type(error).__name__}: {error}"
    finally:
        if failure:
            (folder / f"{name}.failed").write_text(failure, encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)


def _runner(name: str, shape: Shape, settings: dict[str, Any]) -> tuple[Any, str]:
    """The contender, warmed up, or what went wrong."""
    if name == host_overhead.COLLECTIVES:
        return host_overhead.BareCollectives(shape, settings["world_size"]), ""
    runners, failures = host_overhead.tiny_runners(
        shape, settings["seed"], (name,), warm_up=_WARM_UP
    )
    return runners.get(name), failures.get(name, "")


def count_steps(name: str, runner: Steps, marks: Marks, steps: int) -> None:
    """Take ``steps`` steps; phases of step i are counted as ``name forward_backward i`` and ``name optimizer i``."""
    gc.collect()
    gc.disable()
    for step in range(steps):
        marks.start()
        runner.forward_backward()
        marks.stop(f"{name} forward_backward {step}".encode())
        marks.start()
        runner.optimizer_step()
        marks.stop(f"{name} optimizer {step}".encode())
        gc.collect()
    gc.enable()


def _of_command_line(arguments: Sequence[str]) -> int:
    library, folder, settings = arguments
    return main(library, folder, settings)


if __name__ == "__main__":
    sys.exit(_of_command_line(sys.argv[1:]))
