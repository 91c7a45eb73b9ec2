"""The pool of reduce buffers: what is kept, what goes, and that views and gaps survive."""

from __future__ import annotations

import pytest
import torch

from fsdp.flat.layout import FlatLayout, build_layout
from fsdp.runtime.buffers import BufferPool, GradBuffer

CPU = torch.device("cpu")
LARGE = 3 << 20  # elements of float32: over 4 MiB


def layout(*numels: int, world_size: int = 2) -> FlatLayout:
    return build_layout(tuple((n,) for n in numels), tuple((1,) for _ in numels), world_size, 4)


def take(pool: BufferPool, of: FlatLayout) -> GradBuffer:
    return pool.take(of, torch.float32, CPU)


def resident(buffer: GradBuffer) -> int:
    return buffer.flat.untyped_storage().nbytes()


def test_units_of_a_size_share_one_buffer_and_its_views():
    pool = BufferPool()
    block = layout(LARGE, 5)
    first = take(pool, block)
    address, views = first.flat.data_ptr(), first.views
    pool.give_back(first)
    second = take(pool, block)
    assert second is first
    assert second.views is views
    assert second.flat.data_ptr() == address


@pytest.mark.parametrize("late", [False, True])
def test_a_large_buffer_has_no_memory_once_units_of_another_size_follow(late):
    pool = BufferPool()
    head, block = layout(4 * LARGE), layout(LARGE)
    of_head = take(pool, head)
    if not late:
        pool.give_back(of_head)
    of_block = take(pool, block)
    if late:  # the reduction of the head ends after that of the block has begun
        pool.give_back(of_head)
    assert resident(of_head) == 0
    assert resident(of_block) == block.padded_numel * 4


def test_large_buffers_have_no_memory_after_the_backward_and_small_ones_keep_theirs():
    pool = BufferPool()
    large, small = take(pool, layout(LARGE)), take(pool, layout(1000))
    pool.give_back(large)
    pool.give_back(small)
    pool.free_large()
    assert resident(large) == 0
    assert resident(small) == 4000


def test_a_buffer_that_is_in_use_keeps_its_memory_whatever_else_is_asked_for():
    pool = BufferPool()
    mine = take(pool, layout(LARGE))
    mine.flat.fill_(1.0)
    pool.give_back(take(pool, layout(4 * LARGE)))
    pool.free_large()
    assert bool((mine.flat == 1.0).all())


def test_gaps_are_zero_however_often_memory_comes_and_goes_or_serves_another_layout():
    pool = BufferPool()
    odd = [layout(LARGE + 1, 3, 5), layout(LARGE + 7, 1, 2), layout(LARGE + 30, 9, world_size=3)]
    assert all(of.gaps for of in odd)
    for freed in (False, True) * 2:
        for of in odd:
            buffer = take(pool, of)
            assert all(not buffer.flat[gap.start : gap.stop].any() for gap in of.gaps)
            for view in buffer.views:
                view.fill_(7.0)
            pool.give_back(buffer)
        if freed:
            pool.free_large()
            torch.full((2 * LARGE,), 3.0)  # what the next memory may hold


def test_a_layout_that_needs_more_memory_than_the_one_before_gets_it():
    pool = BufferPool()
    small, larger = layout(600), layout(900)  # of one size class
    pool.give_back(take(pool, small))
    buffer = take(pool, larger)
    buffer.flat.fill_(2.0)
    assert buffer.flat.sum() == 2.0 * larger.padded_numel
    pool.give_back(buffer)
    assert take(pool, small).flat.numel() == small.padded_numel
