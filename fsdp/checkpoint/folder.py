"""Folders of checkpoints: a new one appears whole or not at all, and old ones go only when newer ones are good.

Note [Commit]
    A checkpoint is written into ``<name>.incomplete`` beside its place.  When every rank has written and synchronised
    its file, the first rank writes the manifest, synchronises it and the folder, and renames the folder to ``<name>``:
    one atomic step.  Then it synchronises the parent.

    ========================  ===============================================================================
    a crash                   leaves
    ========================  ===============================================================================
    before the rename         ``<name>.incomplete``, which nothing loads and the next save of that name removes
    after the rename          the new checkpoint, whole
    while replacing           ``<name>.replaced``, the old one, which loads under ``<name>`` until that is there
    while removing old ones   ``<old>.removing``, which nothing loads and the next removal finishes
    ========================  ===============================================================================

    No data of an earlier checkpoint is touched before the new one is in its place.
"""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, FsdpWarning
from .manifest import MANIFEST, Head, Manifest
from .raw import DataFiles

__all__ = ["Place", "checkpoints_in", "find", "is_good", "latest"]

_INCOMPLETE, _REPLACED, _REMOVING = ".incomplete", ".replaced", ".removing"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint is going to be.

    Attributes:
        path: Its folder.
        overwrite: Whether one that is there may be replaced.
        keep_last: How many good ones with ``keep_last`` stay in the parent folder; None removes none.
    """

    path: Path
    overwrite: bool
    keep_last: int | None

    @property
    def incomplete(self) -> Path:
        """Where it is written."""
        return self.path.with_name(self.path.name + _INCOMPLETE)

    def prepare(self) -> int:
        """Make an empty folder to write into and return the number of the new checkpoint.

        Raises:
            CheckpointError: If something is in its place already.
        """
        if self.path.exists() and not self.overwrite:
            raise CheckpointError(
                f"{self.path} exists already: save under another name, or pass overwrite=True."
            )
        if self.path.exists() and not _is_ours(self.path):
            raise CheckpointError(f"{self.path} is no checkpoint: it is not replaced.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.abandon()
        self.incomplete.mkdir()
        return 1 + max((head.number for _, head in checkpoints_in(self.path.parent)), default=0)

    def commit(self, manifest: Manifest) -> None:
        """Let the checkpoint appear (see Note [Commit]), then remove old ones."""
        manifest.write(self.incomplete / MANIFEST)
        sync(self.incomplete / MANIFEST)
        sync(self.incomplete)
        replaced = self.path.with_name(self.path.name + _REPLACED)
        if self.path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.path.rename(replaced)
        self.incomplete.rename(self.path)
        sync(self.path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        if self.keep_last is not None:
            self._remove_old(self.keep_last)

    def abandon(self) -> None:
        """Remove what an unfinished save has left."""
        shutil.rmtree(self.incomplete, ignore_errors=True)

    def _remove_old(self, keep_last: int) -> None:
        parent = self.path.parent
        try:
            for left in (*parent.glob(f"*{_REMOVING}"), *parent.glob(f"*{_INCOMPLETE}")):
                if _is_ours(left):
                    shutil.rmtree(left)
            kept = 0
            for path, head in checkpoints_in(parent):
                if not head.disposable:
                    continue
                if kept < keep_last:
                    kept += is_good(path)
                    continue
                doomed = path.with_name(path.name + _REMOVING)
                path.rename(doomed)
                sync(parent)
                shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(
                f"an old checkpoint in {parent} could not be removed: {error}. The new one is whole.",
                FsdpWarning,
                stacklevel=2,
            )


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(parent: Path) -> list[tuple[Path, Head]]:
    """The complete checkpoints in a folder, newest first; their manifests are not verified."""
    found = []
    for manifest in parent.glob(f"*/{MANIFEST}"):
        path = manifest.parent
        head = Head.read(path)
        if head is not None and path.suffix not in (_INCOMPLETE, _REMOVING, _REPLACED):
            found.append((path, head))
    return sorted(found, key=lambda item: item[1].number, reverse=True)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but what a save writes."""
    return folder.is_dir() and all(
        item.name == MANIFEST or item.match("rank-*.bin") for item in folder.iterdir()
    )


def is_good(path: Path) -> bool:
    """Whether a checkpoint's manifest is whole and its files have their lengths."""
    try:
        DataFiles(path).check_lengths(Manifest.read(path).files.items())
    except CheckpointError:
        return False
    return True


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in a folder that is complete and whose files have their lengths; None if there is none.

    Collective: none.

    Example::

        newest = checkpoint.latest("runs/gpt")
        if newest is not None:
            checkpoint.load(newest, model, optimizer)
    """
    folder = Path(parent)
    replaced = [path for path in folder.glob(f"*{_REPLACED}") if not path.with_suffix("").exists()]
    found = [(path, head.number) for path, head in checkpoints_in(folder)]
    found += [(path, Manifest.read(path).number) for path in replaced if is_good(path)]
    for path, _ in sorted(found, key=lambda item: item[1], reverse=True):
        if is_good(path):
            return path
    return None


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at ``path``, or the newest good one in it.

    Raises:
        CheckpointError: If there is none; says what is there.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists():
        return folder
    replaced = folder.with_name(folder.name + _REPLACED)
    if not folder.exists() and is_good(replaced):
        return replaced
    newest = latest(folder)
    if newest is not None:
        return newest
    incomplete = [
        item.name for item in (*folder.glob(f"*{_INCOMPLETE}"), _incomplete_beside(folder))
    ]
    there = [name for name in incomplete if name]
    if any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder / MANIFEST} is missing: the checkpoint is incomplete.")
    raise CheckpointError(
        f"there is no complete checkpoint at {folder}"
        + (f"; a save was not finished: {', '.join(there)}." if there else ".")
    )


def _incomplete_beside(folder: Path) -> Path:
    beside = folder.with_name(folder.name + _INCOMPLETE)
    return beside if beside.exists() else Path()
