"""The two movements of data that ZeRO needs: owners hand out tensors, and gradients are summed on their owners.

Note [Bytes on the wire]
    An owner sends each of its tensors straight from where it lies to where it lies on the others: nothing is packed
    but small tensors, whose copies cost less than their messages.  With P elements and W ranks a rank sends
    ``P / W * (W - 1)`` elements to hand out its parameters and as many to bring gradients to their owners: together
    what one all-reduce moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from .. import _torch
from ..comm.collectives import Work
from .packed import flat_view, is_dense

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["Wire", "host_wire", "make_wire"]

_SMALL_NBYTES = 32 << 10  # below this, tensors of one dtype travel packed
_WINDOW_NBYTES = 64 << 20  # staged on an accelerator at a time
_TAG_BASE = 1 << 22  # beyond the tags of comm/process_group.py


class Wire(Protocol):
    """Communication for tensors on one device.  ``tag`` tells apart what may be in flight in any order."""

    def hand_out(self, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0) -> Work:
        """Start to copy each rank's tensors to all others, in place.

        Collective: all ranks, with equal shapes and dtypes; backends other than gloo also in the same order.
        """

    def send_to(
        self, target: int, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0
    ) -> Work:
        """Like :meth:`hand_out`, but only ``target`` receives; the others need give their own tensors only."""

    def reduce(self, runs: Sequence[tuple[int, torch.Tensor]], tag: int = 0) -> Work:
        """Start to sum each 1-D run on the rank named beside it, in place; a negative rank means on all.

        Elsewhere the run's contents are undefined until overwritten.

        Collective: all ranks, with equal runs; backends other than gloo also in the same order.
        """


def make_wire(group: ProcessGroup, device: torch.device) -> Wire:
    """The wire of ``group`` for tensors on ``device``.  Collective: none."""
    try:
        backend = _torch.group_backend(group, device)
    except RuntimeError:  # no backend for this device: through host memory
        backend = "gloo"
    if backend != "gloo":
        return _NativeWire(group, device)
    on_host = _GlooWire(group)
    return on_host if device.type == "cpu" else _StagedWire(on_host)


class _Pending:
    """Works to wait for, and what to do then; waiting again does nothing."""

    __slots__ = ("_kept", "_then", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        then: Sequence[Callable[[], object]] = (),
        kept: object = None,
    ) -> None:
        self._works = works
        self._then = then
        self._kept = kept  # tensors that works still read or write

    def wait(self) -> None:
        """Wait for all works, then finish."""
        works, then = self._works, self._then
        self._works, self._then = (), ()
        for work in works:
            work.wait()
        for finish in then:
            finish()
        self._kept = None


class _Parcel:
    """Tensors of one dtype that travel in one message."""

    __slots__ = ("_tensors", "_views", "buffer")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        first = self._tensors[0]
        numels = [tensor.numel() for tensor in self._tensors]
        self.buffer = torch.empty(sum(numels), dtype=first.dtype, device=first.device)
        parts = self.buffer.split(numels)
        self._views = [
            part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)
        ]

    def fill(self) -> None:
        """Copy the tensors into the buffer."""
        _torch.foreach_copy(self._views, self._tensors)

    def empty(self) -> None:
        """Copy the buffer into the tensors."""
        _torch.foreach_copy(self._tensors, self._views)


def _messages(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[_Parcel]]:
    """Tensors that travel from where they lie, as bytes, and parcels for those that are small or have gaps."""
    direct: list[torch.Tensor] = []
    packed: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.nbytes < _SMALL_NBYTES or not is_dense(tensor):
            packed.setdefault(tensor.dtype, []).append(tensor)
        else:
            direct.append(_as_bytes(tensor))
    return direct, [_Parcel(small) for small in packed.values()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as bytes, so that every dtype travels alike."""
    return flat_view(tensor.detach()).view(torch.uint8)


class _GlooWire:
    """gloo on the CPU, by sends and receives (see Note [Point-to-point gloo] in comm/process_group.py).

    Nothing here needs gloo's worker threads, so it is safe inside a gradient hook, where these may all be busy.
    Messages of one tag between two ranks arrive in the order they were sent.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._ranks = range(group.size())
        # Each rank starts with the peer after it, so that no rank is everybody's first receiver.
        self._peers = [(self._rank + step) % group.size() for step in range(1, group.size())]

    def hand_out(self, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0) -> Work:
        return self._move(tensors_by_rank, self._ranks, tag)

    def send_to(
        self, target: int, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0
    ) -> Work:
        return self._move(tensors_by_rank, [target], tag)

    def _move(
        self,
        tensors_by_rank: Sequence[Sequence[torch.Tensor]],
        targets: Sequence[int],
        tag: int,
    ) -> Work:
        tag += _TAG_BASE
        works: list[Work] = []
        unpack: list[Callable[[], object]] = []
        kept: list[object] = []
        receivers = [peer for peer in self._peers if peer in targets]
        if self._rank in targets:
            for owner in self._peers:
                direct, parcels = _messages(tensors_by_rank[owner])
                works += [
                    self._group.recv([message], owner, tag)
                    for message in (*direct, *(parcel.buffer for parcel in parcels))
                ]
                unpack += [parcel.empty for parcel in parcels]
                kept.append(direct)
        if receivers:
            direct, parcels = _messages(tensors_by_rank[self._rank])
            for parcel in parcels:
                parcel.fill()
            for message in (*direct, *(parcel.buffer for parcel in parcels)):
                works += [self._group.send([message], peer, tag) for peer in receivers]
            kept.append((direct, parcels))
        return _Pending(works, unpack, kept)

    def reduce(self, runs: Sequence[tuple[int, torch.Tensor]], tag: int = 0) -> Work:
        tag += _TAG_BASE
        works: list[Work] = []
        sums: list[Callable[[], object]] = []
        for owner, run in runs:
            if not run.numel():
                continue
            if owner < 0:
                works.append(_torch.all_reduce(self._group, run, dist.ReduceOp.SUM))
            elif owner != self._rank:
                works.append(self._group.send([run], owner, tag))
            elif self._peers:
                parts = {peer: torch.empty_like(run) for peer in self._peers}
                works += [self._group.recv([part], peer, tag) for peer, part in parts.items()]
                parts[self._rank] = run
                sums.append(_OrderedSum([parts[rank] for rank in self._ranks], run))
        return _Pending(works, sums, runs)


class _OrderedSum:
    """Adds ``parts`` up in rank order when called, so that results are reproducible; ``out`` is one of the parts."""

    __slots__ = ("_out", "_parts")

    def __init__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._parts = parts
        self._out = out

    def __call__(self) -> None:
        first, *middle, last = self._parts
        for part in middle:
            first.add_(part)
        torch.add(first, last, out=self._out)
        self._parts = ()


class _StagedWire:
    """gloo for tensors on an accelerator, through host memory; returns finished work.  Meant for tests."""

    def __init__(self, on_host: _GlooWire) -> None:
        self._on_host = on_host

    def hand_out(self, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0) -> Work:
        host = [[tensor.detach().cpu() for tensor in tensors] for tensors in tensors_by_rank]
        self._on_host.hand_out(host, tag).wait()
        return _copy_back(tensors_by_rank, host)

    def send_to(
        self, target: int, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0
    ) -> Work:
        host = [[tensor.detach().cpu() for tensor in tensors] for tensors in tensors_by_rank]
        self._on_host.send_to(target, host, tag).wait()
        return _copy_back(tensors_by_rank, host)

    def reduce(self, runs: Sequence[tuple[int, torch.Tensor]], tag: int = 0) -> Work:
        host = [(owner, run.cpu()) for owner, run in runs]
        self._on_host.reduce(host, tag).wait()
        return _copy_back([[run for _, run in runs]], [[run for _, run in host]])


def _copy_back(
    tensors: Sequence[Sequence[torch.Tensor]], sources: Sequence[Sequence[torch.Tensor]]
) -> Work:
    for targets, values in zip(tensors, sources, strict=True):
        for target, value in zip(targets, values, strict=True):
            target.detach().copy_(value)
    return _Pending(())


class _NativeWire:
    """The backend's own broadcasts, sends and reductions (NCCL and whatever else is not gloo), one launch a call."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank = group.rank()

    def hand_out(self, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0) -> Work:
        launches: list[Callable[[], Work]] = []
        unpack: list[Callable[[], object]] = []
        for owner, tensors in enumerate(tensors_by_rank):
            direct, parcels = _messages(tensors)
            for parcel in parcels:
                if owner == self._rank:
                    parcel.fill()
                else:
                    unpack.append(parcel.empty)
            launches += [
                partial(self._broadcast, message, owner)
                for message in (*direct, *(parcel.buffer for parcel in parcels))
            ]
        return _Pending(self._launch(launches), unpack)

    def send_to(
        self, target: int, tensors_by_rank: Sequence[Sequence[torch.Tensor]], tag: int = 0
    ) -> Work:
        if self._rank != target:
            for window in _windows(tensors_by_rank[self._rank]):
                self._wait(
                    [
                        partial(self._group.send, [self._to_device(tensor)], target, tag)
                        for tensor in window
                        if tensor.numel()
                    ]
                )
            return _Pending(())
        owners = [rank for rank in range(len(tensors_by_rank)) if rank != target]
        queues = {owner: _windows(tensors_by_rank[owner]) for owner in owners}
        for step in range(max((len(queue) for queue in queues.values()), default=0)):
            launches: list[Callable[[], Work]] = []
            received: list[tuple[torch.Tensor, torch.Tensor]] = []
            for owner, queue in queues.items():
                for tensor in queue[step] if step < len(queue) else ():
                    if not tensor.numel():
                        continue
                    staged = torch.empty_like(tensor, device=self._device)
                    received.append((tensor, staged))
                    launches.append(partial(self._group.recv, [_as_bytes(staged)], owner, tag))
            self._wait(launches)
            for tensor, staged in received:
                tensor.detach().copy_(staged)
        return _Pending(())

    def reduce(self, runs: Sequence[tuple[int, torch.Tensor]], tag: int = 0) -> Work:
        return _Pending(self._launch([partial(self._reduce, owner, run) for owner, run in runs]))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's bytes on the accelerator, without its gaps."""
        there = tensor.to(self._device)
        return _as_bytes(there if is_dense(there) else there.contiguous())

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = owner
        work: Work = self._group.broadcast([tensor], options)
        return work

    def _reduce(self, owner: int, run: torch.Tensor) -> Work:
        if owner < 0:
            return _torch.all_reduce(self._group, run, dist.ReduceOp.SUM)
        options: Any = dist.ReduceOptions()
        options.rootRank = owner
        options.reduceOp = dist.ReduceOp.SUM
        work: Work = self._group.reduce([run], options)
        return work

    def _wait(self, launches: Sequence[Callable[[], Work]]) -> None:
        for work in self._launch(launches):
            work.wait()

    def _launch(self, launches: Sequence[Callable[[], Work]]) -> list[Work]:
        """Start all in one launch, even where there is but one (see ``NativeCollectives.exchange``)."""
        if self._device.type != "cuda" or not launches:
            return [launch() for launch in launches]
        _torch.start_coalescing(self._group, self._device)
        for launch in launches:
            launch()
        work = _torch.end_coalescing(self._group, self._device)
        return [] if work is None else [work]


def _windows(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in runs of bounded size, the same on sender and receiver."""
    windows: list[list[torch.Tensor]] = []
    filled = _WINDOW_NBYTES
    for tensor in tensors:
        if filled >= _WINDOW_NBYTES:
            windows.append([])
            filled = 0
        windows[-1].append(tensor)
        filled += tensor.nbytes
    return windows


def host_wire(group: ProcessGroup, device: torch.device) -> Wire:
    """The wire of ``group`` for tensors in host memory; staged on ``device`` where the backend needs that.

    Collective: none.
    """
    host = torch.device("cpu")
    try:
        _torch.group_backend(group, host)
    except RuntimeError:
        return _NativeWire(group, device)
    return make_wire(group, host)
