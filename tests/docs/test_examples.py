"""The main job and the pages that explain it.

The loss curve does not depend on the number of processes, and a resume continues it; the code of the pages runs.

Oracle: the same run, uninterrupted, in one process.  The curves differ by the order in which gradients are summed:
float32 rounding, grown by 8 steps of AdamW; 1e-4 leaves room for that and not for one wrong row of a batch.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "layers": 2,
    "dim": 16,
    "heads": 2,
    "context": 16,
    "global-batch": 6,
    "warmup": 2,
    "steps": 8,
    "eval-every": 4,
    "checkpoint-every": 3,
    "sample": 0,
    "threads": 1,
}


def train(folder, *arguments):
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    return train_gpt.main([*tiny, f"--out={folder}", *arguments])


def curve(folder):
    with (folder / "curve.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("extra", [(), ("--use-orig-params", "--accumulate", "2")])
def test_a_resume_at_another_number_of_processes_continues_the_curve(tmp_path, world_size, extra):
    whole = run_ranks(train, 1, tmp_path / "whole", *extra)[0]
    first = run_ranks(train, 2, tmp_path / "parts", "--stop-at", "4", *extra)[0]
    rest = run_ranks(train, world_size, tmp_path / "parts", "--resume", *extra)[0]

    assert len(first) == 4
    assert [*first, *rest] == pytest.approx(whole, rel=1e-4)
    assert whole[-1] < whole[0]
    assert [row["step"] for row in curve(tmp_path / "parts")] == [4, 8]
    for row, expected in zip(curve(tmp_path / "parts"), curve(tmp_path / "whole"), strict=True):
        assert row == pytest.approx(expected, rel=2e-4)


def test_only_the_newest_checkpoints_are_kept_and_no_partial_file(tmp_path):
    run_ranks(train, 2, tmp_path, "--keep", "2")

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["curve.csv", "step-000006", "step-000008"]


def interrupted(folder):
    from fsdp.checkpoint import storage

    def half(file, data):
        file.write(b"half of it")
        raise OSError("disk full")

    storage.write_run = half
    train(folder, "--resume")


def test_a_crash_while_writing_leaves_the_old_checkpoint_whole(tmp_path):
    run_ranks(train, 2, tmp_path, "--stop-at", "4")
    with pytest.raises(RanksFailed, match="disk full"):
        run_ranks(interrupted, 2, tmp_path)

    losses = run_ranks(train, 2, tmp_path, "--resume")[0]

    assert len(losses) == 4


def test_a_resume_before_the_first_evaluation(tmp_path):
    run_ranks(train, 2, tmp_path, "--keep", "0")
    for name in ("step-000006", "step-000008"):
        shutil.rmtree(tmp_path / name)

    losses = run_ranks(train, 2, tmp_path, "--resume")[0]

    assert len(losses) == 5


def test_the_time_limit_saves_and_stops(tmp_path):
    losses = run_ranks(train, 2, tmp_path, "--seconds", "0")[0]

    assert len(losses) == 1
    assert (tmp_path / "step-000001").exists()


def test_a_run_without_torchrun_makes_its_own_group_of_one(tmp_path):
    losses = run_ranks(train, 1, tmp_path, "--stop-at", "2", "--sample", "3", backend=None)[0]

    assert len(losses) == 2


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_bfloat16_and_other_strategies_train(tmp_path, strategy):
    losses = run_ranks(train, 2, tmp_path, "--bf16", "--strategy", strategy)[0]

    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("folder", "argument", "message"),
    [
        ("old", "--steps=8", "pass --resume or another --out"),
        ("old", "--resume --seed=1", "was written with --seed 0, not 1"),
        ("new", "--resume", "--resume: no checkpoint in"),
        ("new", "--global-batch=5", "--global-batch 5 does not divide among 2 processes"),
    ],
)
def test_mistakes_end_with_one_sentence(tmp_path, folder, argument, message):
    if folder == "old":
        run_ranks(train, 1, tmp_path / folder, "--stop-at", "1")

    with pytest.raises(RanksFailed, match=f"raised SystemExit: .*{message}"):
        run_ranks(train, 2, tmp_path / folder, *argument.split())


def run_page(page, folder, edit=("", "")):
    """Execute the page's python blocks as one script, in a folder of its own; returns what it printed."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    dist.destroy_process_group = lambda: None  # the group is the test's
    dist.init_process_group = lambda *_: None
    script = "\n".join(blocks(page, "python"))
    assert edit[0] in script
    script = script.replace(*edit)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, page, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize(
    ("page", "world_size"),
    [
        ("docs/getting-started.md", 1),
        ("README.md", 1),
        ("docs/how-to/export-to-safetensors.md", 2),
        ("docs/how-to/load-a-pretrained-model.md", 2),
    ],
)
def test_the_code_of_a_page_runs(tmp_path, page, world_size):
    run_ranks(run_page, world_size, page, tmp_path)


def test_the_tutorial_prints_what_it_says(tmp_path):
    page = "docs/tutorial/01-first-wrap.md"
    printed = run_ranks(run_page, 2, page, tmp_path)[0]

    assert "".join(blocks(page, "text")) == printed


def test_the_code_of_train_and_resume_resumes(tmp_path):
    page = "docs/how-to/train-and-resume.md"
    half = ("range(first, 20)", "range(first, 10)")
    run_ranks(run_page, 1, page, tmp_path / "whole")
    run_ranks(run_page, 2, page, tmp_path / "parts", half)
    run_ranks(run_page, 3, page, tmp_path / "parts")

    assert_same_model(tmp_path / "whole" / "checkpoints", tmp_path / "parts" / "checkpoints")


def assert_same_model(*folders):
    from fsdp import checkpoint
    from fsdp.checkpoint.source import Source

    expected, actual = (Source(checkpoint.latest(folder)) for folder in folders)
    assert expected.value("extra/step") == actual.value("extra/step") == 20
    names = [key for key in expected.manifest.tensors if key.startswith("model/")]
    assert names
    for name in names:
        torch.testing.assert_close(actual.whole(name), expected.whole(name), rtol=1e-3, atol=1e-5)


def test_the_code_of_save_and_resume_resumes(tmp_path):
    page = "docs/how-to/save-and-resume.md"
    half = ("range(first, 20)", "range(first, 10)")
    run_ranks(run_page, 1, page, tmp_path / "whole")
    run_ranks(run_page, 2, page, tmp_path / "parts", half)
    run_ranks(run_page, 3, page, tmp_path / "parts")

    assert_same_model(tmp_path / "whole" / "checkpoints", tmp_path / "parts" / "checkpoints")
