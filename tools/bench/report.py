"""What a benchmark hands back: tables for people, JSON with every sample for programs."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Report", "Table", "machine", "versions"]


@dataclass(frozen=True)
class Table:
    """Rows of text under one title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(self.columns)} columns, but a row {row}")

    def text(self) -> str:
        """The table in plain text: the first column to the left, the others to the right."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        rendered = [
            self.title,
            self._line(self.columns, widths),
            "-" * (sum(widths) + 2 * len(widths) - 2),
        ]
        rendered += [self._line(row, widths) for row in self.rows]
        return "\n".join(rendered)

    @staticmethod
    def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        cells_text = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "  ".join(cells_text).rstrip()


@dataclass(frozen=True)
class Report:
    """The result of one run of a benchmark.

    Attributes:
        benchmark: Its name.
        settings: What was measured: sizes, rounds, world size; plain data.
        seed: Seed of weights, data and the order within rounds.
        tables: For people.
        samples: Every sample as taken, in seconds or bytes: plain data, nested by case, contender and phase.
        failures: ``case: contender`` to what went wrong there.
        notes: Lines printed below the tables.
    """

    benchmark: str
    settings: Mapping[str, Any]
    seed: int
    tables: tuple[Table, ...]
    samples: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Tables, failures and notes in plain text."""
        where = machine()
        head = (
            f"{self.benchmark}: torch {versions()['torch']}, Python {platform.python_version()}, "
            f"{where['cores']} cores ({where['processor']}), load {where['load']}, seed {self.seed}"
        )
        parts = [head, *(table.text() for table in self.tables)]
        if self.failures:
            lines = [f"  {contender}: {error}" for contender, error in self.failures.items()]
            parts.append("\n".join(["did not run:", *lines]))
        if self.notes:
            parts.append("\n".join(self.notes))
        return "\n\n".join(parts)

    def json(self) -> str:
        """Everything as JSON: machine, versions, command, seed, settings, tables, all raw samples, failures."""
        document = {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(sys.argv),
            "machine": machine(),
            "versions": versions(),
            "seed": self.seed,
            "settings": dict(self.settings),
            "tables": [asdict(table) for table in self.tables],
            "samples": self.samples,
            "failures": dict(self.failures),
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"


def machine() -> dict[str, Any]:
    """The machine: system, processor, cores, memory in bytes, load average, GPU."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, CUDA and the package (None where it does not import)."""
    try:
        import fsdp

        package: str | None = fsdp.__version__
    except Exception:  # noqa: BLE001  # a broken package is a failure of its contenders, reported there
        package = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fsdp": package,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
