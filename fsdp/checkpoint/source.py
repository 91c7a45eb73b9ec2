"""A checkpoint open for reading: any span of any tensor, and pickled values, verified."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..flat.layout import Slot, Span
from .boxes import run_of
from .manifest import Chunk, Manifest, TensorEntry, dtype_named
from .raw import DataFiles, memory_of

__all__ = ["Source"]


class Source(AbstractContextManager["Source"]):
    """Reads one checkpoint; no process group, no more memory than what is asked for and one block.

    Attributes:
        folder: Where it is.
        manifest: What it holds, without the names that other ranks read (experts).
        files: Its data files.

    Raises:
        CheckpointError: If the manifest is damaged or a file is missing or short; names it.
    """

    def __init__(self, folder: Path, without: Collection[str] = ()) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        if without:
            self.manifest = self.manifest.without(without)
        self.files = DataFiles(folder)
        self.files.check_lengths(self.manifest.files.items())

    def __exit__(self, *exc_info: object) -> None:
        self.files.__exit__(*exc_info)

    def entry(self, key: str) -> TensorEntry:
        """What is known of the tensor ``key``."""
        return self.manifest.tensors[key]

    def meta(self, key: str) -> torch.Tensor:
        """The tensor ``key`` without values."""
        entry = self.entry(key)
        return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")

    def whole(self, key: str) -> torch.Tensor:
        """All of the tensor ``key``, on the CPU."""
        entry = self.entry(key)
        result = torch.empty(entry.shape, dtype=dtype_named(entry.dtype))
        everything = Span(0, entry.numel)
        for chunk in entry.chunks:
            run = run_of(entry.shape, chunk.offsets, chunk.sizes)
            if run is not None:
                self._read_run(key, chunk, run, everything, result.view(-1))
                continue
            place = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            result[place] = self.box(key, chunk)
        return result

    def box(self, key: str, chunk: Chunk) -> torch.Tensor:
        """All of one chunk of the tensor ``key``, on the CPU."""
        box = torch.empty(chunk.sizes, dtype=dtype_named(self.entry(key).dtype))
        self.files.read(chunk.stored, 0, memory_of(box), key)
        return box

    def piece(self, key: str, slot: Slot, span: Span) -> torch.Tensor:
        """Elements ``span`` of the tensor ``key``, counted in the memory order of ``slot``: ``[n]`` on the CPU.

        Only the bytes wanted are read where the slot is in row-major order and each chunk is a run in it; the whole
        tensor otherwise.
        """
        entry = self.entry(key)
        runs = [run_of(entry.shape, chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        if is_row_major(slot) and None not in runs:
            result = torch.empty(span.numel, dtype=dtype_named(entry.dtype))
            for chunk, run in zip(entry.chunks, runs, strict=True):
                if run is not None:
                    self._read_run(key, chunk, run, span, result)
            return result
        whole = self.whole(key).reshape(slot.shape)
        ordered = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype).copy_(whole)
        return ordered.as_strided((span.numel,), (1,), span.start)

    def value(self, key: str, *, weights_only: bool = True) -> Any:
        """The pickled value ``key``.

        Raises:
            CheckpointError: If it is damaged, or holds what ``weights_only`` does not allow; names it.
        """
        data = self.verified_bytes(key)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{key!r} in {self.folder} holds more than plain values and tensors ({error}). If you trust the "
                "checkpoint, pass weights_only=False."
            ) from error

    def verified_bytes(self, key: str) -> bytearray:
        """The pickled value ``key`` as it is stored.

        Raises:
            CheckpointError: If it is damaged; names the file.
        """
        stored = self.manifest.objects[key]
        data = bytearray(stored.nbytes)
        self.files.read(stored, 0, memoryview(data), key)
        return data

    def _read_run(self, key: str, chunk: Chunk, run: Span, span: Span, out: torch.Tensor) -> None:
        """Read what ``chunk``, the elements ``run``, has of the elements ``span``, to their places in ``out``."""
        part = run.clip(span)
        if part.numel:
            width = out.element_size()
            target = part.shift(-span.start)
            self.files.read(
                chunk.stored,
                (part.start - run.start) * width,
                memory_of(out)[target.start * width : target.stop * width],
                key,
            )


def is_row_major(slot: Slot) -> bool:
    """Whether the elements of ``slot`` lie in row-major order.  Pure."""
    step = 1
    for size, stride in zip(reversed(slot.shape), reversed(slot.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
