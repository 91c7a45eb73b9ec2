"""The loop-back benchmark on a real GPU."""

from __future__ import annotations

import sys

import pytest

from tools.bench import cuda_overlap
from tools.bench.models import Shape


@pytest.mark.gpu
def test_every_contender_runs_over_every_network():
    shape = Shape(2, dim=256, heads=4, vocabulary=64, batch=2, sequence=64, hidden=512)
    result = cuda_overlap.measure(
        shape=vars(shape),
        world_size=8,
        networks=["free", "nvlink", "ib"],
        rounds=1,
        steps=1,
        seed=0,
        device="cuda",
    )
    sys.stdout.write(cuda_overlap.table("ib", "ib", result["samples"], {}).text())
    assert not result["failures"]
