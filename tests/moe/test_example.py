"""The example: its curve is the one-process mixture's, for any number of processes and rows of experts.

Oracle: the same run in one process that has every expert.  The curves differ by the order in which gradients are
summed, as in ``tests/docs/test_examples.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp import checkpoint
from tests.support.ranks import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--steps=6",
    "--layers=1",
    "--dim=16",
    "--context=16",
    "--global-batch=4",
    "--experts=4",
    "--lr=1e-2",
]


def train(*arguments):
    sys.path.insert(0, str(ROOT / "examples"))
    import train_moe

    return train_moe.main([*TINY, *arguments])


@pytest.fixture(scope="module")
def dense():
    losses = run_ranks(train, 1)[0]
    assert losses[-1] < losses[0] - 0.3
    return losses


@pytest.mark.parametrize(("world_size", "expert_ranks"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_the_curve_is_that_of_the_dense_mixture(dense, world_size, expert_ranks):
    for losses in run_ranks(train, world_size, f"--expert-ranks={expert_ranks}"):
        assert losses == pytest.approx(dense, rel=1e-4)


def test_bfloat16_with_the_router_in_float32_trains(dense, tmp_path):
    folder = tmp_path / "moe"
    losses = run_ranks(train, 4, "--expert-ranks=2", "--bf16", f"--out={folder}")[0]

    assert losses == pytest.approx(dense, rel=0.03)
    checkpoint.verify(folder)


def test_a_wrong_division_ends_with_one_sentence():
    with pytest.raises(RanksFailed, match="--expert-ranks 2 must divide 3 processes and 4 experts"):
        run_ranks(train, 3, "--expert-ranks=2", "--global-batch=3")
