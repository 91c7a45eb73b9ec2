"""What a checkpoint holds and where: one JSON file, written last, that carries its own checksum.

::

    step-000100/
      manifest.json      every tensor's dtype, shape and chunks; every object; checksums of all of it
      rank-00000.bin     raw bytes, row-major, one chunk after another, no gaps
      rank-00001.bin

Keys are ``model/<fqn>``, ``optimizer/<state>/<fqn>``, ``optimizer``, ``extra/<name>`` and ``rng/<rank>``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

__all__ = ["BLOCK", "MANIFEST", "Chunk", "Head", "Manifest", "Stored", "TensorEntry", "dtype_named"]

MANIFEST = "manifest.json"
BLOCK = (
    1 << 20
)  # bytes under one checksum, so that a part of a chunk can be read and still be verified
_HEAD_BYTES = 512
_HEAD = re.compile(rb'"number": (\d+), .*?"disposable": (true|false)')
_FORMAT = "fsdp-checkpoint"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of bytes in a file.

    Attributes:
        file: Name of the file in the checkpoint's folder.
        start: Where the run begins.
        nbytes: How long it is.
        sums: CRC-32 of each :data:`BLOCK` of it.
    """

    file: str
    start: int
    nbytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins, how large it is, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the boxes that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Head:
    """What the first bytes of a manifest say, not verified: enough to put checkpoints in order.

    Attributes:
        number: See :class:`Manifest`.
        disposable: See :class:`Manifest`.
    """

    number: int
    disposable: bool

    @staticmethod
    def read(folder: Path) -> Head | None:
        """Read it; None where there is no manifest or it does not begin as one."""
        try:
            with (folder / MANIFEST).open("rb") as file:
                found = _HEAD.search(file.read(_HEAD_BYTES))
        except OSError:
            return None
        return None if found is None else Head(int(found[1]), found[2] == b"true")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The index of one checkpoint.

    Attributes:
        number: Grows by one from save to save in a folder; says which checkpoint is the newest.
        world_size: Ranks that saved.
        partial: Whether a filter left parameters out, so that a load does not miss them.
        disposable: Whether it was saved with ``keep_last`` and may be removed when it is old.
        files: Length in bytes of every data file.
        tensors: By key.
        objects: Pickled values, by key.
    """

    number: int
    world_size: int
    partial: bool
    disposable: bool
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Stored] = field(default_factory=dict)

    def without(self, names: Collection[str]) -> Manifest:
        """The same without the model's tensors and values of these names, and their optimizer state."""

        def is_wanted(key: str) -> bool:
            kind, _, rest = key.partition("/")
            fqn = rest.partition("/")[2] if kind == "optimizer" else rest
            return kind not in ("model", "optimizer") or fqn not in names

        return replace(
            self,
            tensors={key: value for key, value in self.tensors.items() if is_wanted(key)},
            objects={key: value for key, value in self.objects.items() if is_wanted(key)},
        )

    def write(self, path: Path) -> None:
        """Write it to ``path``; the caller makes it durable."""
        body = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)})
        text = f'{{"crc32": {zlib.crc32(body.encode())}, "body": {body}}}\n'
        path.write_text(text, encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read and verify the manifest of the checkpoint in ``folder``.

        Raises:
            CheckpointError: If it is missing, damaged, or of another format; names the file.
        """
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} can not be read: {error}.") from error
        head, marker, rest = text.partition(', "body": ')
        body = rest.removesuffix("}\n")
        if not marker or body == rest or head != f'{{"crc32": {zlib.crc32(body.encode())}':
            raise CheckpointError(f"{path} is damaged: its checksum does not match.")
        found = json.loads(body)
        if found.pop("format") != _FORMAT or found.pop("version") != _VERSION:
            raise CheckpointError(f"{path} is of another format than version {_VERSION}.")
        return Manifest(
            **{
                **found,
                "tensors": {key: _tensor(value) for key, value in found["tensors"].items()},
                "objects": {key: _stored(value) for key, value in found["objects"].items()},
            }
        )


def _stored(found: Mapping[str, Any]) -> Stored:
    return Stored(found["file"], found["start"], found["nbytes"], tuple(found["sums"]))


def _tensor(found: Mapping[str, Any]) -> TensorEntry:
    chunks: Sequence[Mapping[str, Any]] = found["chunks"]
    return TensorEntry(
        found["dtype"],
        tuple(found["shape"]),
        tuple(
            Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), _stored(chunk["stored"]))
            for chunk in chunks
        ),
    )


def dtype_named(name: str) -> torch.dtype:
    """The dtype that ``str(dtype)`` calls ``torch.<name>``.

    Raises:
        CheckpointError: If this version of torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint holds tensors of dtype {name!r}, which torch has not."
        )
    return dtype
