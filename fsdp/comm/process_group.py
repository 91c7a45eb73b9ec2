"""Collectives over a torch process group; the algorithm is chosen once per backend and device.

Note [Point-to-point gloo]
    gloo's ``reduce_scatter`` is an all-reduce of the whole buffer, and its ``all_gather`` copies through a
    temporary.  Sends and receives straight between the slices move the same bytes in under half the time (measured,
    docs/explanation/performance.md), run without gloo's worker threads, and let the sum be taken in rank order, so
    that results are reproducible bit by bit.  Between ranks of one host short messages go through memory that they
    share (Note [Shared memory]).

Note [Tags]
    Each unit sends its gathers under one tag and its reduces under another, so data of one unit never ends up in
    another, whatever order ranks launch them in.  Messages of one tag between two ranks arrive in the order they were
    sent.  A rank that waits for what a peer will never send is found by :mod:`fsdp.comm.watch`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _torch
from ..errors import DeviceError, describe
from .collectives import DONE, Collectives, Gather, InPieces, Pending, Reduce, Work, abandon
from .direct import DirectSum
from .loopback import Loopback
from .neighbours import Line, NearCombination, NearGather, NearSums, all_are_near, meet
from .shared_memory import LONGEST_MESSAGE, Check, Neighbours
from .watch import Awaited, Channel, Watch, the_watch
from .ways import Ways, interrupt

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = [
    "NativeCollectives",
    "PointToPointCollectives",
    "StagedCollectives",
    "collectives_for",
    "communicates_on",
]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_AVERAGE: Any = dist.ReduceOp.AVG
_TAG_BASE = 1 << 20  # beyond what users choose for their own sends
_EXCHANGE_TAG_BASE = 1 << 21  # after the two tags of every unit
_TAG_OF_NOBODY = _TAG_BASE - 1
_TAG_OF_MEETINGS = _TAG_BASE - 2
_AVERAGING = ("nccl", "fake", "loopback")  # the last two stand in for the first
_KINDS = 3  # of lines through shared memory: gathers, reductions, all-reduces
_SHORT = 64 << 10  # bytes that every rank may read of every other
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_KNOWN = frozenset((*_FLOATS, *_OTHERS))  # dtypes that every backend moves as they are
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def collectives_for(group: ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives of ``group`` for tensors on ``device``; of this rank alone where ``group`` is None.

    Collective: none.
    """
    if group is None or group.size() == 1:
        return Loopback()
    if not _torch.is_process_group(group):
        return NativeCollectives(
            group, device
        )  # a stand-in with rank and size, for planning without communication
    if _torch.group_backend(group, _backend_device(group, device)) == "gloo":
        on_host = PointToPointCollectives(group)
        return on_host if device.type == "cpu" else StagedCollectives(on_host)
    return NativeCollectives(group, device)


def communicates_on(group: ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` has a backend for ``device``; so has whatever stands in for one.  Collective: none."""
    if not _torch.is_process_group(group):
        return True
    try:
        _torch.group_backend(group, device)
    except RuntimeError:
        return False
    return True


def _backend_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """``device`` if ``group`` has a backend for it, else the CPU, through which tensors are then staged.

    Raises:
        DeviceError: If it has none for either.
    """
    for candidate in (device, torch.device("cpu")):
        if communicates_on(group, candidate):
            return candidate
    raise DeviceError(
        describe(
            f"the process group can not communicate tensors on {device}",
            remedy="Pass device_id (torch.cuda.current_device(), say) to the wrapper, or move the module to the "
            "accelerator before it is wrapped.",
        )
    )


class NativeCollectives:
    """The backend's own collectives (NCCL and whatever else is not gloo), on the stream that is current."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._launch_gather = _torch.all_gather_of(group)
        self._launch_reduce = _torch.reduce_scatter_of(group)
        self._gather_options = _torch.gather_options()
        self._sum_options = _torch.on_current_stream(dist.ReduceScatterOptions())
        self._mean_options = _torch.on_current_stream(dist.ReduceScatterOptions())
        self._mean_options.reduceOp = _AVERAGE
        self.averages = _torch.is_process_group(group) and (
            _torch.group_backend(group, _backend_device(group, device)) in _AVERAGING
        )
        self._may_exchange = False
        self.rank = group.rank()
        self.size = group.size()

    def name_for_messages(self, name: str) -> None:
        """The backend has messages of its own."""

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """One in-place ``all_gather_into_tensor`` a flat parameter, coalesced into one launch."""
        if len(gathers) == 1:
            return self._gather(gathers[0]) or DONE
        return self._together([partial(self._gather, gather) for gather in gathers])

    def _gather(self, gather: Gather) -> Work | None:
        whole, own = gather.whole, gather.slices[self.rank]
        if whole.dtype not in _KNOWN:
            whole, own = _movable(whole), _movable(own)
        return self._launch_gather(whole, own, self._gather_options)

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """One ``reduce_scatter_tensor`` a flat gradient, coalesced into one launch."""
        if len(reduces) == 1:
            return self._reduce(reduces[0]) or DONE
        return self._together([partial(self._reduce, reduce) for reduce in reduces])

    def _reduce(self, reduce: Reduce) -> Work | None:
        options = self._mean_options if reduce.mean else self._sum_options
        out, whole = reduce.out, reduce.whole
        if out.is_complex():
            out, whole = _summable(out), _summable(whole)
        return self._launch_reduce(out, whole, options)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """One in-place ``all_reduce`` a tensor, coalesced into one launch."""
        launch = partial(_torch.all_reduce_on_current_stream, self._group)
        launches = [partial(launch, _summable(tensor), _OPS[op]) for tensor in tensors]
        return launches[0]() or DONE if len(launches) == 1 else self._together(launches)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """One ``broadcast`` a tensor."""
        return _broadcast(self._group, [_movable(tensor) for tensor in tensors], source)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """One send and one receive a peer, in one launch even where there is but one of them.

        NCCL carries a lone message over a communicator of two ranks and those of a group over the group's: the two
        ends of one message must not choose differently.  The group's is made by all ranks together, so an all-reduce
        comes first, for ranks that have nothing to say.
        """
        receives[self.rank].copy_(sends[self.rank])
        launches: list[Callable[[], Work | None]] = []
        for peer in range(self.size):
            if peer != self.rank and sends[peer].numel():
                launches.append(partial(self._group.send, [sends[peer]], peer, 0))
            if peer != self.rank and receives[peer].numel():
                launches.append(partial(self._group.recv, [receives[peer]], peer, 0))
        if not self._may_exchange:
            self.all_reduce([torch.zeros(1, device=self._device)]).wait()
            self._may_exchange = True
        return self._together(launches)

    def _together(self, launches: Sequence[Callable[[], Work | None]]) -> Work:
        if not launches:
            return DONE
        if self._device.type != "cuda":
            return Pending([launch() or DONE for launch in launches])
        _torch.start_coalescing(self._group, self._device)
        for launch in launches:
            launch()
        return _torch.end_coalescing(self._group, self._device) or DONE


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous ``tensor`` to be moved; as bytes, if a backend may not know its dtype (complex numbers, int16)."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(-1).view(torch.uint8)


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` to be summed; complex numbers as pairs, as torch's own functions give them to backends."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class PointToPointCollectives:
    """gloo on the CPU by sends and receives in place (see the notes above), for one unit.

    Every rank of the group makes its instances in the same order.
    """

    averages = False

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        # Each rank starts with the peer after it, so that no rank is everybody's first receiver.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._watch = the_watch()
        serial = self._serial = _SERIALS[group] = _SERIALS.get(group, -1) + 1
        self._gather_tag = _TAG_BASE + 2 * serial
        self._exchange_tag = _EXCHANGE_TAG_BASE + serial
        self._reduce_tag = self._gather_tag + 1
        self._gathers = self._channel(f"{serial}/gather")
        self._reduces = self._channel(f"{serial}/reduce")
        self._combinations = self._channel(f"{serial}/combine")
        self._exchanges = self._channel(f"{serial}/exchange")
        self._broadcasts = self._channel(f"{serial}/broadcast")
        self._lines: _Lines | None = None
        self._ways = Ways(group)
        self._has_met = False
        self.name_for_messages(f"number {serial}")

    def name_for_messages(self, name: str) -> None:
        """Set the unit's name, which errors tell."""
        self._gathers.text = f"the gather of unit {name or '<root>'!r}"
        self._reduces.text = f"the reduction of unit {name or '<root>'!r}"
        self._combinations.text = f"an all-reduce of unit {name or '<root>'!r}"
        self._exchanges.text = f"an exchange of pieces of unit {name or '<root>'!r}"
        self._broadcasts.text = f"a broadcast of unit {name or '<root>'!r}"

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Send the own slice to every peer and receive each peer's slice where it belongs."""
        gathers = [gather for gather in gathers if gather.whole.numel()]
        own = [gather.slices[self.rank] for gather in gathers]
        lines = self._connected_lines_for(sum(piece.nbytes for piece in own))
        works: list[Work] = []
        tag = self._gather_tag
        peers = self._peers if lines is None else lines.far
        for gather, piece in zip(gathers, own, strict=True):
            works += [self._ways.receive(gather.slices[peer], peer, tag) for peer in peers]
            works += [self._ways.send(piece, peer, tag) for peer in peers]
        if lines is not None:
            works.append(NearGather(lines.gathers, own, [gather.slices for gather in gathers]))
        return _Exchange(self._gathers, self._watch, works)

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Send every peer its slice; add up the received ones in rank order when waited on."""
        reduces = [reduce for reduce in reduces if reduce.out.numel()]
        nbytes = sum(reduce.whole.nbytes - reduce.out.nbytes for reduce in reduces)
        lines = self._connected_lines_for(nbytes)
        works: list[Work] = []
        received: list[dict[int, torch.Tensor]] = []
        tag = self._reduce_tag
        peers = self._peers if lines is None else lines.far
        for reduce in reduces:
            parts = self._room_for(peers, reduce.out)
            works += [self._ways.receive(parts[peer], peer, tag) for peer in peers]
            works += [self._ways.send(reduce.slices[peer], peer, tag) for peer in peers]
            received.append(parts)
        if lines is not None:
            works.append(NearSums(lines.reduces, reduces, self.rank, received))
        else:
            for reduce, parts in zip(reduces, received, strict=True):
                parts[self.rank] = reduce.slices[self.rank]
                works.append(_OrderedSum([parts[rank] for rank in range(self.size)], reduce.out))
        return _Exchange(self._reduces, self._watch, works)

    def sums_directly(self) -> bool:
        """Where all ranks share memory."""
        self._meet()
        return self._lines is not None and all_are_near(self._group)

    def sum_directly(self, sums: Sequence[InPieces]) -> None:
        """Chunk by chunk through shared memory."""
        assert self._lines is not None, "sums_directly has been asked"
        work = DirectSum(self._lines.reduces, self.rank, sums)
        _Exchange(self._reduces, self._watch, [work]).wait()

    def _room_for(self, peers: Sequence[int], out: torch.Tensor) -> dict[int, torch.Tensor]:
        """Where to receive what each of ``peers`` sends, like ``out`` ``[shard_numel]``.

        The sum starts with ranks 0 and 1, one of which is a peer: what it sends comes straight into ``out``.
        """
        first = int(self.rank == 0)
        others = [peer for peer in peers if peer != first]
        chunks = torch.empty(len(others), out.numel(), dtype=out.dtype).unbind()
        room = dict(zip(others, chunks, strict=True))
        if len(others) < len(peers):
            room[first] = out
        return room

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Gloo's own all-reduce; through shared memory where that is less work."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        everyone_reads = nbytes <= _SHORT or self.size == 2
        lines = self._lines_for(nbytes) if everyone_reads else None
        if lines is None or lines.far or not all(tensor.is_contiguous() for tensor in tensors):
            return Pending([_torch.all_reduce(self._group, tensor, _OPS[op]) for tensor in tensors])
        work = NearCombination(lines.combinations, tensors, self.rank, _COMBINE[op])
        return _Exchange(self._combinations, self._watch, [work])

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Gloo's own broadcast."""
        return _Exchange(self._broadcasts, self._watch, [_broadcast(self._group, tensors, source)])

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """One send and one receive a peer."""
        receives[self.rank].copy_(sends[self.rank])
        tag = self._exchange_tag
        works = [
            self._ways.receive(receives[peer], peer, tag)
            for peer in self._peers
            if receives[peer].numel()
        ]
        works += [
            self._ways.send(sends[peer], peer, tag) for peer in self._peers if sends[peer].numel()
        ]
        return _Exchange(self._exchanges, self._watch, works)

    def _connected_lines_for(self, nbytes: int) -> _Lines | None:
        """The same, with gloo's connections made where any rank needs them for such a message."""
        lines = self._lines_for(nbytes)
        if lines is None or not all_are_near(self._group):
            self._ways.connect()
        return lines

    def _lines_for(self, nbytes: int) -> _Lines | None:
        """The way through shared memory for a message of ``nbytes``, a number on which all ranks agree."""
        if not self._has_met:
            self._meet()
        return self._lines if nbytes <= LONGEST_MESSAGE else None

    def _meet(self) -> None:
        if self._has_met:
            return
        near = meet(self._group, _TAG_OF_MEETINGS)
        self._has_met = True
        if near is not None and self._serial < near.channels() // _KINDS:
            self._lines = _Lines.of(near, self._serial, self._peers, self._check)

    def _check(self) -> None:
        """End a long wait that the watch, of any rank, has found to be for ever."""
        if self._watch is not None and (explanation := self._watch.explanation()) is not None:
            raise explanation

    def _channel(self, kind: str) -> Channel:
        key = f"{self._group.group_name}/{kind}"
        ranks = tuple(dist.get_process_group_ranks(self._group))
        channel = Channel(key, kind, ranks, self._interrupt)
        if self._watch is not None:
            self._watch.add(channel)
        return channel

    def _interrupt(self) -> None:
        """End every wait over the group with an error: gloo closes its connections when a receive times out."""
        if self._lines is not None:
            self._lines.gathers.neighbours.interrupted = True
        interrupt(self._group, self._peers[0], _TAG_OF_NOBODY)


@dataclass(frozen=True, slots=True)
class _Lines:
    """A unit's lines to the ranks of this host, and the peers ``far`` from it."""

    gathers: Line
    reduces: Line
    combinations: Line
    far: list[int]

    @classmethod
    def of(cls, near: Neighbours, serial: int, peers: Sequence[int], check: Check) -> _Lines:
        first, second, third = (Line(near, _KINDS * serial + kind, check) for kind in range(_KINDS))
        return cls(first, second, third, [peer for peer in peers if peer not in near.ranks])


class _Exchange:
    """What a unit's gather or reduce has started; the watch knows while a thread waits for it."""

    __slots__ = ("_awaited", "_watch", "_works")

    def __init__(self, channel: Channel, watch: Watch | None, works: Sequence[Work]) -> None:
        self._awaited = Awaited(channel, channel.launched, 0.0)
        self._watch = watch
        self._works = works
        channel.launched += 1

    def abandon(self) -> None:
        """Abandon every send and receive."""
        for work in self._works:
            abandon(work)

    def wait(self) -> None:
        """Wait for every send and receive, then add up what came."""
        watch = self._watch
        if watch is None:
            for work in self._works:
                work.wait()
            return
        self._awaited.since = time.monotonic()
        watch.begin(self._awaited)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            explanation = watch.explanation()
            if explanation is not None:
                raise explanation from error
            raise
        finally:
            watch.end()


class _OrderedSum:
    """Adds ``parts`` (one a rank, in rank order) into ``out`` when waited on."""

    __slots__ = ("_out", "_parts")

    def __init__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._parts = parts
        self._out = out

    def wait(self) -> None:
        """Add the parts up; the receives that fill them come before this in the pending work."""
        first, second, *rest = self._parts
        torch.add(first, second, out=self._out)
        for part in rest:
            self._out.add_(part)
        self._parts = ()


class StagedCollectives:
    """gloo for CUDA tensors, through pinned host memory: lets two processes share one GPU and test its code path.

    Each call synchronises the current stream with the host and returns finished work.  Meant for tests.
    """

    averages = False

    def __init__(self, on_host: PointToPointCollectives) -> None:
        self._on_host = on_host
        self.rank = on_host.rank
        self.size = on_host.size

    def name_for_messages(self, name: str) -> None:
        """Pass it on."""
        self._on_host.name_for_messages(name)

    def all_gather(self, gathers: Sequence[Gather]) -> Work:
        """Gather on the host, then copy to the device."""
        for gather in gathers:
            whole = _host_copy(gather.whole)
            slices = whole.split(gather.slices[0].numel())
            self._on_host.all_gather([Gather(whole, slices)]).wait()
            gather.whole.copy_(whole)
        return DONE

    def reduce_scatter(self, reduces: Sequence[Reduce]) -> Work:
        """Reduce on the host, then copy to the device."""
        for reduce in reduces:
            whole = _host_copy(reduce.whole)
            out = _host_copy(reduce.out)
            slices = whole.split(out.numel())
            self._on_host.reduce_scatter([Reduce(whole, slices, out)]).wait()
            reduce.out.copy_(out)
        return DONE

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, op: str = "sum") -> Work:
        """Reduce on the host, then copy to the device."""
        for tensor in tensors:
            staged = _host_copy(tensor)
            self._on_host.all_reduce([staged], op=op).wait()
            tensor.copy_(staged)
        return DONE

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Work:
        """Broadcast on the host, then copy to the device."""
        for tensor in tensors:
            staged = _host_copy(tensor)
            self._on_host.broadcast([staged], source).wait()
            tensor.copy_(staged)
        return DONE

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Exchange on the host, then copy to the device."""
        staged = [_host_copy(tensor) for tensor in receives]
        self._on_host.exchange([_host_copy(tensor) for tensor in sends], staged).wait()
        for tensor, value in zip(receives, staged, strict=True):
            tensor.copy_(value)
        return DONE


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, once the current stream has produced it."""
    return tensor.detach().to("cpu", copy=True)


def _broadcast(group: ProcessGroup, tensors: Sequence[torch.Tensor], source: int) -> Work:
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    return Pending([group.broadcast([tensor], options) for tensor in tensors])


_SERIALS: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
