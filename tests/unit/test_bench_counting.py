"""Counting instructions and comparing two versions: marks, parsing and tables are right.  Nothing here is timed."""

from __future__ import annotations

import argparse
import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tools.bench import ab, counted, host_overhead, instructions
from tools.bench.contenders import PLAIN
from tools.bench.report import Table

OUTPUT = """\
version: 1
creator: callgrind-3.19.0
desc: Trigger: Client Request: {label}
events: Ir
summary: {count}
totals: {count}
"""


def _output(label: str, count: int) -> str:
    return OUTPUT.format(label=label, count=count)


# Instructions


def test_counts_are_read_by_contender_phase_and_step_whatever_the_order_of_the_files() -> None:
    texts = [
        _output("ours-flat forward_backward 10", 7),
        _output("ours-flat optimizer 10", 2),
        _output("ours-flat forward_backward 9", 5),
        _output("ours-flat optimizer 9", 3),
        "desc: Trigger: Program termination\ntotals: 99\n",
    ]

    assert instructions.read_counts(texts) == {
        "ours-flat": {"forward_backward": [[5.0], [7.0]], "optimizer": [[3.0], [2.0]]}
    }


def test_contenders_whose_steps_differ_are_named_with_their_scatter() -> None:
    texts = [
        _output(f"a forward_backward {step}", count) for step, count in enumerate((99, 100, 101))
    ]
    texts += [_output(f"b forward_backward {step}", 100) for step in range(3)]

    assert list(instructions.scatter(instructions.read_counts(texts))) == [("a", 0.02)]


def test_without_the_tools_the_benchmark_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "valgrind" else found(tool))
    arguments = argparse.Namespace(quick=True, contender=["ours-flat"], world=8, seed=0)

    report = instructions.run(arguments)

    assert report.failures == {"all": "valgrind not found"}
    assert report.tables == ()


def test_thousands_of_instructions_are_per_unit_less_the_model_and_the_collectives() -> None:
    counts = {PLAIN: 100, "fsdp1-flat": 500, "ours-flat": 300, "collectives": 100}
    texts = [
        _output(f"{name} {phase} 0", count * 1000)
        for name, count in counts.items()
        for phase in ("forward_backward", "optimizer")
    ]
    samples = instructions.read_counts(texts)

    table = host_overhead.table("t", samples, 10, host_overhead.THOUSANDS)

    assert table.columns == ("", "fwd+bwd thousand", "/ fsdp1-flat", "optimizer thousand")
    assert table.rows[1] == ("ours-flat", "10 [10, 10]", "0.33 [0.33, 0.33]", "30 [30, 30]")


class _Log:
    """Marks and a contender that write down what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, label: bytes) -> None:
        self.calls.append(label.decode())

    def forward_backward(self) -> None:
        self.calls.append("fb")

    def optimizer_step(self) -> None:
        self.calls.append("opt")


def test_each_phase_of_each_step_is_counted_alone() -> None:
    log = _Log()

    counted.count_steps("x", log, log, steps=2)

    assert log.calls == [
        *("start", "fb", "x forward_backward 0", "start", "opt", "x optimizer 0"),
        *("start", "fb", "x forward_backward 1", "start", "opt", "x optimizer 1"),
    ]


@pytest.mark.skipif(instructions.why_not() is not None, reason="valgrind's header or cc is missing")
def test_the_marks_do_nothing_outside_of_valgrind(tmp_path: Path) -> None:
    assert instructions.compile_marks(tmp_path).returncode == 0

    marks: Any = ctypes.CDLL(str(tmp_path / "marks.so"))

    marks.start()
    marks.stop(b"nothing counts")


# Two versions


def test_what_is_saved_is_paired_round_by_round() -> None:
    samples = {
        "this-flat": {"forward_backward": [[1.0], [10.0]], "optimizer": [[0.0], [0.0]]},
        "other-flat": {"forward_backward": [[3.0], [12.0]], "optimizer": [[0.0], [0.0]]},
    }

    assert ab.saved(samples, "flat") == [2.0, 2.0]


def test_versions_stand_side_by_side_per_unit_over_processes() -> None:
    def process(this: float) -> Any:
        seconds = {PLAIN: 100e-6, "this-flat": this, "other-flat": 300e-6}
        seconds |= {"this-orig": 200e-6, "other-orig": 200e-6}
        return {name: {"forward_backward": [[value]] * 2} for name, value in seconds.items()}

    assert ab.table([process(200e-6), process(220e-6)], units=10) == Table(
        "fwd+bwd us per unit",
        ("", "other", "this", "saved"),
        (
            ("flat", "20.0 [20.0, 20.0]", "11.0 [10.5, 11.5]", "9.0 [8.5, 9.5]"),
            ("orig", "10.0 [10.0, 10.0]", "10.0 [10.0, 10.0]", "0.0 [0.0, 0.0]"),
        ),
    )


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout"):
        ab.run(argparse.Namespace(other=tmp_path, quick=True))


def _compare_with_itself() -> tuple[dict[str, Any], bool]:
    import fsdp

    dist.destroy_process_group()
    result = ab.measure(
        other=fsdp.__file__, shape=vars(host_overhead.tiny(1)), world_size=4, rounds=2, seed=0
    )
    other = __import__(ab.OTHER)
    return result, other.FullyShardedDataParallel is not fsdp.FullyShardedDataParallel


def test_another_checkout_is_imported_beside_this_one_and_both_step() -> None:
    ((result, is_another),) = run_ranks(_compare_with_itself, 1, timeout=100)

    assert result["failures"] == {}
    assert result["samples"].keys() == {PLAIN, "this-flat", "this-orig", "other-flat", "other-orig"}
    assert is_another
