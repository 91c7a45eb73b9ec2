"""CUDA imitated on the CPU, so that whatever is written for a GPU has run before it meets one.

Inside ``imitated()`` tensors that are meant for ``cuda`` are made on the CPU, and the streams and events of
``torch.cuda`` are those of the race detector (``tests.streams.simulator``): the code that runs is that of accelerators,
and whatever its streams do not order is an error at the end, as is a wait of the host under
``torch.cuda.set_sync_debug_mode("error")``.

``FSDP_IMITATE_CUDA=1 python -m pytest tests/gpu`` runs every test of the GPU so.

What is not imitated: kernels, NCCL, memory figures, compiled kernels, and that tensors of two devices do not mix.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo import trace_rules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

import fsdp.flat.parameter
import fsdp.init.build
import fsdp.runtime.streams
from tests.streams.capture import Capture
from tests.streams.scenarios import OnTheSpot
from tests.streams.simulator import Event, Machine, Stream
from tests.support.ranks import run_ranks
from tools.bench import loopback

__all__ = ["WANTED", "imitated", "run_imitated", "run_ranks_imitated"]

WANTED = bool(os.environ.get("FSDP_IMITATE_CUDA")) and not torch.cuda.is_available()
_CUDA = torch.device("cuda", 0)
_STATS = ("reserved_bytes", "allocated_bytes", "segment")


class _OnHost(TorchFunctionMode):
    """Sends what is meant for the GPU to the CPU, in ordinary memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.record_stream:
            return None
        given = {name: _moved(value) for name, value in (kwargs or {}).items()}
        given.pop("pin_memory", None)
        return func(*map(_moved, args), **given)


def _moved(value: Any) -> Any:
    is_cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


def _accelerator(check_available: bool = False) -> torch.device | None:
    """The GPU; none for optimizers, which ask so and would look for a graph of torch's."""
    return None if check_available else _CUDA


class _Event(Event):
    """As ``torch.cuda.Event``."""

    machine: _Cuda

    def record(self, stream: Stream | None = None) -> None:
        super().record(self.machine.current_stream() if stream is None else stream)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds; some."""
        return 1.0


class _Graph:
    """As ``torch.cuda.CUDAGraph``: a replay leaves behind what the capture did, since its inputs are the same."""

    def __init__(self) -> None:
        self.capture: Capture | None = None
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replay(self) -> None:
        """Run it."""
        assert self.capture is not None
        _Event.machine.replay(self.capture)
        with _disable_current_modes(), torch.no_grad():
            for tensor, value in self.results:
                tensor.copy_(value)


class _Cuda(Machine):
    """The machine as ``torch.cuda``."""

    Event = _Event
    Graph = _Graph

    def __init__(self) -> None:
        super().__init__()
        self.forbids_waiting = False
        self.written: list[torch.Tensor] = []

    def set_sync_debug_mode(self, mode: str) -> None:
        """Whether the host may wait."""
        self.forbids_waiting = mode == "error"

    def host_waits(self, operation: str, *, counts: bool = True) -> None:
        """An error where waits are."""
        if self.forbids_waiting:
            raise RuntimeError(f"called a synchronizing CUDA operation: {operation}")
        super().host_waits(operation, counts=counts)

    def operation(self, name: str, reads: Any, writes: Any) -> None:
        """Remember what a capture has written."""
        super().operation(name, reads, writes)
        if self.is_current_stream_capturing():
            self.written += [tensor.detach() for tensor in writes]

    @contextlib.contextmanager
    def graph(self, graph: _Graph) -> Iterator[None]:
        """Capture."""
        self.written = []
        with self.captured() as graph.capture:
            yield
        self.replay(
            graph.capture
        )  # it has not run yet, and what is launched next will find nothing done
        there = [tensor for tensor in self.written if tensor.untyped_storage().nbytes()]
        with _disable_current_modes():
            graph.results = [(tensor, tensor.clone()) for tensor in there]

    def memory_stats(self) -> dict[str, int]:
        """Nothing is allocated."""
        kinds = ("current", "peak", "allocated")
        stats = {f"{stat}.all.{kind}": 0 for stat in _STATS for kind in kinds}
        return {**stats, "num_alloc_retries": 0}


@contextlib.contextmanager
def imitated() -> Iterator[Machine]:
    """Have a GPU.

    Raises:
        AssertionError: At the end, if streams left a race.
    """
    trace_rules.get_torch_obj_rule_map()  # made once, of functions as they are found in torch.cuda
    machine = _Event.machine = _Cuda()
    lanes = fsdp.runtime.streams.Lanes.made_by(machine, _CUDA)
    cuda = {
        name: getattr(machine, name)
        for name in (
            "Event",
            "Stream",
            "current_stream",
            "graph",
            "is_current_stream_capturing",
            "memory_stats",
            "set_sync_debug_mode",
            "stream",
            "synchronize",
        )
    }
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    for name in ("_sleep", "empty_cache", "reset_peak_memory_stats", "set_device"):
        cuda[name] = nothing
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                **cuda,
                CUDAGraph=_Graph,
                is_available=lambda: True,
                device_count=lambda: 1,
                current_device=lambda: 0,
            )
        )
        for owner, name, value in (
            (torch.accelerator, "current_accelerator", _accelerator),
            (fsdp.flat.parameter, "freed_storage", nothing),
            (fsdp.runtime.streams, "_lanes_of", lambda _: lanes),
            (loopback, "link_for", lambda _: OnTheSpot()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        on_host = stack.enter_context(_OnHost())

        def backward(*args: Any, **kwargs: Any) -> Any:
            with on_host:  # `Tensor.backward` runs without modes, and so would hooks
                return ordinary(*args, **kwargs)

        ordinary = torch.autograd._engine_run_backward
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        stack.enter_context(machine.watching())
        stack.enter_context(machine.autograd())
        yield machine
    assert not machine.races, "\n".join(map(str, machine.races))


def run_imitated(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` with a GPU, as one rank of several."""
    with imitated():
        return fn(*args)


def run_ranks_imitated(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout: float = 60
) -> list[Any]:
    """As ``run_ranks``; one rank of NCCL is one of the loop-back group, in this process, whose GPU it uses."""
    if backend == "gloo":
        return run_ranks(run_imitated, world_size, fn, *args, timeout=timeout)
    ordinary = fsdp.init.build.collectives_for
    with (
        loopback.loopback_group(world_size),
        mock.patch.object(fsdp.init.build, "collectives_for", ordinary),
    ):
        return [fn(*args)]
