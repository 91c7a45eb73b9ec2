"""Slices of a flat tensor: equal parts, made once, when wanted."""

from __future__ import annotations

import pytest
import torch

from fsdp.flat.slices import RankSlices


def test_slices_are_equal_parts_of_the_tensor_in_order():
    flat = torch.arange(12.0)
    slices = RankSlices(flat, 3)
    assert len(slices) == 3
    assert [part.tolist() for part in slices] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    slices[1].zero_()
    assert flat[4:8].eq(0).all()


def test_a_slice_is_made_once_and_the_others_not_at_all():
    slices = RankSlices(torch.empty(1 << 12), 1 << 12)
    assert slices[7] is slices[7]
    assert len(slices._made) == 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_other_rank(rank):
    with pytest.raises(IndexError):
        RankSlices(torch.empty(4), 2)[rank]


def test_slices_made_in_inference_mode_or_over_nothing_are_ordinary():
    with torch.inference_mode():
        part = RankSlices(torch.empty(0), 2)[0]
    assert part.numel() == 0
    flat = torch.zeros(4)
    slices = RankSlices(flat, 2)
    with torch.inference_mode():
        slices[0]
    assert not slices[0].is_inference()
    slices[0].add_(1)
    assert flat.tolist() == [1, 1, 0, 0]
