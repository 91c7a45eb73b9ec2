"""The multi-rank harness itself: values, failures, deaths, hangs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import (
    RanksFailed,
    end_kept_ranks,
    run_kept_ranks,
    run_ranks,
    run_ranks_outcomes,
)


class _NamedError(ValueError):
    def __init__(self, message: str, *, fqn: str) -> None:
        super().__init__(message)
        self.fqn = fqn


def _sum_of_ranks(scale: float, *, offset: float = 0.0) -> torch.Tensor:
    total = torch.full((2,), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return total + offset


def _facts() -> dict[str, object]:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "random": torch.rand(()).item(),
        "tasks": len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1,
    }


def _tensors() -> dict[str, object]:
    weight = torch.nn.Parameter(torch.arange(4.0))
    return {
        "parameter": weight,
        "graph": weight * 2,
        "view": weight.detach()[1:3],
        "half": torch.ones(2, dtype=torch.bfloat16),
    }


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("a last word")
        raise _NamedError("this rank gives up", fqn="blocks.0.weight")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _die_slowly_on(rank: int) -> None:
    """What a lost connection can look like: the peer fails first, the death shows a moment later."""
    if dist.get_rank() == rank:
        time.sleep(0.2)
        os._exit(7)
    raise ConnectionError("the peer is gone")


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep_under_a_telling_name()


def _sleep_under_a_telling_name() -> None:
    time.sleep(1000)


def _is_initialized() -> bool:
    return dist.is_initialized()


def _identity() -> tuple[int, float]:
    return os.getpid(), torch.rand(()).item()


def _print_and_raise(text: str, *, raises: bool) -> None:
    print(text)
    assert not raises


def _return_a_lambda() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_come_back_in_rank_order(world_size: int) -> None:
    expected = torch.full((2,), 10.0 * sum(range(1, world_size + 1)) + 1)

    values = run_ranks(_sum_of_ranks, world_size, 10.0, offset=1.0)

    assert len(values) == world_size
    assert all(torch.equal(expected, value) for value in values)


def test_ranks_are_single_threaded_and_seeded_alike() -> None:
    first, second = run_ranks(_facts, 2)

    assert [0, 1] == [first["rank"], second["rank"]]
    assert 2 == first["world_size"]
    assert 1 == first["threads"]
    assert "1" == first["omp"]
    assert first["random"] == second["random"]


def test_tensors_come_back_as_plain_values() -> None:
    (value,) = run_ranks(_tensors, 1)

    assert {torch.Tensor} == {type(tensor) for tensor in value.values()}
    assert not any(tensor.requires_grad for tensor in value.values())
    assert [0.0, 2.0, 4.0, 6.0] == value["graph"].tolist()
    assert [1.0, 2.0] == value["view"].tolist()
    assert torch.bfloat16 == value["half"].dtype


def test_a_raising_rank_fails_the_call_with_its_traceback_and_output() -> None:
    start = time.monotonic()

    with pytest.raises(RanksFailed) as failure:
        run_ranks(_raise_on, 2, 1)

    message = str(failure.value)
    assert "rank 1 of 2 in _raise_on raised _NamedError: this rank gives up" in message
    assert "in _raise_on\n" in message
    assert "a last word" in message
    assert time.monotonic() - start < 30, "the other rank was waited for instead of killed"


def test_a_dying_rank_fails_the_call_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 2 in _die_on died with exit code 7"):
        run_ranks(_die_on, 2, 0)


def test_a_death_is_named_before_the_failure_of_a_peer_that_showed_first() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_die_slowly_on, 2, 0)

    message = str(failure.value)
    assert message.startswith("rank 0 of 2 in _die_slowly_on died with exit code 7")
    assert "rank 1 of 2 in _die_slowly_on raised ConnectionError: the peer is gone" in message


def test_a_hang_fails_the_call_with_the_stacks_of_every_pending_rank() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_hang_on, 2, 1, timeout=1)

    message = str(failure.value)
    assert "ranks 1 of 2 in _hang_on hung: no answer in 1 s" in message
    assert "rank 0 had returned" in message
    assert "_sleep_under_a_telling_name" in message


def test_a_value_that_does_not_pickle_is_an_error_not_a_hang() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(_return_a_lambda, 1)


def test_outcomes_hold_the_exception_of_one_rank_and_the_broken_connection_of_the_other() -> None:
    waiting, failed = run_ranks_outcomes(_raise_on, 2, 1)

    assert failed.raised(ValueError)
    assert "_NamedError" == failed.error_type
    assert "this rank gives up" == failed.message
    assert "blocks.0.weight" == failed.fields["fqn"]
    assert waiting.raised(RuntimeError)


def test_outcomes_hold_values_and_exit_codes() -> None:
    values = run_ranks_outcomes(_sum_of_ranks, 2, 1.0)
    died, waiting = run_ranks_outcomes(_die_on, 2, 0)

    assert [True, True] == [outcome.ok for outcome in values]
    assert [3.0, 3.0] == values[0].value.tolist()
    assert 7 == died.exit_code
    assert not waiting.ok


def test_without_a_backend_there_is_no_process_group() -> None:
    assert [False] == run_ranks(_is_initialized, 1, backend=None)


def test_no_process_survives_a_failure() -> None:
    before = _children()

    with pytest.raises(RanksFailed):
        run_ranks(_raise_on, 3, 0)

    assert before == _children()


def test_kept_ranks_answer_again_with_their_group_and_new_seeds() -> None:
    first = run_kept_ranks(_identity, 2)
    total = run_kept_ranks(_sum_of_ranks, 2, 1.0)
    again = run_kept_ranks(_identity, 2)

    assert first == again
    assert [3.0, 3.0] == total[0].tolist()
    assert first != run_kept_ranks(_identity, 2, timeout=59), "another timeout, another group"
    assert {pid for pid, _ in first}.isdisjoint(pid for pid, _ in run_ranks(_identity, 2))


@pytest.mark.parametrize("fault", [_raise_on, _die_on, _hang_on])
def test_after_a_failure_kept_ranks_are_new(fault: Callable[[int], None]) -> None:
    before = run_kept_ranks(_identity, 2, timeout=2)
    with pytest.raises(RanksFailed, match=r"ranks? 1 of 2"):
        run_kept_ranks(fault, 2, 1, timeout=2)
    after = run_kept_ranks(_identity, 2, timeout=2)

    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)


def test_a_failure_of_kept_ranks_shows_the_output_of_its_own_call() -> None:
    run_kept_ranks(_print_and_raise, 1, "of the first call", raises=False)
    with pytest.raises(RanksFailed) as failure:
        run_kept_ranks(_print_and_raise, 1, "of the second call", raises=True)

    assert "of the second call" in str(failure.value)
    assert "of the first call" not in str(failure.value)


def test_kept_ranks_end_with_their_file() -> None:
    end_kept_ranks()  # what the fixture of tests.conftest calls
    before = _children()
    run_kept_ranks(_identity, 1)
    run_kept_ranks(_identity, 2)
    assert before + 3 == _children()
    end_kept_ranks()

    assert before == _children()


def _children() -> int:
    return len(multiprocessing.active_children())
