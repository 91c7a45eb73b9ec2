"""Every byte of a checkpoint against its checksum, without a process group."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CheckpointError
from .folder import find
from .manifest import BLOCK, Stored
from .source import Source

__all__ = ["verify"]


def verify(path: str | os.PathLike[str], advance: Callable[[int], object] = lambda _: None) -> None:
    """Read every byte of a checkpoint and compare its checksum; needs one megabyte of memory.  Collective: none.

    Args:
        path: A checkpoint, or a folder of some, of which the newest is taken.
        advance: Called with the number of bytes after each part.

    Raises:
        CheckpointError: Naming every file that is missing or damaged.

    Example::

        checkpoint.verify("runs/gpt/step-000700")
    """
    with Source(find(path)) as source:
        manifest = source.manifest
        runs = list(manifest.objects.items())
        runs += [
            (key, chunk.stored) for key, entry in manifest.tensors.items() for chunk in entry.chunks
        ]
        runs.sort(key=lambda run: (run[1].file, run[1].start))
        damage = []
        for key, stored in runs:
            try:
                _verify_run(source, key, stored, advance)
            except CheckpointError as error:
                damage.append(str(error))
        if damage:
            raise CheckpointError("\n".join(damage))


def _verify_run(source: Source, key: str, stored: Stored, advance: Callable[[int], object]) -> None:
    block = memoryview(bytearray(min(BLOCK, stored.nbytes)))
    for start in range(0, stored.nbytes, BLOCK):
        part = block[: min(BLOCK, stored.nbytes - start)]
        source.files.read(stored, start, part, key)
        advance(len(part))
