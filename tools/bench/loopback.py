"""A torch.distributed backend of one process: collectives move real bytes on its device and take a network's time.

Every peer is taken to hold what this rank holds.  So a gather repeats the own shard, a sum is W times the own part,
an average is it, and a broadcast changes nothing.  Values are therefore not those of a training run, but they are
defined, and the same for every wrapper; time, memory and order are what the benchmarks look at.

    with loopback_group(8, NETWORKS["ib"]) as fabric:
        ...  # any wrapper, on the CPU or on a GPU
        fabric.network = FREE
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .loopback_link import FREE, Carried, Link, Network, link_for

__all__ = ["Fabric", "LoopbackGroup", "loopback_group"]

_BACKEND = "loopback"


@dataclass
class Fabric:
    """What all groups of the process communicate over.

    Attributes:
        network: What collectives cost from now on.
        links: One for each device, made when it is first used.
        links_of: The same for single groups, by their ranks, which then do not share the others'.
        carried: Bytes and count of collectives so far, by name.
    """

    network: Network = FREE
    links: dict[torch.device, Link] = field(default_factory=dict)
    links_of: dict[tuple[int, ...], dict[torch.device, Link]] = field(default_factory=dict)
    carried: dict[str, tuple[int, int]] = field(default_factory=dict)

    def link(self, device: torch.device, ranks: tuple[int, ...]) -> Link:
        """The link of ``device`` for a group of ``ranks``."""
        links = self.links_of.get(ranks, self.links)
        if device not in links:
            links[device] = link_for(device)
        return links[device]

    def count(self, name: str, nbytes: int) -> None:
        """One more collective."""
        total, times = self.carried.get(name, (0, 0))
        self.carried[name] = (total + nbytes, times + 1)


_fabric = Fabric()


@contextlib.contextmanager
def loopback_group(
    world_size: int,
    network: Network = FREE,
    *,
    rank: int = 0,
    links: dict[torch.device, Link] | None = None,
) -> Iterator[Fabric]:
    """Be rank ``rank`` of a default process group of this kind.

    Args:
        world_size: How many ranks there seem to be.
        network: What collectives cost.
        rank: Which of them this process is.
        links: Links to use for some devices instead of real ones.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _fabric  # noqa: PLW0603  # torch makes further groups by name, with nothing of ours at hand
    _fabric = Fabric(network, dict(links or {}))
    dist.init_process_group(_BACKEND, rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield _fabric
    finally:
        dist.destroy_process_group()


@dataclass
class _Transfer:
    """One collective, or several that are launched as one."""

    nbytes: int = 0
    passes: int = 1
    moves: list[Callable[[], None]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        for move in self.moves:
            move()


class _Work(dist.Work):  # type: ignore[misc]
    """A collective under way; keeps its tensors until it has been waited on, as NCCL's does."""

    def __init__(self, carried: Carried | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._carried = carried
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        if self._carried is not None:
            self._carried.wait()
        self._tensors = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return False

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        if self._carried is None:
            raise RuntimeError("a collective inside a coalesced launch has no future of its own")
        return self._carried.future(self._tensors)


class LoopbackGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The process group (see the module).

    torch 2.13 renamed some methods; both names are there.
    """

    def __init__(self, rank: int, size: int, name: str, members: tuple[int, ...]) -> None:
        super().__init__(rank, size)
        self._rank_here = rank
        self._ranks = size
        self._members = members
        self._name = name
        self._open: _Transfer | None = None

    # -- what torch asks of a group ---------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank_here

    def size(self) -> int:
        return self._ranks

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return _BACKEND

    def name(self) -> str:
        return _BACKEND

    def _get_backend(self, device: torch.device) -> LoopbackGroup:
        return self

    def _get_backend_name(self) -> str:
        return _BACKEND

    # -- gathers ----------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:  # noqa: A002
        return self._carry("all_gather", *self._gather(output, input))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        return self._together("all_gather", map(self._gather, outputs, inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        def move() -> None:
            for wholes, own in zip(outputs, inputs, strict=True):
                for whole in wholes:
                    if whole.data_ptr() != own.data_ptr():
                        whole.copy_(own)

        nbytes = sum(own.nbytes * (self._ranks - 1) for own in inputs)
        flat = [whole for wholes in outputs for whole in wholes]
        return self._carry("all_gather", nbytes, move, [*flat, *inputs])

    def _gather(self, output: Tensor, own: Tensor) -> tuple[int, Callable[[], None], list[Tensor]]:
        def move() -> None:
            rows, values = output.view(self._ranks, -1), own.reshape(1, -1)
            if rows[self._rank_here].data_ptr() != own.data_ptr():
                rows.copy_(values)
                return
            rows[: self._rank_here].copy_(values)
            rows[self._rank_here + 1 :].copy_(values)

        return own.nbytes * (self._ranks - 1), move, [output, own]

    # -- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        return self._together(
            "all_reduce", [self._all_reduce(tensor, opts) for tensor in tensors], passes=2
        )

    allreduce_coalesced = allreduce

    def _all_reduce(
        self, tensor: Tensor, opts: Any
    ) -> tuple[int, Callable[[], None], list[Tensor]]:
        def move() -> None:
            if _sums(opts):
                tensor.mul_(self._ranks)

        return 2 * tensor.nbytes * (self._ranks - 1) // self._ranks, move, [tensor]

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        return self.allreduce(tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:  # noqa: A002
        return self._carry("reduce_scatter", *self._scatter_sum(output, input, opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        sums = [
            self._scatter_sum(out, whole, opts) for out, whole in zip(outputs, inputs, strict=True)
        ]
        return self._together("reduce_scatter", sums)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> _Work:
        def move() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                torch.mul(parts[self._rank_here], self._ranks if _sums(opts) else 1, out=out)

        nbytes = sum(out.nbytes * (self._ranks - 1) for out in outputs)
        parts = [part for each in inputs for part in each]
        return self._carry("reduce_scatter", nbytes, move, [*outputs, *parts])

    def _scatter_sum(
        self, out: Tensor, whole: Tensor, opts: Any
    ) -> tuple[int, Callable[[], None], list[Tensor]]:
        def move() -> None:
            rows = whole.view(self._ranks, -1)
            flat = out.view(-1)
            if flat.data_ptr() != rows[self._rank_here].data_ptr():
                torch.sum(rows, 0, out=flat)  # every byte is read, as when it is sent
                flat.copy_(rows[self._rank_here])
            if _sums(opts):
                flat.mul_(self._ranks)

        return out.nbytes * (self._ranks - 1), move, [out, whole]

    # -- the rest ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return self._carry("broadcast", nbytes, _nothing, list(tensors))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> _Work:
        def move() -> None:
            if output.numel() == input.numel():
                output.view(-1).copy_(input.reshape(-1))

        nbytes = output.nbytes * (self._ranks - 1) // self._ranks
        return self._carry("all_to_all", nbytes, move, [output, input])

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        def move() -> None:
            for out, own in zip(outputs, inputs, strict=True):
                if out.numel() == own.numel():
                    out.copy_(own)

        nbytes = sum(out.nbytes for out in outputs) * (self._ranks - 1) // self._ranks
        return self._carry("all_to_all", nbytes, move, [*outputs, *inputs])

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        return self.allgather(outputs, inputs, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> _Work:
        def move() -> None:
            for out, parts in zip(outputs, inputs, strict=False):
                out.copy_(parts[self._rank_here])

        return self._carry("scatter", sum(out.nbytes for out in outputs), move, list(outputs))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> _Work:
        return self._carry("send", sum(t.nbytes for t in tensors), _nothing, list(tensors))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> _Work:
        return self._carry("recv", 0, _nothing, list(tensors))  # paid for by the send

    def barrier(self, opts: Any = None) -> _Work:
        return self._carry("barrier", 0, _nothing, [torch.empty(0)])

    # -- launches ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._open = _Transfer()

    def _end_coalescing(self, device: torch.device) -> _Work:
        assert self._open is not None
        transfer, self._open = self._open, None
        return self._launch(transfer)

    def _together(
        self,
        name: str,
        collectives: Any,
        passes: int = 1,
    ) -> _Work:
        """Several collectives in one launch."""
        transfer = _Transfer(passes=passes)
        for nbytes, move, tensors in collectives:
            transfer.nbytes += nbytes
            transfer.moves.append(move)
            transfer.tensors += tensors
        return self._carry(name, transfer.nbytes, transfer.run, transfer.tensors, passes)

    def _carry(
        self,
        name: str,
        nbytes: int,
        move: Callable[[], None],
        tensors: list[Tensor],
        passes: int = 1,
    ) -> _Work:
        _fabric.count(name, nbytes)
        if self._open is None:
            return self._launch(_Transfer(nbytes, passes, [move], tensors))
        self._open.nbytes += nbytes
        self._open.passes = max(passes, self._open.passes)
        self._open.moves.append(move)
        self._open.tensors += tensors
        return _Work(None, ())

    def _launch(self, transfer: _Transfer) -> _Work:
        if not transfer.tensors:
            return _Work(None, ())
        seconds = _fabric.network.seconds(transfer.nbytes, self._ranks, transfer.passes)
        with torch.no_grad():
            link = _fabric.link(transfer.tensors[0].device, self._members)
            carried = link.carry(seconds, transfer.run)
        return _Work(carried, transfer.tensors)


def _nothing() -> None:
    """A broadcast finds every rank holding the value already."""


def _sums(opts: Any) -> bool:
    """Whether a reduction adds up; all others leave what W equal contributions have in common."""
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


def _create(options: Any, _: Any) -> LoopbackGroup:
    members = tuple(options.global_ranks_in_group)
    return LoopbackGroup(options.group_rank, options.group_size, options.group_id, members)


dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
