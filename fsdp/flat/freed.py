"""Memory that freed parameters point to on the CPU, so that reading one by mistake cannot end the process.

Note [Freed memory]
    While a unit is sharded its unsharded storages have no memory.  Module code cannot see a leaf then, but a user's
    hook may have kept one, or a view of it, and a backward may reach a saved one past everything that would gather
    it.  Most operations check sizes and raise; element-wise kernels follow the pointer, and a null pointer ends the
    process.  So a freed storage has size zero, as before, and a pointer to a region of bytes ``0xFF``: not-a-number
    in every floating dtype, -1 in the integers.  What is computed from it is loud; where it can be known the unit
    raises an error of ours instead (``Unit._unawaited``), or autograd does (see ``UnshardedStorage``).
    The region is address space, not memory: one tile, mapped again and again.  Every freed storage of the process
    points to it.
    A write goes to a private copy of its page, and what is read there is no longer not-a-number: such copies are thrown
    away whenever a storage is freed for the first time, so they do not outlive the models that there were.
    On accelerators, and with a torch that cannot swap storages, freed storages point nowhere.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import torch

from .. import _torch

__all__ = ["freed_storage"]

_TILE_BYTES = 1 << 20
_SMALLEST_REGION = 64 << 20
_FILL = b"\xff"
_MAP_FIXED = 0x10  # the same on every architecture Linux has, as the next one
_MADV_DONTNEED = 4

_regions: list[tuple[int, int]] = []
"""Address and size of each, growing; never unmapped, since storages may point there."""


def freed_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage | None:
    """A storage of size zero that points to at least ``nbytes`` readable bytes; None where there is no such thing."""
    if device.type != "cpu" or _torch.swap_storages is None:
        return None
    _forget_writes()
    address = _region(nbytes)
    return None if address is None else _torch.storage_at(address, 0, device)


def _forget_writes() -> None:
    for address, size in _regions:
        _libc().madvise(address, size, _MADV_DONTNEED)


def _region(nbytes: int) -> int | None:
    for known, size in _regions:
        if size >= nbytes:
            return known
    size = max(_SMALLEST_REGION, -(-nbytes // _TILE_BYTES) * _TILE_BYTES)
    address = _map_tiles(size)
    if address is not None:
        _regions.append((address, size))
    return address


def _map_tiles(size: int) -> int | None:
    """Address of ``size`` bytes, all backed by one tile; None if the system has no way to do so."""
    if not hasattr(os, "memfd_create"):
        return None
    libc = _libc()
    failed = ctypes.c_void_p(-1).value
    access = mmap.PROT_READ | mmap.PROT_WRITE  # a write goes to a private copy of its page
    tile = os.memfd_create("fsdp-freed")
    try:
        os.write(tile, _FILL * _TILE_BYTES)
        base = libc.mmap(None, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if base is None or base == failed:
            return None
        fixed = mmap.MAP_PRIVATE | _MAP_FIXED
        for start in range(base, base + size, _TILE_BYTES):
            if libc.mmap(start, _TILE_BYTES, access, fixed, tile, 0) == failed:
                return None
    finally:
        os.close(tile)
    return int(base)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
