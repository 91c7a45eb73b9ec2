"""Bytes of tensors to files and back, under a checksum a block; every error names the file."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import CheckpointError
from .manifest import BLOCK, Stored

__all__ = ["DataFiles", "memory_of", "write_run"]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy; the view keeps the tensor alive."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]  # noqa: SLF001 the view refers to it, and it to the tensor
    return memoryview(memory).cast("B")


def write_run(file: BinaryIO, data: memoryview) -> Stored:
    """Append ``data`` to ``file`` and say where it is.

    Raises:
        OSError: If the disk does not take it.
    """
    start = file.tell()
    sums = []
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        sums.append(zlib.crc32(block))
        file.write(block)
    return Stored(Path(file.name).name, start, len(data), tuple(sums))


class DataFiles(AbstractContextManager["DataFiles"]):
    """The data files of one checkpoint, open for reading.

    Attributes:
        bytes_read: How many bytes have been read so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._closing = ExitStack()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.bytes_read = 0

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()
        self._open.clear()

    def check_lengths(self, expected: Iterable[tuple[str, int]]) -> None:
        """See that every file is there and whole, without reading it.

        Raises:
            CheckpointError: Naming the first that is not.
        """
        for name, nbytes in expected:
            path = self._folder / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} is missing from the checkpoint: {error}.") from error
            if found != nbytes:
                raise CheckpointError(
                    f"{path} is damaged: it has {found} bytes, the manifest says {nbytes}."
                )

    def read(self, stored: Stored, start: int, out: memoryview, what: str) -> None:
        """Fill ``out`` with bytes ``[start, start + len(out))`` of a run, verified.

        Whole blocks go straight to ``out``; of a block that is wanted in part, all is read, for its checksum.

        Args:
            stored: The run.
            start: First byte in the run.
            out: Where to.
            what: The key, for errors.

        Raises:
            CheckpointError: If the file is missing, short or damaged; names it and ``what``.
        """
        stop = start + len(out)
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = number * BLOCK, min((number + 1) * BLOCK, stored.nbytes)
            begin, end = max(first, start), min(last, stop)
            is_whole = (begin, end) == (first, last)
            block = (
                out[first - start : last - start] if is_whole else self._buffer()[: last - first]
            )
            self._fill(stored, first, block, what)
            if zlib.crc32(block) != stored.sums[number]:
                raise CheckpointError(
                    f"{self._folder / stored.file} is damaged: bytes {stored.start + first} to "
                    f"{stored.start + last}, of {what!r}, do not match their checksum."
                )
            if not is_whole:
                out[begin - start : end - start] = block[begin - first : end - first]

    def _fill(self, stored: Stored, first: int, block: memoryview, what: str) -> None:
        path = self._folder / stored.file
        try:
            count = os.preadv(self._descriptor(stored.file), [block], stored.start + first)
        except OSError as error:
            raise CheckpointError(f"{path}, with {what!r}, can not be read: {error}.") from error
        if count != len(block):
            raise CheckpointError(f"{path} is damaged: it ends within {what!r}.")
        self.bytes_read += count

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_RDONLY)
            self._closing.callback(os.close, self._open[name])
        return self._open[name]

    def _buffer(self) -> memoryview:
        if not self._scratch.numel():
            self._scratch = torch.empty(BLOCK, dtype=torch.uint8)
        return memory_of(self._scratch)
