"""How torch.distributed.checkpoint writes and reads our folders: the plan, the writer, the reader.

torch's planner checks that boxes tile their tensors, and its driver makes every rank learn of any rank's failure in
each phase; who writes what several ranks hold, bytes, checksums and the commit are ours.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .boxes import Box
from .contents import Pickled
from .folder import Place
from .manifest import Chunk, Manifest, Stored, TensorEntry, dtype_named
from .parts import Part
from .raw import memory_of, write_run
from .source import Source

__all__ = ["CheckpointReader", "ContentsPlanner", "FolderWriter"]


class ContentsPlanner(DefaultSavePlanner):
    """Plans a save of :class:`Part` and :class:`Pickled` values: an item for each box, written by one rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents: Mapping[str, Part | Pickled] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Remember what this rank has."""
        self._contents = state_dict
        self.state_dict, self.mappings = state_dict, {}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank has: one item for each box, and for each pickled value."""
        items: list[WriteItem] = []
        for key, value in self._contents.items():
            if isinstance(value, Pickled):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            else:
                items += [_tensor_item(key, value, box) for box in value.boxes]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank: divide what several ranks have, then see that boxes tile each tensor, as torch does."""
        return super().create_global_plan(_divided(all_plans))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item, on the host; a copy of those that lie elsewhere or in another order."""
        value = self._contents[write_item.index.fqn]
        if isinstance(value, Pickled):
            return io.BytesIO(value.data)
        assert write_item.index.offset is not None
        return value.values(write_item.index.offset)


def _divided(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Each item in the plan of one rank only, of those that have it: the one with the fewest bytes so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    nbytes = [0] * len(plans)
    taken: list[set[MetadataIndex]] = [set() for _ in plans]
    for plan in plans:
        for item in plan.items:
            ranks = holders.pop(item.index, ())
            if ranks:
                rank = min(ranks, key=nbytes.__getitem__)
                nbytes[rank] += _nbytes(item)
                taken[rank].add(item.index)
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if item.index in mine])
        for plan, mine in zip(plans, taken, strict=True)
    ]


def _nbytes(item: WriteItem) -> int:
    """What an item takes in a file; of a pickled value that is not known, and little."""
    data = item.tensor_data
    return 1 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _tensor_item(key: str, part: Part, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    return WriteItem(
        MetadataIndex(key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
            TensorProperties(part.memory.dtype),
            torch.Size(part.shape),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one rank writes."""

    folder: Path
    file: str
    number: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank wrote of one item: the run, and for a tensor its box."""

    stored: Stored
    chunk: Chunk | None = None


class FolderWriter(StorageWriter):
    """Writes one file a rank and commits the folder (see Note [Commit]).

    Args:
        place: Where; that of the first rank counts.
        world_size: Ranks that save.
        partial: Whether parameters were left out.
    """

    def __init__(self, place: Place, world_size: int, *, partial: bool) -> None:
        self._place = place
        self._world_size = world_size
        self._partial = partial
        self._number = 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: make the folder and say where each rank writes."""
        self._number = self._place.prepare()
        folder = self._place.incomplete.absolute()
        return [
            dataclasses.replace(
                plan, storage_data=_Target(folder, f"rank-{rank:05d}.bin", self._number)
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: write its items one after another and wait for the disk."""
        target: _Target = plan.storage_data
        path = target.folder / target.file
        results = []
        with path.open("xb") as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    assert item.tensor_data is not None
                    chunk = item.tensor_data.chunk
                    stored = write_run(file, memory_of(data))
                    written = _Written(
                        stored, Chunk(tuple(chunk.offsets), tuple(chunk.sizes), stored)
                    )
                else:
                    written = _Written(write_run(file, data.getbuffer()))
                results.append(WriteResult(item.index, written.stored.nbytes, written))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: commit."""
        chunks: dict[str, list[Chunk]] = {}
        objects: dict[str, Stored] = {}
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            if written.chunk is None:
                objects[result.index.fqn] = written.stored
            else:
                chunks.setdefault(result.index.fqn, []).append(written.chunk)
        tensors = {}
        for key, entry in sorted(metadata.state_dict_metadata.items()):
            if isinstance(entry, TensorStorageMetadata):
                dtype = str(entry.properties.dtype).removeprefix("torch.")
                ordered = sorted(chunks[key], key=lambda chunk: chunk.offsets)
                tensors[key] = TensorEntry(dtype, tuple(entry.size), tuple(ordered))
        files = {path.name: path.stat().st_size for path in self._place.incomplete.glob("*.bin")}
        disposable = self._place.keep_last is not None
        manifest = Manifest(
            self._number, self._world_size, self._partial, disposable, files, tensors, objects
        )
        self._place.commit(manifest)


class CheckpointReader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read our folders.

    Keys are those of :mod:`fsdp.checkpoint.manifest`: ``model/<fqn>`` and so on.

    Example::

        state = {f"model/{name}": value for name, value in sharded.items()}
        torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = Source(Path(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another folder, if one is given."""
        if checkpoint_id is not None:
            self._source = Source(Path(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's terms."""
        manifest = self._source.manifest
        found: dict[str, Any] = {key: BytesStorageMetadata() for key in manifest.objects}
        for key, entry in manifest.tensors.items():
            found[key] = TensorStorageMetadata(
                TensorProperties(dtype_named(entry.dtype)),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave them."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each item's chunk, verified, and hand over the box that is wanted of it."""
        chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._source.verified_bytes(key)))
                continue
            if key not in chunks:
                chunks[key] = {chunk.offsets: chunk for chunk in self._source.entry(key).chunks}
            chunk = chunks[key][tuple(item.storage_index.offset or ())]
            wanted = tuple(
                slice(start, start + size)
                for start, size in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.box(key, chunk)[wanted])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
