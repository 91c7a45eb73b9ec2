"""Where shards rest when they do not rest where the unit computes: host memory, or files mapped into it.

Note [Mapped files]
    A tensor in a mapped file is an ordinary CPU tensor; the system reads its pages when they are touched and writes
    them back when memory is short, so tensors of this kind may be larger than memory together.  Three rules:

    - The file is unlinked as soon as it is mapped: it lives as long as its tensor and a crash leaves nothing behind.
    - ``release`` takes pages out of this process (``MADV_DONTNEED``), which for a shared mapping loses nothing: the
      file has them.  On private memory the same call would zero it, so it is made only for storages that say that
      they are mapped from a file.
    - ``fetch`` brings pages in on a thread of its own, so that disk and computation overlap; a reader that comes too
      late costs time and nothing else.

    Tensors below 64 KiB stay in ordinary memory: a mapping is a whole number of pages, and a process may have only
    some ten thousand of them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from ..errors import ConfigError

__all__ = ["Home", "HostMemory", "MappedFiles", "give_back_freed", "is_mapped"]

_SMALLEST_MAPPED = 64 << 10
_PAGE = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3
_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14; older ones refuse it


class Home(Protocol):
    """Memory that shards, their gradients and optimizer states rest in."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor ``[numel]`` in this memory; its values are undefined."""

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in this memory: same shape, dtype and values, contiguous."""

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are wanted soon."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are not wanted soon; their values stay."""


class _Settling:
    """What all homes share."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor ``[numel]`` in this memory; its values are undefined."""
        raise NotImplementedError

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in this memory."""
        copy = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach())


class HostMemory(_Settling):
    """The host's memory; page-locked, so that copies to and from an accelerator run beside the computation.

    Args:
        pinned: Whether to lock pages.  Locked memory comes from torch's caching allocator, which rounds sizes up to
            powers of two.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor ``[numel]`` on the host; its values are undefined."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing: they are there."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing: they stay there."""


class MappedFiles(_Settling):
    """Files in a folder, mapped into memory (see Note [Mapped files]).

    Args:
        folder: Where; on a disk, not in a file system that is itself memory.

    Raises:
        ConfigError: If it is no folder that can be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK):
            raise ConfigError(
                f"the offload folder {str(folder)!r} is no folder that this rank can write to: create it on every host "
                "before wrapping."
            )
        _keep_large_blocks_out_of_the_heap()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor ``[numel]`` in a file of its own; zeros, which take no disk until they are written."""
        nbytes = numel * dtype.itemsize
        if nbytes < _SMALLEST_MAPPED:
            return torch.zeros(numel, dtype=dtype)
        descriptor, path = tempfile.mkstemp(prefix="fsdp-", dir=self._folder)
        os.close(descriptor)
        try:
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
        finally:
            Path(path).unlink()
        return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]

    def settle(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in a file; none of its pages stays in this process."""
        copy = super().settle(tensor)
        self.release([copy])
        return copy

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is worth a file and has none."""
        return tensor.nbytes >= _SMALLEST_MAPPED and not is_mapped(tensor)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the reader thread bring their pages in."""
        spans = _mapped_spans(tensors)
        if spans:
            _reader().submit(_bring_in, spans)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take their pages out of this process."""
        for address, nbytes, _ in _mapped_spans(tensors):
            _madvise(address, nbytes, _MADV_DONTNEED)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is a mapped file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


_Span = tuple[int, int, torch.UntypedStorage]  # address, bytes, and what keeps them mapped


def _mapped_spans(tensors: Iterable[torch.Tensor]) -> list[_Span]:
    """The whole pages under each mapped tensor."""
    spans = []
    for tensor in tensors:
        if tensor.numel() and is_mapped(tensor):
            first = tensor.data_ptr()
            start = first - first % _PAGE
            spans.append((start, first + tensor.nbytes - start, tensor.untyped_storage()))
    return spans


def _bring_in(spans: Iterable[_Span]) -> None:
    for address, nbytes, _ in spans:
        if _madvise(address, nbytes, _MADV_POPULATE_READ) != 0:
            _madvise(address, nbytes, _MADV_WILLNEED)


@functools.cache
def _reader() -> ThreadPoolExecutor:
    """The one thread that reads ahead, started when something is first fetched."""
    return ThreadPoolExecutor(1, thread_name_prefix="fsdp-reader")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


@functools.cache
def _keep_large_blocks_out_of_the_heap() -> None:
    """Have the allocator of glibc map blocks of a mebibyte and more, so that freeing one gives its memory back.

    By itself it raises this bound to the largest block freed so far, and keeps what is freed between other blocks.
    """
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def give_back_freed(device: torch.device) -> None:
    """Have the allocator of ``device`` return what is free to the system, or to other programs on the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """The system call, without Python's lock; 0 where it did what it was told."""
    return int(_libc().madvise(address, nbytes, advice))
