"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch

LIMIT = 12_000_000  # bytes; more than a demo can read


class Text:
    """Bytes of the standard library's source; every twentieth file is held out for evaluation.

    Attributes:
        train: ``[n]`` bytes to train on.
        held_out: ``[m]`` bytes of the other files.
    """

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py"))
        self.train = _read([path for i, path in enumerate(files) if i % 20])
        self.held_out = _read(files[::20])
        if not len(self.held_out):
            raise SystemExit(f"no source of the standard library in {folder}")


def rows(data: torch.Tensor, seed: int, numbers: range, context: int) -> torch.Tensor:
    """Pieces of ``data`` from random places, ``[len(numbers), context + 1]``.

    Each is a function of the seed and the row's number alone: any process can make any row, at any time.
    """
    last = len(data) - context - 1
    starts = [random.Random(f"{seed}-{number}").randrange(last) for number in numbers]
    return torch.stack([data[start : start + context + 1] for start in starts]).long()


def _read(files: list[Path]) -> torch.Tensor:
    data = b"\n".join(path.read_bytes() for path in files)[:LIMIT]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
