"""The safetensors format, read by byte range: eight bytes of length, a JSON header, then the tensors' bytes.

Files are mapped, not read: only pages that are copied from come into memory, and they are given back afterwards.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..flat.layout import Span

__all__ = ["DTYPES", "Entry", "SafetensorsFile", "open_all"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its dtype and shape, and where its bytes begin in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class SafetensorsFile:
    """One file, mapped.

    Attributes:
        path: Where it is.
        entries: Its tensors, by name.
        bytes_read: How many bytes of tensors have been asked for.

    Raises:
        CheckpointError: If it is missing or malformed; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            with path.open("rb") as file:
                # Private and writable, because torch warns of tensors over memory that is not.
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can not be read: {error}.") from error
        try:
            self.entries = dict(self._parse())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file, or damaged: {error}.") from error

    def _parse(self) -> Iterator[tuple[str, Entry]]:
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        base = _LENGTH_BYTES + length
        if base > len(self._memory):
            raise ValueError(f"its header should have {length} bytes")
        for name, found in json.loads(self._memory[_LENGTH_BYTES:base]).items():
            if name == "__metadata__":
                continue
            start, stop = found["data_offsets"]
            entry = Entry(DTYPES[found["dtype"]], tuple(found["shape"]), base + start)
            if stop - start != entry.numel * entry.dtype.itemsize or base + stop > len(
                self._memory
            ):
                raise ValueError(f"the bytes of {name!r} do not fit its shape or the file")
            yield name, entry

    def read(self, name: str, span: Span) -> torch.Tensor:
        """Elements ``span`` of a tensor in row-major order: ``[n]``, a view of the file; see :meth:`release`."""
        entry = self.entries[name]
        width = entry.dtype.itemsize
        if not span.numel:
            return torch.empty(0, dtype=entry.dtype)
        self.bytes_read += span.numel * width
        return torch.frombuffer(
            self._memory,
            dtype=entry.dtype,
            count=span.numel,
            offset=entry.start + span.start * width,
        )

    def release(self) -> None:
        """Give the pages that were read back to the system; views read them again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def open_all(path: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor, by name: of one file, of an index over several, or of a folder that holds either.

    Raises:
        CheckpointError: If there is none, or the index names tensors that its files have not.
    """
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix != ".json":
        file = SafetensorsFile(path)
        return dict.fromkeys(file.entries, file)
    try:
        weight_map: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: SafetensorsFile(path.parent / name) for name in set(weight_map.values())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}.") from error
    lost = [name for name, file in weight_map.items() if name not in files[file].entries]
    if lost:
        raise CheckpointError(
            f"{path} says that {weight_map[lost[0]]} has {lost[0]!r}: it has not."
        )
    return {name: files[file] for name, file in weight_map.items()}


def _in_folder(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(
                f"{folder} holds {len(found)} files {pattern}: give the path of one of them."
            )
    raise CheckpointError(f"{folder} holds no safetensors file and no index of some.")
