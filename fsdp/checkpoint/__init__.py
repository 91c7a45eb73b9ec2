"""Checkpoints: sharded files that any number of ranks can load, complete or absent, verified when read."""

from __future__ import annotations

from .folder import latest
from .loading import Loaded, load, read_extra
from .saving import PendingSave, async_save, save
from .storage import CheckpointReader
from .verifying import verify

__all__ = [
    "CheckpointReader",
    "Loaded",
    "PendingSave",
    "async_save",
    "latest",
    "load",
    "read_extra",
    "save",
    "verify",
]
