"""A race detector for code that uses streams and events, on the CPU.

``Machine`` stands in for ``torch.cuda``: it has streams, events and a current stream, and gives each stream a vector
clock.  An operation that is launched on a stream happens after what came before on that stream and after what its
events waited for, and after nothing else, whatever order the CPU really runs things in.

``Machine.watching()`` sees every operation of torch, forward, backward and optimizer alike, with the memory it reads
and writes, and notes a race wherever two accesses to the same bytes, one of them a write, are not ordered.

Note [Allocator]
    Memory is taken from the pool of the current stream, as CUDA's caching allocator does, and goes back to that pool
    when its storage is freed, whoever still reads it.  The allocator is taken to be as nasty as it may be: whatever is
    allocated is assumed to lie where anything freed in the same pool has lain.  So a first access that is not ordered
    after the last accesses to all that was freed before is a race as well.

Note [Memory of the host]
    ``Machine.rests_on_host`` marks memory that is not the device's.  What works on such memory alone, and makes more of
    it, is the host's own: it runs at once, after what the host has waited for and before what it launches next.

Note [Streams of a backward]
    CUDA's autograd runs each node on the stream that its forward ran on, after the events of the nodes its gradients
    came from, and end-of-backward callbacks on the stream that called ``backward``, after the leaves.  Gradients that
    pass from one stream to another are recorded on the other.
    ``Machine.autograd()`` does the same here with hooks on every node.

Note [Time]
    ``Machine.costs`` says how long operations take; streams and events then carry times, and ``Machine.elapsed`` is
    when the last operation would have ended on a machine whose host is infinitely fast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.streams.capture import Capture

__all__ = ["Machine", "Race"]

Clock = dict[int, int]  # stream -> how many of its operations are known to have finished

_SYNCHRONISES = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}
_KEY = "the race detector's key"
_TOUCHES_NO_MEMORY = ("aten::empty", "aten::set_")


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Stream:
    """Operations in order."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.number = len(machine.streams)
        self.clock: Clock = {self.number: 0}
        self.now = 0.0
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """What is launched from now on comes after what the event recorded."""
        if not self.machine.drops_this_wait():
            self.machine.note_wait(self, event.capture)
            _join(self.clock, event.clock)
            self.now = max(self.now, event.time)

    def wait_stream(self, other: Stream) -> None:
        """What is launched from now on comes after what ``other`` has been given so far."""
        if not self.machine.drops_this_wait():
            self.machine.note_wait(self, self.machine.capture_of(other))
            _join(self.clock, other.clock)
            self.now = max(self.now, other.now)

    def tick(self) -> Clock:
        """One more operation; returns all that happens before it, itself included."""
        _join(self.clock, self.machine.host)
        self.clock[self.number] += 1
        return dict(self.clock)


class Event:
    """A point in a stream."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}
        self.time = 0.0
        self.capture: Capture | None = None
        self._machine: Machine | None = None

    def record(self, stream: Stream) -> None:
        """Remember how far ``stream`` is."""
        self.clock = dict(stream.clock)
        self.time = stream.now
        self.capture = stream.machine.capture_of(stream)
        self._machine = stream.machine

    def synchronize(self) -> None:
        """The host waits for what was recorded."""
        if self._machine is not None and not self._machine.drops_this_wait():
            self._machine.host_waits("event")
            _join(self._machine.host, self.clock)


@dataclass(frozen=True)
class Access:
    """One operation's use of a span of bytes."""

    operation: str
    stream: int
    tick: int
    start: int
    stop: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        """Whether their order matters."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    what: str
    first: str
    second: str

    def __str__(self) -> str:
        if not self.first and not self.second:
            return self.what
        return f"{self.what}: {self.second} is not ordered after {self.first}"


@dataclass
class _Block:
    """The memory of one storage from its allocation to its release."""

    pool: int
    after: list[Access] = field(default_factory=list)  # what used the pool's memory before
    accesses: list[Access] = field(default_factory=list)
    made_in: Capture | None = None
    used_in: set[Capture] = field(default_factory=set)
    recorded: set[int] = field(default_factory=set)


class Machine:
    """Stands in for ``torch.cuda`` (``Stream``, ``Event``, ``stream``, ``current_stream``), and watches.

    Attributes:
        races: What was found.
        synchronisations: Operations that made the host wait.
        operations: How many were seen.
        costs: Seconds of an operation by its name, where not 0.
        dropped: ``(function, caller)``: waits made in that function of ``watched_file``, below that caller if it is
            not None, do nothing.
    """

    Event = Event

    def __init__(
        self, watched_file: str = "", dropped: tuple[str, str | None] | None = None
    ) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.races: list[Race] = []
        self.synchronisations: list[str] = []
        self.operations = 0
        self.costs: dict[str, float] = {}
        self.dropped = dropped
        self.drops = 0
        self._watched_file = watched_file
        self._names = iter(("compute", "gather", "reduce", "replicate", *map(str, range(99))))
        self._current = self.Stream()
        self._host = Stream(self, "the host")
        self._resting: set[int] = set()
        self._blocks: dict[int, _Block] = {}
        self._living: dict[int, StorageWeakRef] = {}
        self._freed: dict[int, list[Access]] = {}
        self._reported: set[Race] = set()
        self._capture: Capture | None = None

    # -- what code under test calls -----------------------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802
        """A new stream."""
        return Stream(self, next(self._names))

    def current_stream(self, device: Any = None) -> Stream:
        """Where operations go."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Send operations to ``stream``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def is_current_stream_capturing(self) -> bool:
        """Whether what is launched now becomes part of a graph."""
        return self.capture_of(self._current) is not None

    @contextlib.contextmanager
    def captured(self) -> Iterator[Capture]:
        """Capture what is launched inside, on a stream of its own, as ``torch.cuda.graph`` does."""
        self.synchronize()
        self._capture = Capture(self.Stream(), self.forbid)
        self._capture.origin.tick()
        try:
            with self.stream(self._capture.origin):
                yield self._capture
        finally:
            self._capture.end()

    def replay(self, graph: Capture) -> None:
        """The current stream runs ``graph``, which has been captured."""
        for stream in graph.streams:
            _join(self._current.clock, stream.clock)

    def spin(self, seconds: float) -> None:
        """Time passes on the current stream."""
        self._current.tick()
        self._current.now += seconds

    def synchronize_times(self) -> None:
        """All streams begin the next operation together."""
        now = self.elapsed
        for stream in self.streams:
            stream.now = now

    @property
    def elapsed(self) -> float:
        """When the last operation ends."""
        return max(stream.now for stream in self.streams)

    def synchronize(self) -> None:
        """The host waits for everything, as a user may at any time."""
        self.host_waits("synchronize", counts=False)
        for stream in self.streams:
            _join(self.host, stream.clock)

    def drops_this_wait(self) -> bool:
        """Whether the wait that is being made is the one to leave out."""
        if self.dropped is None:
            return False
        function, caller = self.dropped
        frame = sys._getframe(2)
        if not (
            frame.f_code.co_filename.endswith(self._watched_file)
            and frame.f_code.co_name == function
        ):
            return False
        while caller is not None:
            frame = frame.f_back
            if frame is None:
                return False
            if frame.f_code.co_name == caller:
                break
        self.drops += 1
        return True

    # -- watching -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See every operation inside the context."""
        resize, tolist = torch.UntypedStorage.resize_, torch.Tensor.tolist

        def resizing(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self.resized(storage, nbytes)
            return resize(storage, nbytes)

        def listing(tensor: torch.Tensor) -> Any:
            self.synchronise("tolist")
            return tolist(tensor)

        torch.UntypedStorage.resize_, torch.Tensor.tolist = resizing, listing
        try:
            with _Watch(self):
                yield
        finally:
            torch.UntypedStorage.resize_, torch.Tensor.tolist = resize, tolist

    @contextlib.contextmanager
    def autograd(self) -> Iterator[None]:
        """Run backwards of what is computed inside the context as in Note [Streams of a backward]."""
        with _NodeStreams(self):
            yield

    def enter(self, stream: Stream) -> Stream:
        """Make ``stream`` the current one; returns which was."""
        before, self._current = self._current, stream
        return before

    def capture_of(self, stream: Stream) -> Capture | None:
        """The graph that ``stream`` is captured in now."""
        capture = self._capture
        return capture if capture is not None and capture.takes_part(stream) else None

    def note_wait(self, stream: Stream, recorded_in: Capture | None) -> None:
        """``stream`` waits for what was recorded in a capture, or in none."""
        if recorded_in is not None and recorded_in.ended:
            self.forbid(f"{stream.name} waits for what an ended capture recorded")
        elif self._capture is not None:
            self._capture.wait(stream, recorded_in)

    def host_waits(self, operation: str, *, counts: bool = True) -> None:
        """The host waits for something."""
        if counts:
            self.synchronisations.append(operation)
        if self._capture is not None and not self._capture.ended:
            self.forbid(f"the host waits inside a capture, in {operation}")

    def forbid(self, what: str) -> None:
        """What captured graphs do not allow has been done."""
        self._report(what, "", "")

    def synchronise(self, operation: str) -> None:
        """The host waits for the current stream."""
        self.host_waits(operation)
        _join(self.host, self._current.clock)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the memory of ``tensor`` go only when ``stream`` has come as far as it is when it is freed."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.pool != stream.number:
            block.recorded.add(stream.number)

    def rests_on_host(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` is the host's."""
        storage = tensor.untyped_storage()
        self._living.setdefault(storage._cdata, StorageWeakRef(storage))
        self._resting.add(storage._cdata)

    def is_hosts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an operation on ``tensors`` is the host's own."""
        keys = [tensor.untyped_storage()._cdata for tensor in tensors]
        return bool(keys) and self._resting.issuperset(keys)

    def operation(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """One operation on the current stream, or the host's own."""
        self.operations += 1
        stream = self._host if self.is_hosts([*reads, *writes]) else self._current
        capture = self._capture
        if capture is not None and not capture.ended and not capture.takes_part(stream):
            self.forbid(f"{name} on {stream.name} takes no part in the capture that runs")
        clock = stream.tick()
        stream.now += self.costs.get(name, 0.0)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(name, tensor, clock, is_write, stream)
        if stream is self._host:
            _join(self.host, clock)
        if name in _SYNCHRONISES:
            self.synchronise(name)

    def allocated(self, tensor: torch.Tensor) -> None:
        """``tensor`` is new."""
        self._start(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory behind ``storage`` comes or goes."""
        if nbytes and not storage.nbytes():
            self._start(storage)
        elif not nbytes and storage.nbytes():
            key = storage._cdata
            self._living.setdefault(key, StorageWeakRef(storage))
            self._release(key)
            self._blocks.pop(key, None)

    def collect_freed(self) -> None:
        """Take back the memory of storages that nothing holds any more."""
        for key in [key for key, reference in self._living.items() if reference.expired()]:
            self._release(key)
            self._blocks.pop(key, None)
            self._resting.discard(key)
            del self._living[key]

    def _start(self, storage: torch.UntypedStorage) -> None:
        key, pool = storage._cdata, self._current.number
        self._living[key] = StorageWeakRef(storage)
        made_in = self.capture_of(self._current)
        self._blocks[key] = _Block(pool, list(self._freed.get(pool, ())), made_in=made_in)

    def _release(self, key: int) -> None:
        block = self._blocks.get(key)
        if block is not None:
            if block.used_in - {block.made_in}:
                self.forbid(f"memory that a graph uses is freed: last {block.accesses[-1]}")
            freed = self._freed.setdefault(block.pool, [])
            own = [access for access in block.accesses if access.stream not in block.recorded]
            latest = {access.stream: access for access in (*freed, *own, *block.after)}
            for access in (*freed, *own):
                if access.tick > latest[access.stream].tick:
                    latest[access.stream] = access
            self._freed[block.pool] = list(latest.values())

    def _access(
        self, name: str, tensor: torch.Tensor, clock: Clock, is_write: bool, stream: Stream
    ) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            self._report(f"memory that {name} uses has been freed", "", name)
            return
        key = storage._cdata
        if key not in self._blocks:
            self._living[key] = StorageWeakRef(storage)
            self._blocks[key] = _Block(0)
        block = self._blocks[key]
        start, stop = _span(tensor)
        access = Access(name, stream.number, clock[stream.number], start, stop, is_write)
        for earlier in block.after:
            if clock.get(earlier.stream, 0) < earlier.tick:
                self._race("memory that another tensor has had", earlier, access)
        for earlier in block.accesses:
            if earlier.conflicts(access) and clock.get(earlier.stream, 0) < earlier.tick:
                self._race("the same memory", earlier, access)
        block.accesses.append(access)
        capture = self.capture_of(stream)
        if capture is not None:
            block.used_in.add(capture)

    def _race(self, what: str, first: Access, second: Access) -> None:
        self._report(what, self._describe(first), self._describe(second))

    def _report(self, what: str, first: str, second: str) -> None:
        race = Race(what, first, second)
        if race not in self._reported:
            self._reported.add(race)
            self.races.append(race)

    def _describe(self, access: Access) -> str:
        kind = "write" if access.writes else "read"
        return f"{kind} by {access.operation} on {self.streams[access.stream].name}"


class _Watch(TorchDispatchMode):
    """Tells the machine about every operation."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine = self._machine
        machine.collect_freed()
        schema = func._schema
        values = [
            *zip(schema.arguments, args, strict=False),
            *(
                (argument, kwargs[argument.name])
                for argument in schema.arguments
                if argument.name in kwargs
            ),
        ]
        result = func(*args, **kwargs)
        fresh = [
            tensor
            for returned, value in zip(schema.returns, _as_tuple(result, schema), strict=False)
            if returned.alias_info is None
            for tensor in _tensors(value)
        ]
        reads, writes = [], []
        for argument, value in values:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(_tensors(value))
        if schema.returns and not writes and not fresh and schema.name not in _SYNCHRONISES:
            return result  # a view
        inputs = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        made = [t for t in fresh if t.untyped_storage()._cdata not in inputs]
        for tensor in made:
            machine.allocated(tensor)
            if machine.is_hosts([*reads, *writes]):
                machine.rests_on_host(tensor)
        if not schema.name.startswith(_TOUCHES_NO_MEMORY):
            machine.operation(schema.name, reads, [*writes, *made])
        return result


class _NodeStreams(TorchFunctionMode):
    """Puts hooks on every node of the graph."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._hook(tensor.grad_fn)
        return result

    def _hook(self, node: Any) -> None:
        if node is None or _KEY in node.metadata:
            return
        node.metadata[_KEY] = object()
        for following, _ in node.next_functions:
            self._hook(following)
        _NodeHooks(self._machine, node)


class _NodeHooks:
    """Runs one node on the stream that is current when this is made.

    Autograd adds up gradients between nodes; here that happens on the stream of the node that brings the last one.
    Nothing here keeps a node: a leaf's one, which stays while any graph has it, stays on the stream of its first use.
    """

    events: dict[Any, list[Event]] = {}  # noqa: RUF012  # by node: what its gradients come after
    caller: Stream | None = None  # whoever called backward

    def __init__(self, machine: Machine, node: Any) -> None:
        self._machine = machine
        self._stream = machine.current_stream()
        self._key = node.metadata[_KEY]
        nodes = [following for following, _ in node.next_functions if following is not None]
        self._following = [following.metadata[_KEY] for following in nodes]
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, grads: Any) -> None:
        before = self._machine.enter(self._stream)
        for grad in _tensors(grads):
            self._machine.record_stream(grad, self._stream)
        events = self.events.pop(self._key, None)
        if events is None:  # the first node
            _NodeHooks.caller = before
            self._stream.wait_stream(before)
        for event in events or ():
            self._stream.wait_event(event)

    def _after(self, *_: Any) -> None:
        event = Event()
        event.record(self._stream)
        for key in self._following:
            self.events.setdefault(key, []).append(event)
        if not self._following:  # a leaf: what is next may be the end
            assert self.caller is not None
            self._machine.enter(self.caller)
            self.caller.wait_event(event)


def _as_tuple(result: Any, schema: Any) -> tuple[Any, ...]:
    return tuple(result) if len(schema.returns) > 1 else (result,)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from the tensor's first element to its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()
