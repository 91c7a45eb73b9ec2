"""``python -m fsdp checkpoint``: one tensor in memory at a time, no process group."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..checkpoint.folder import find, sync
from ..checkpoint.manifest import TensorEntry, dtype_named
from ..checkpoint.raw import memory_of
from ..checkpoint.source import Source
from ..checkpoint.verifying import verify as every_byte
from ..errors import CheckpointError
from ..init.safetensors import DTYPES

__all__ = ["inspect", "merge", "verify"]

_MODEL = "model/"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def inspect(path: Path, *, chunks: bool = False) -> None:
    """Print what a checkpoint holds; only the manifest is read.  Collective: none.

    Raises:
        CheckpointError: If there is none, or its manifest is damaged.
    """
    with Source(find(path)) as source:
        manifest = source.manifest
        total = sum(manifest.files.values())
        _say(f"{source.folder}")
        _say(
            f"  number {manifest.number}, saved by {manifest.world_size} ranks{', in part' if manifest.partial else ''}"
        )
        _say(f"  {len(manifest.files)} data files, {_size(total)}")
        kinds = Counter(key.split("/")[0] for key in (*manifest.tensors, *manifest.objects))
        _say("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        for key, entry in sorted(manifest.tensors.items()):
            _say(f"  {key}  {entry.dtype} {list(entry.shape)}  {_size(_nbytes(entry))}")
            for chunk in entry.chunks if chunks else ():
                stored = chunk.stored
                _say(
                    f"    {list(chunk.offsets)} + {list(chunk.sizes)}: {stored.file} "
                    f"[{stored.start}, {stored.start + stored.nbytes})"
                )
        for key, stored in sorted(manifest.objects.items()):
            _say(f"  {key}  object  {_size(stored.nbytes)}")


def verify(path: Path) -> None:
    """As :func:`fsdp.checkpoint.verify`, with a progress bar and a last word.  Collective: none."""
    folder = find(path)
    with Source(folder) as source:
        total = sum(source.manifest.files.values())
    with _progress(total, "verify") as advance:
        every_byte(folder, advance)
    _say(f"{folder}: every byte is as it was written.")


# -- merge -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Output:
    """One file to write: its name, its tensors in order."""

    path: Path
    names: Sequence[str]


def merge(path: Path, out: Path, *, max_shard_size: int | None = None) -> None:
    """Write the model of a checkpoint as safetensors, bitwise what ``state_dict()`` held.

    One tensor is in memory at a time.  A file gets its name when it is whole.  Tied parameters are under each name
    that the checkpoint has.  Collective: none.

    Args:
        path: The checkpoint, or a folder of some.
        out: The file; the folder if there are to be several.
        max_shard_size: Most bytes of tensors a file holds, unless one tensor alone is larger.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged, or holds what safetensors can not.
    """
    with Source(find(path)) as source:
        entries = {
            key.removeprefix(_MODEL): entry
            for key, entry in sorted(source.manifest.tensors.items())
            if key.startswith(_MODEL)
        }
        odd = [name for name, entry in entries.items() if dtype_named(entry.dtype) not in _NAMES]
        if odd:
            raise CheckpointError(
                f"safetensors has no dtype for {odd[0]!r}: {entries[odd[0]].dtype}."
            )
        outputs = _outputs(entries, out, max_shard_size)
        total = sum(_nbytes(entry) for entry in entries.values())
        with _progress(total, "merge") as advance:
            for output in outputs:
                _write_file(source, entries, output, advance)
        if max_shard_size is not None:
            weight_map = {name: output.path.name for output in outputs for name in output.names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_whole(
                out / "model.safetensors.index.json",
                lambda file: file.write(json.dumps(index, indent=2).encode()),
            )
        _say(f"{len(entries)} tensors, {_size(total)}, in {len(outputs)} file(s): {out}")


def _outputs(entries: Mapping[str, TensorEntry], out: Path, most: int | None) -> list[_Output]:
    if most is None:
        out.parent.mkdir(parents=True, exist_ok=True)
        return [_Output(out, list(entries))]
    out.mkdir(parents=True, exist_ok=True)
    groups: list[list[str]] = [[]]
    room = most
    for name, entry in entries.items():
        if groups[-1] and _nbytes(entry) > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= _nbytes(entry)
    count = len(groups)
    return [
        _Output(out / f"model-{number:05d}-of-{count:05d}.safetensors", names)
        for number, names in enumerate(groups, 1)
    ]


def _write_file(
    source: Source,
    entries: Mapping[str, TensorEntry],
    output: _Output,
    advance: Callable[[int], None],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in output.names:
        entry = entries[name]
        stop = place + _nbytes(entry)
        header[name] = {
            "dtype": _NAMES[dtype_named(entry.dtype)],
            "shape": list(entry.shape),
            "data_offsets": [place, stop],
        }
        place = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of eight

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in output.names:
            advance(file.write(memory_of(source.whole(_MODEL + name))))

    _write_whole(output.path, write)


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write under another name, wait for the disk, rename."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


# -- what is printed ---------------------------------------------------------------------------------------------------


class _progress:  # noqa: N801 used as a function
    """A progress bar in bytes on a terminal, if tqdm is installed; nothing otherwise."""

    def __init__(self, total: int, title: str) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=title, unit="B", unit_scale=True)

    def __enter__(self) -> Callable[[int], None]:
        return self._advance

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)


def _nbytes(entry: TensorEntry) -> int:
    return entry.numel * torch.empty(0, dtype=dtype_named(entry.dtype)).element_size()


def _size(nbytes: int) -> str:
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= width:
            return f"{nbytes / width:.1f} {unit}"
    return f"{nbytes} B"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
