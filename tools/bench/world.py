"""Processes and process groups for the benchmarks: fresh gloo ranks, or one rank with a fake group."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from .hosts import INTERFACE, enter

__all__ = ["all_gather", "fake_group", "fake_subgroup", "reduce_scatter", "run_child", "run_gloo"]

_HOSTS = "FSDP_BENCH_HOSTS"
_OWN_CORES = "FSDP_BENCH_OWN_CORES"

# torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TIMEOUT = datetime.timedelta(seconds=120)
RankFunction = Callable[..., Any]  # module-level; plain-data arguments by keyword, plain data back


def run_gloo(
    function: RankFunction,
    world_size: int,
    *,
    environment: Mapping[str, str] | None = None,
    hosts: Sequence[str] = (),
    **arguments: Any,
) -> list[Any]:
    """Run ``function(**arguments)`` on fresh gloo ranks with one thread each; its results in rank order.

    Rank i runs in the network namespace ``hosts[i]``, if given, on a share of this machine's cores.
    """
    extra = dict(environment or {})
    if hosts:
        extra |= {"GLOO_SOCKET_IFNAME": INTERFACE, _HOSTS: ",".join(hosts), _OWN_CORES: "1"}
    return _run(_gloo_rank, function, world_size, arguments, extra)


def run_child(function: RankFunction, **arguments: Any) -> Any:
    """Run ``function(**arguments)`` in one fresh process without a process group."""
    return _run(_lone_rank, function, 1, arguments, {})[0]


@contextlib.contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of a default process group whose collectives move nothing between ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_subgroup() -> Iterator[dist.ProcessGroup]:
    """All ranks of the default group in one whose collectives move nothing between them.

    Collective: call on all ranks.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 registers the backend

    group = dist.new_group(backend="fake")
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _run(
    target: Callable[..., None],
    function: RankFunction,
    processes: int,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder, _environment(environment):
        multiprocessing.start_processes(
            target,
            args=(function, processes, folder, dict(arguments)),
            nprocs=processes,
            start_method="spawn",
        )
        return [
            json.loads(_result_file(folder, rank).read_text(encoding="ascii"))
            for rank in range(processes)
        ]


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """What a spawned rank must find in its environment when it starts: one thread a rank, and ``extra``."""
    wanted = {"OMP_NUM_THREADS": "1", **extra}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _gloo_rank(
    rank: int, function: RankFunction, world_size: int, folder: str, arguments: dict[str, Any]
) -> None:
    if _HOSTS in os.environ:
        enter(os.environ[_HOSTS].split(",")[rank])
    _take_cores(rank, world_size)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=_TIMEOUT)
    _lone_rank(rank, function, world_size, folder, arguments)
    dist.barrier()
    dist.destroy_process_group()


def _take_cores(rank: int, world_size: int) -> None:
    """Stay on this rank's share of the cores, if asked to and there is one for each rank."""
    cores = sorted(os.sched_getaffinity(0)) if _OWN_CORES in os.environ else []
    if len(cores) >= world_size:
        os.sched_setaffinity(0, cores[rank::world_size])


def _lone_rank(
    rank: int, function: RankFunction, processes: int, folder: str, arguments: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    _result_file(folder, rank).write_text(json.dumps(function(**arguments)), encoding="ascii")


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"
