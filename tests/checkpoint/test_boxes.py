"""What ranks hold are spans; what a checkpoint stores are boxes: the one gives the other, and any tiling is read."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp.checkpoint import CheckpointReader
from fsdp.checkpoint.boxes import boxes_of, run_of
from fsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry
from fsdp.checkpoint.raw import memory_of, write_run
from fsdp.checkpoint.source import Source
from fsdp.flat.layout import Slot, Span

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def counted(shape):
    """A tensor whose elements are their numbers."""
    return torch.arange(math.prod(shape)).view(shape)


def cut(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def spans(data, numel):
    start = data.draw(st.integers(0, numel))
    return Span(start, data.draw(st.integers(start, numel)))


# -- pure --------------------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(SHAPES, st.data())
def test_a_span_is_at_most_two_d_less_one_boxes_that_follow_each_other(shape, data):
    whole, span = counted(shape), spans(data, math.prod(shape))
    boxes = boxes_of(shape, span)
    found = [cut(whole, box.offsets, box.sizes).reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([whole.new_empty(0), *found]), torch.arange(span.start, span.stop))
    assert [box.numel for box in boxes] == [len(part) for part in found]
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=400)
@given(SHAPES, st.data())
def test_a_box_is_a_run_where_its_elements_follow_each_other(shape, data):
    sides = [spans(data, length) for length in shape]
    offsets, sizes = [side.start for side in sides], [side.numel for side in sides]
    numbers = cut(counted(shape), offsets, sizes).reshape(-1)
    run = run_of(shape, offsets, sizes)
    if numbers.numel():
        start = int(numbers[0])
        is_run = torch.equal(numbers, torch.arange(start, start + len(numbers)))
        assert run == (Span(start, start + len(numbers)) if is_run else None)
    else:
        assert run is None or not run.numel


def test_a_scalar_is_one_box():
    assert [box.sizes for box in boxes_of((), Span(0, 1))] == [()]
    assert run_of((), (), ()) == Span(0, 1)


# -- reading -----------------------------------------------------------------------------------------------------------


@st.composite
def tilings(draw):
    """A tensor of some shape and boxes that tile it: spans of it as boxes, slices along a dimension, or both."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))

    def parts(length):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=3)) | {0, length})
        return list(itertools.pairwise(cuts))

    dim = draw(st.integers(0, len(shape))) - 1  # none: the whole tensor is cut into spans
    slices = [(0, shape)]
    if dim >= 0:
        slices = [(a, (*shape[:dim], b - a, *shape[dim + 1 :])) for a, b in parts(shape[dim])]
    boxes = []
    for start, sizes in slices:
        for a, b in parts(math.prod(sizes)):
            for box in boxes_of(sizes, Span(a, b)):
                begin = [start * (at == dim) for at in range(len(shape))]
                offsets = tuple(o + p for o, p in zip(box.offsets, begin, strict=True))
                boxes.append((offsets, box.sizes))
    return shape, draw(st.permutations(boxes))


def write(folder, value, boxes):
    """A checkpoint of one tensor, stored in these boxes."""
    chunks = []
    with (folder / "rank-00000.bin").open("xb") as file:
        for offsets, sizes in boxes:
            memory = memory_of(cut(value, offsets, sizes).contiguous())
            chunks.append(Chunk(offsets, sizes, write_run(file, memory)))
    nbytes = (folder / "rank-00000.bin").stat().st_size
    entry = TensorEntry("int64", tuple(value.shape), tuple(chunks))
    manifest = Manifest(1, 1, False, False, {"rank-00000.bin": nbytes}, {"model/x": entry})
    manifest.write(folder / "manifest.json")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@settings(max_examples=60, deadline=None)
@given(tilings(), st.data())
def test_whatever_tiles_a_tensor_is_read_by_span_whole_and_by_torchs_own_load(tiling, data):
    shape, boxes = tiling
    value = counted(shape)
    span = spans(data, value.numel())
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), value, boxes)
        with Source(Path(name)) as source:
            assert torch.equal(source.whole("model/x"), value)
            backwards = [*reversed(range(len(shape)))]
            for kept in (value, value.permute(backwards).contiguous().permute(backwards)):
                slot = Slot(shape, kept.stride(), Span(0, value.numel()))
                memory = kept.as_strided((value.numel(),), (1,))
                found = source.piece("model/x", slot, span)
                assert torch.equal(found, memory[span.start : span.stop])
        target = {"model/x": torch.full_like(value, -1)}
        dcp.load(target, storage_reader=CheckpointReader(name), no_dist=True)
        assert torch.equal(target["model/x"], value)


def test_a_span_is_read_from_the_runs_it_meets_and_from_no_other(tmp_path):
    value = counted((6, 5))
    rows = [((0, 0), (2, 5)), ((2, 0), (2, 5)), ((4, 0), (2, 5))]
    write(tmp_path, value, rows)
    slot = Slot((6, 5), (5, 1), Span(0, 30))
    with Source(tmp_path) as source:
        assert source.piece("model/x", slot, Span(12, 18)).tolist() == [*range(12, 18)]
        assert source.files.bytes_read == 10 * 8  # one block is all of a chunk
