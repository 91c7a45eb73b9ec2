"""The benchmarks' statistics, tables and JSON are right, and their contenders train alike.  Nothing here is timed."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from tools.bench import __main__ as command_line
from tools.bench import (
    checkpoint,
    cuda,
    host_overhead,
    memory,
    memory_minimum,
    scaling,
    slow_link,
    step_time,
)
from tools.bench.contenders import CONTENDERS, PLAIN, Runner, Setting, build_all, build_runner
from tools.bench.models import GPT, Block, Shape
from tools.bench.registry import BENCHMARKS
from tools.bench.report import Report, Table
from tools.bench.rounds import PHASES, time_rounds
from tools.bench.stats import Summary, combine, ratio, round_medians, summarize
from tools.bench.world import fake_group

SHARDED = tuple(name for name in CONTENDERS if name != PLAIN)


# Statistics


def test_quartiles_include_the_smallest_and_largest_value() -> None:
    assert summarize([5.0, 1.0, 4.0, 2.0, 3.0]) == Summary(3.0, 2.0, 4.0, 5)


def test_one_value_is_its_own_quartiles() -> None:
    assert summarize([7.0]) == Summary(7.0, 7.0, 7.0, 1)


def test_a_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_a_round_counts_as_its_median_step() -> None:
    assert round_medians([[1.0, 9.0, 2.0], [4.0]]) == [2.0, 4.0]


def test_contenders_are_paired_round_by_round() -> None:
    slow_first_round = [[10.0], [1.0]]
    twice_as_slow = [[20.0], [2.0]]

    assert combine(lambda a, b: a - b, twice_as_slow, slow_first_round) == [10.0, 1.0]
    assert ratio([20.0, 2.0], [10.0, 1.0]) == Summary(2.0, 2.0, 2.0, 2)


def test_contenders_with_different_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_there_is_no_ratio_to_a_reference_that_cost_nothing() -> None:
    assert ratio([1.0, 2.0], [0.5, -0.1]) is None


def test_the_step_lasts_as_long_as_on_its_slower_rank() -> None:
    ranks = [
        {"x": {"optimizer": [[1.0, 5.0], [2.0, 2.0]]}},
        {"x": {"optimizer": [[3.0, 4.0], [1.0, 6.0]]}},
    ]

    assert step_time.slowest_rank(ranks) == {"x": {"optimizer": [[3.0, 5.0], [2.0, 6.0]]}}


def test_a_step_is_the_sum_of_its_phases() -> None:
    phases = {"forward_backward": [[1.0, 2.0], [3.0, 4.0]], "optimizer": [[0.5, 0.5], [1.0, 2.0]]}

    assert step_time.step_seconds(phases) == [[1.5, 2.5], [4.0, 6.0]]


class _Logged:
    """A contender that writes down which of its phases ran."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name = name
        self.log = log

    def forward_backward(self) -> None:
        self.log.append((self.name, "forward_backward"))

    def optimizer_step(self) -> None:
        self.log.append((self.name, "optimizer"))


def test_every_round_steps_every_contender_and_one_step_more_goes_untimed() -> None:
    log: list[tuple[str, str]] = []
    runners = {name: _Logged(name, log) for name in "ab"}

    samples = time_rounds(runners, rounds=3, steps=2, seed=0)

    assert {
        name: {phase: [len(steps) for steps in samples[name][phase]] for phase in PHASES}
        for name in "ab"
    } == {name: {phase: [2, 2, 2] for phase in PHASES} for name in "ab"}
    turns = [log[start : start + 6] for start in range(0, len(log), 6)]
    assert all(turn == [(turn[0][0], phase) for phase in PHASES] * 3 for turn in turns)
    assert [
        sorted(pair) for pair in zip(*[iter(turn[0][0] for turn in turns)] * 2, strict=True)
    ] == [["a", "b"]] * 3


# Tables and JSON


def test_host_overhead_is_per_unit_less_the_unwrapped_model_and_the_collectives() -> None:
    samples = {
        name: {"forward_backward": [[seconds * 1e-6]] * 3, "optimizer": [[20e-6]] * 3}
        for name, seconds in {PLAIN: 100, "ddp": 150, "fsdp1-flat": 500, "ours-flat": 300}.items()
    }
    samples["collectives"] = {"forward_backward": [[100e-6]] * 3, "optimizer": [[0.0]] * 3}

    assert host_overhead.table("W=8", samples, units=10).text() == "\n".join(
        [
            "W=8",
            "                fwd+bwd us       / fsdp1-flat  optimizer us",
            "-----------------------------------------------------------",
            "ddp               5 [5, 5]  0.17 [0.17, 0.17]      2 [2, 2]",
            "fsdp1-flat     30 [30, 30]  1.00 [1.00, 1.00]      2 [2, 2]",
            "ours-flat      10 [10, 10]  0.33 [0.33, 0.33]      2 [2, 2]",
            "(plain)        10 [10, 10]                         2 [2, 2]",
            "(collectives)  10 [10, 10]                         0 [0, 0]",
        ]
    )


def test_step_time_is_in_milliseconds_beside_ratios_to_the_peers_that_ran() -> None:
    samples = {
        name: {"forward_backward": [[seconds], [seconds]], "optimizer": [[0.5], [0.5]]}
        for name, seconds in {"ddp": 1.5, "ours-flat": 0.5}.items()
    }

    assert step_time.table("3 MiB", samples) == Table(
        "3 MiB",
        ("", "step ms", "/ ddp", "optimizer ms"),
        (
            ("ddp", "2000.0 [2000.0, 2000.0]", "1.00 [1.00, 1.00]", "500.0"),
            ("ours-flat", "1000.0 [1000.0, 1000.0]", "0.50 [0.50, 0.50]", "500.0"),
        ),
    )


def test_a_slow_link_exposes_what_a_step_takes_longer_than_alone_in_the_same_round() -> None:
    samples = {
        name: {"forward_backward": [[first], [second]], "optimizer": [[0.0], [0.0]]}
        for name, first, second in (
            ("ddp", 1.2, 2.4),
            ("ours-flat", 1.0, 2.0),
            ("ddp alone", 1.0, 2.0),
            ("ours-flat alone", 0.8, 1.6),
        )
    }

    table = slow_link.table("2 Gbit/s", samples)

    assert table.columns == (
        "",
        "step ms",
        "alone ms",
        "exposed ms",
        "/ alone",
        "/ ddp",
        "/ fsdp1-flat",
        "/ fsdp2",
    )
    assert [row[0] for row in table.rows] == ["ddp", "ours-flat"]
    assert table.rows[0][3:5] == ("300.0 [250.0, 350.0]", "1.20 [1.20, 1.20]")
    assert table.rows[1][5:] == ("0.83 [0.83, 0.83]", "-", "-")


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Table("t", ("a", "b"), (("1",),))


def _report() -> Report:
    return Report(
        "step_time",
        {"rounds": 1},
        seed=3,
        tables=(Table("title", ("", "ms"), (("ddp", "1.0"),)),),
        samples={"3 MiB": [{"ddp": {"optimizer": [[0.25]]}}]},
        failures={"3 MiB: fsdp2": "ValueError: no"},
    )


def test_the_json_holds_machine_versions_seed_settings_and_every_sample() -> None:
    document = json.loads(_report().json())

    assert document["samples"] == {"3 MiB": [{"ddp": {"optimizer": [[0.25]]}}]}
    assert (document["seed"], document["settings"]) == (3, {"rounds": 1})
    assert document["versions"]["torch"] == torch.__version__
    assert {"cores", "memory", "processor", "load"} <= document["machine"].keys()
    assert document["failures"] == {"3 MiB: fsdp2": "ValueError: no"}
    assert document["tables"][0]["rows"] == [["ddp", "1.0"]]


def test_the_text_names_the_contenders_that_did_not_run() -> None:
    assert "did not run:\n  3 MiB: fsdp2: ValueError: no" in _report().text()


def test_the_entry_point_prints_the_report_and_writes_the_json(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_time, "run", lambda arguments: _report())

    status = command_line.main(["step_time", "--quick", "--json", str(tmp_path / "out.json")])

    assert status == 0
    assert "title" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["benchmark"] == "step_time"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_parses_the_shared_options(name: str) -> None:
    needed = {"ab": ["."]}.get(name, [])
    arguments = command_line.parse([name, *needed, "--quick", "--seed", "7"])

    assert (arguments.name, arguments.quick, arguments.seed) == (name, True, 7)
    assert callable(BENCHMARKS[name].load().run)


# Contenders


def _losses(runners: dict[str, Runner]) -> dict[str, list[float]]:
    """Losses of two steps of each contender."""
    losses: dict[str, list[float]] = {}
    for name, runner in runners.items():
        first = runner.forward_backward().item()
        runner.optimizer_step()
        losses[name] = [first, runner.forward_backward().item()]
    return losses


def _train_tiny(seed: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    runners, failures = host_overhead.tiny_runners(host_overhead.tiny(2), seed, warm_up=0)
    return _losses(runners), failures


def _train_gpt(seed: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    shape = dataclasses.replace(step_time.SIZES["0.1 MiB"], blocks=2)
    runners, failures = step_time.gpt_runners(shape, seed, warm_up=0)
    return _losses(runners), failures


@pytest.mark.parametrize("train", [_train_tiny, _train_gpt])
def test_all_contenders_train_alike(train: Any) -> None:
    for losses, failures in run_ranks(train, 2, 0, timeout=100):
        assert failures == {}
        assert losses.keys() == CONTENDERS.keys()
        first = {name: pair[0] for name, pair in losses.items()}
        second = {
            name: losses[name][1] for name in SHARDED
        }  # the unwrapped model learns from its own batch alone
        # The same arithmetic in the forward; summation order of two ranks' gradients after it.
        assert first == dict.fromkeys(first, pytest.approx(losses["ddp"][0], rel=1e-6))
        assert second == dict.fromkeys(second, pytest.approx(losses["ddp"][1], rel=1e-5))
        assert losses["ddp"][1] < losses["ddp"][0]


def _fake_measure() -> dict[str, Any]:
    dist.destroy_process_group()
    return host_overhead.measure(
        shape=vars(host_overhead.tiny(1)), world_size=4, rounds=1, steps=1, seed=0, profile=True
    )


def test_every_contender_steps_on_a_fake_group_of_four_ranks() -> None:
    (result,) = run_ranks(_fake_measure, 1, timeout=100)

    assert result["failures"] == {}
    assert result["samples"].keys() == {*CONTENDERS, "collectives"}
    assert result["profiles"].keys() == {"ours-flat", "ours-orig"}
    assert any("runtime/" in row[0] for row in result["profiles"]["ours-flat"])


def _train_compiled(seed: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    torch.compile = functools.partial(torch.compile, backend="eager")
    shape = dataclasses.replace(step_time.SIZES["0.1 MiB"], blocks=2)
    runners, failures = step_time.gpt_runners(shape, seed, warm_up=0, compiled=True)
    losses = _losses(runners)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return losses | {"graphs": [graphs, len(runners)]}, failures


def test_contenders_with_compiled_blocks_train_alike_with_a_graph_for_each_that_dynamo_takes() -> (
    None
):
    for losses, failures in run_ranks(_train_compiled, 2, 0, timeout=100):
        assert failures == {}
        graphs, contenders = losses.pop("graphs")
        assert graphs == contenders - 1  # not FSDP1's flat exposure, which runs as it is
        assert losses.keys() == CONTENDERS.keys()
        for name in SHARDED:
            assert losses[name] == pytest.approx(losses["ddp"], rel=1e-5)


def _train_alone(seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    shape = dataclasses.replace(step_time.SIZES["0.1 MiB"], blocks=1)
    names = ("ddp", "fsdp1-flat", "fsdp2", "ours-flat")
    result = slow_link.measure(shape=vars(shape), rounds=1, steps=1, seed=seed, names=names)
    return result["samples"], result["failures"]


def test_over_a_slow_link_every_contender_also_trains_alone() -> None:
    for samples, failures in run_ranks(_train_alone, 2, 0, timeout=100):
        names = ("ddp", "fsdp1-flat", "fsdp2", "ours-flat")
        assert failures == {}
        assert samples.keys() == {*names, *(f"{name} alone" for name in names)}


def _save_checkpoints(folder: str) -> tuple[dict[str, int], dict[str, list[float]]]:
    shape, setting = Shape(1, dim=16, heads=2, vocabulary=32), memory.CASES["small"].setting
    sizes, losses = {}, {}
    for name in CONTENDERS:
        runner = build_runner(name, GPT(shape), setting, shape.tokens(0))
        runner.forward_backward()
        runner.optimizer_step()
        checkpoint.save(name, runner, Path(folder, name))
        dist.barrier()
        sizes[name] = sum(path.stat().st_size for path in Path(folder, name).iterdir())
        losses[name] = []
        for _ in range(2):
            for _ in range(2):
                losses[name].append(float(runner.forward_backward()))
                runner.optimizer_step()
            checkpoint.load(name, runner, Path(folder, name))
    return sizes, losses


def test_every_contender_saves_and_loads_its_parameters_and_both_moments(tmp_path: Path) -> None:
    parameters = GPT(Shape(1, dim=16, heads=2, vocabulary=32)).parameters()
    least = 3 * 4 * sum(parameter.numel() for parameter in parameters)

    for sizes, losses in run_ranks(_save_checkpoints, 2, str(tmp_path), timeout=100):
        assert sizes.keys() == losses.keys() == CONTENDERS.keys()
        assert {name for name, size in sizes.items() if size < least} == set()
        for first, second, again, and_second in losses.values():
            assert first != second
            assert (again, and_second) == (first, second)


def _time_checkpoints(folder: str) -> dict[str, Any]:
    shape = vars(Shape(1, dim=16, heads=2, vocabulary=32))
    return checkpoint.measure(shape=shape, rounds=2, seed=0, folder=folder)


def test_a_checkpoints_saves_and_loads_are_timed_by_turns(tmp_path: Path) -> None:
    for result in run_ranks(_time_checkpoints, 2, str(tmp_path), timeout=100):
        assert result["failures"] == {}
        assert result["seconds"].keys() == result["bytes"].keys() == set(checkpoint.SHARDED)
        for phases in result["seconds"].values():
            assert [len(times) for times in phases.values()] == [2, 2]
            assert all(seconds > 0 for times in phases.values() for seconds in times)
    assert not list(tmp_path.iterdir())
    table = checkpoint.table("t", result["seconds"], result["bytes"])
    assert len(table.columns) == len(table.rows[0]) == 8


def _build_with_a_broken_builder(*, broken_rank: int) -> tuple[list[str], dict[str, str]]:
    def broken(model: nn.Module, setting: Setting) -> nn.Module:
        if dist.get_rank() == broken_rank:
            raise RuntimeError("broken\non purpose")
        return model

    shape = Shape(1, dim=4, heads=1, vocabulary=8)
    builders = {"broken": broken, **CONTENDERS}
    runners, failures = build_all(
        ("broken", "ddp"),
        host_overhead.GPT(shape),
        Setting(frozenset({Block})),
        shape.tokens(0),
        builders=builders,
    )
    return list(runners), failures


def test_a_contender_that_fails_on_one_rank_is_reported_on_all_and_left_out() -> None:
    outcomes = run_ranks(_build_with_a_broken_builder, 2, broken_rank=1)

    assert outcomes == [
        (["ddp"], {"broken": "failed on another rank"}),
        (["ddp"], {"broken": "RuntimeError: broken on purpose"}),
    ]


def _train_llama(seed: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    shape = Shape(2, dim=16, heads=2, vocabulary=32, batch=2, sequence=8, hidden=24)
    runners, failures = cuda.llama_runners(shape, seed, cuda.NAMES, torch.device("cpu"))
    return _losses(runners), failures


def test_all_contenders_train_a_llama_in_bf16_alike() -> None:
    for losses, failures in run_ranks(_train_llama, 2, 0, timeout=100):
        assert failures == {}
        assert losses.keys() == set(cuda.NAMES)
        reference = losses["fsdp2"]
        # bf16 has 8 bits: one rounding of a loss near 3 that went another way.
        assert losses == dict.fromkeys(losses, pytest.approx(reference, rel=2**-7))


# Memory and scaling


class Two(nn.Module):
    """An embedding and a layer of the root's, two units between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.tokens(tokens)))
        return self.head(hidden.sin() + hidden.cos()).sum()  # both save ``hidden``


BATCH = (torch.zeros(16, dtype=torch.int64),)
UNIT, EMBEDDING, HIDDEN = 8 * 8 * 4, 100 * 8 * 4, 16 * 8 * 4


def test_stages_count_each_saved_storage_once_where_it_was_saved_first_and_no_parameter() -> None:
    trace = memory_minimum.stages_of(Two(), ("first", "second"), BATCH)

    saved = [(stage.unit, stage.saved, stage.root_parameters) for stage in trace.stages]
    kept = [stage for stage in saved if stage[1] or stage[2]]
    assert kept == [
        ("", 16 * 8, EMBEDDING),  # the tokens
        ("first", HIDDEN, 0),
        ("second", HIDDEN, 0),
        ("", HIDDEN, 0),  # ``hidden``
        ("", HIDDEN, EMBEDDING),  # the sum
    ]
    assert trace.read_again == {"", "first", "second"}


def test_the_minimum_is_the_largest_moment_of_the_schedule() -> None:
    units, shards = ("first", "second"), 3 * (2 * UNIT + 2 * EMBEDDING) // 2
    trace = memory_minimum.stages_of(Two(), units, BATCH)
    moments = {m.name: m for m in memory_minimum.moments(trace, 2, overlapped=False)}
    overlapped = {m.name: m for m in memory_minimum.moments(trace, 2, overlapped=True)}

    second = moments["backward of second"]
    assert second.states == shards
    assert (
        second.activations == 16 * 8 + HIDDEN + HIDDEN
    )  # more than its gradient, which they make place for
    assert second.whole_parameters == 2 * EMBEDDING + 2 * UNIT
    assert second.whole_gradients == EMBEDDING  # the head's
    assert moments["reduction of second"].gradient_shards == UNIT // 2
    assert moments["backward of first"].whole_parameters == 2 * EMBEDDING + UNIT
    assert overlapped["backward of first"].whole_gradients == EMBEDDING + UNIT
    assert moments["reduction of the root"].total == shards + 2 * EMBEDDING + UNIT + EMBEDDING
    least = memory_minimum.minimum(Two(), units, BATCH, 2)
    assert least.alone.name == "backward of the root"
    assert least.alone.total == shards + 4 * EMBEDDING + UNIT


def test_an_embedding_of_its_own_is_not_whole_in_the_backward() -> None:
    trace = memory_minimum.stages_of(Two(), ("tokens", "first", "second", "head"), BATCH)
    moments = {m.name: m for m in memory_minimum.moments(trace, 2, overlapped=False)}

    assert trace.read_again == {"first", "second", "head"}
    assert moments["backward of first"].whole_parameters == UNIT
    assert moments["backward of tokens"].whole_parameters == 0
    assert moments["backward of tokens"].whole_gradients == EMBEDDING


def test_the_automatic_policy_has_the_units_of_the_case_that_names_them() -> None:
    case = memory.CASES["apart"]
    with fake_group(2):
        model = GPT(dataclasses.replace(case.shape, dim=96))
        wrapped = CONTENDERS["ours-flat"](model, case.setting)
        names = {
            name.replace("_fsdp_wrapped_module.", "")
            for name, module in wrapped.named_modules()
            if type(module) is type(wrapped)
        }

    assert names == {"", *case.units}


def test_the_high_water_mark_remembers_what_was_freed() -> None:
    size = 64 << 20
    held = torch.ones(size, dtype=torch.uint8)
    del held

    assert memory.read_status("VmHWM") - memory.read_status("VmRSS") > size / 2


@pytest.mark.parametrize("quick", [True, False])
def test_the_points_of_an_axis_differ_in_that_axis_alone(quick: bool) -> None:
    units, parameters, world = (
        list(scaling.points([axis], quick=quick)) for axis in ("units", "parameters", "world")
    )

    assert [point.shape.blocks for point in units] == [point.value for point in units]
    assert [len(list(Block(point.shape).parameters())) for point in parameters] == [
        point.value for point in parameters
    ]
    assert [point.world_size for point in world] == [point.value for point in world]
    assert len({(point.shape.linears, point.world_size) for point in units}) == 1
    assert len({(point.shape.blocks, point.world_size) for point in parameters}) == 1
    assert len({point.shape for point in world}) == 1
