"""What is written for a GPU runs on an imitated one, each function once; all of it with ``FSDP_IMITATE_CUDA=1``."""

from __future__ import annotations

import argparse

import pytest
import torch

import tests.gpu.test_bench
import tests.gpu.test_streams as streams
from tests.gpu.imitation import imitated, run_ranks_imitated
from tests.gpu.support import SETUPS, native_collectives, train_dense, train_wrapped
from tests.gpu.test_parity import assert_alike
from tools.bench import cuda, cuda_overlap, world
from tools.bench.loopback import loopback_group
from tools.bench.loopback_link import DeviceLink, link_for
from tools.bench.models import Shape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        (streams.test_a_steady_step_never_makes_the_host_wait, ("accumulating bf16", "cuda")),
        (streams.test_parameters_that_some_ranks_do_not_use_do_not_either, ("cuda",)),
        (streams.test_the_allocator_has_all_it_needs_after_two_steps, ("flat",)),
        (streams.test_streams_that_are_slow_at_random_change_nothing, ("hybrid", "cuda", 0)),
        (streams.test_training_on_another_stream_changes_nothing, ("cuda",)),
        (streams.test_a_backward_may_start_from_another_stream_than_its_forward, ("cuda",)),
        (streams.test_a_failed_step_leaves_nothing_behind, ("cuda",)),
        (streams.test_a_step_can_be_captured_in_a_graph, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_of_streams(test, arguments):
    with loopback_group(streams.RANKS), imitated():
        test(*arguments)


def test_of_parity():
    setup = SETUPS["orig"]
    with imitated():
        expected = train_dense("cuda", setup, 2)
        for params in run_ranks_imitated(train_wrapped, 2, "cuda", setup, "host"):
            assert_alike(expected, params, setup)
        expected = train_dense("cuda", setup, 1)
        (params,) = run_ranks_imitated(train_wrapped, 1, "cuda", setup, "backend", backend="nccl")
        assert_alike(expected, params, setup)
        (values,) = run_ranks_imitated(native_collectives, 1, "cuda", backend="nccl")
    assert values[-1].tolist() == [0, 1, 2, 3]


def test_a_link_of_a_device_spends_the_time_of_the_network():
    with imitated():
        link = link_for(torch.device("cuda", 0))
        assert isinstance(link, DeviceLink)
        moved = []
        link.carry(0.5, lambda: moved.append(1)).wait()
    assert moved


@pytest.fixture
def tiny(monkeypatch):
    """Both parts of the benchmark in this process, on a stack that takes no time."""
    shape = Shape(2, dim=16, heads=2, vocabulary=16, batch=1, sequence=4, hidden=32)
    monkeypatch.setattr(world, "run_child", lambda function, **arguments: function(**arguments))
    for module in (cuda, cuda_overlap):
        monkeypatch.setattr(module, "QUICK", shape)
        monkeypatch.setattr(module, "NAMES", ("ours-flat", "ours-orig"))


def test_of_the_benchmark(tiny):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    cuda.add_arguments(parser)
    with imitated():
        report = cuda.run(parser.parse_args(["--quick", "--world", "8"]))
    assert not report.failures
    assert [len(table.rows) for table in report.tables] == [2, 2, 2]


def test_of_its_test(monkeypatch):
    monkeypatch.setattr(cuda_overlap, "NAMES", ("ours-orig",))
    with imitated():
        tests.gpu.test_bench.test_every_contender_runs_over_every_network()
