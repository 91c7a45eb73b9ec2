"""The main job: its loss curve does not depend on the number of processes, and a resume continues it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--layers",
    "2",
    "--dim",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--global-batch",
    "6",
    "--sample",
    "0",
    "--threads",
    "1",
]
TINY += ["--eval-every", "4", "--checkpoint-every", "3", "--lr", "0.003"]


def train(*arguments):
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    return train_gpt.main([*TINY, *arguments])


@pytest.mark.parametrize("extra", [(), ("--use-orig-params", "--accumulate", "2")])
def test_a_resume_at_another_number_of_processes_continues_the_curve(tmp_path, extra):
    whole = run_ranks(train, 1, "--steps", "8", "--out", str(tmp_path / "whole"), *extra)[0]
    folder = str(tmp_path / "parts")
    first = run_ranks(train, 2, "--steps", "8", "--seconds", "0", "--out", folder, *extra)[0]
    assert len(first) == 1
    rest = run_ranks(train, 3, "--steps", "8", "--resume", "--out", folder, *extra)[0]
    assert [*first, *rest] == pytest.approx(whole, rel=1e-4)
    assert whole[-1] < whole[0]
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "step-000006.pt",
        "step-000008.pt",
    ]


def test_bfloat16_and_other_strategies_train(tmp_path):
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        out = str(tmp_path / strategy)
        losses = run_ranks(
            train, 2, "--steps", "6", "--bf16", "--strategy", strategy, "--out", out
        )[0]
        assert losses[-1] < losses[0]
