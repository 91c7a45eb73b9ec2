"""examples/ddp_zero.py learns, in every mode, and goes on at another number of processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_kept_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(*arguments):
    sys.path.insert(0, str(EXAMPLES))
    import ddp_zero

    return ddp_zero.main(["--steps=60", *arguments])


@pytest.mark.parametrize(
    "arguments", [(), ("--overlap",), ("--uneven",), ("--overlap", "--uneven")]
)
def test_every_mode_learns(arguments):
    assert max(run_kept_ranks(example, 2, *arguments)) < 0.1  # from 0.29


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_saved_run_goes_on_with_another_number_of_processes(tmp_path, world_size):
    path = tmp_path / "zero.pt"
    run_kept_ranks(example, 2, f"--save={path}")

    assert max(run_kept_ranks(example, world_size, f"--load={path}", "--overlap")) < 0.1
