"""Run a function on every rank of a fresh gloo world: about 0.1 s for two ranks.

``run_ranks`` is the form for tests of what works: values come back in rank order, and any failure of any rank fails
the test with that rank's traceback, output and (for a hang) stacks.  ``run_ranks_outcomes`` is the form for tests of
errors: each rank's value or exception comes back as data.  ``run_kept_ranks`` is ``run_ranks`` for the many cases of
one rule: a file's calls of one world size share their ranks, which saves most of the time of a small case.

How a world is made, and why:

- Ranks are forked from a server that has imported torch, pytest and the package (``tests.support.preload``).  They are
  fresh processes for every call, so that no state is shared between tests, unless a test asks for kept ones.
- Ranks meet in a ``FileStore`` inside a temporary folder, never on a TCP port.
- A rank gets its call through a pipe and answers through it.  It stays alive until the parent closes the pipe, so that
  no rank can break the connections of another by leaving early, and then leaves by ``os._exit``: destroying a process
  group can wait for peers.
- The functions and their arguments travel as pickles.  Tensors in return values come back as plain CPU tensors by
  value (``multiprocessing``'s own pickler would send file descriptors).
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import io
import itertools
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Outcome",
    "RanksFailed",
    "end_kept_ranks",
    "run_kept_ranks",
    "run_ranks",
    "run_ranks_outcomes",
]

_ROOT = Path(__file__).resolve().parents[2]
_LINGER_SECONDS = (
    0.5  # a rank that raised stays this long: what was sent before arrives, a cause shows
)
_DUMP_SECONDS = 2.0  # how long the stacks of hanging ranks may take to be written
_OUTPUT_CHARS = 4000  # the tail of a failing rank's output that is shown


@dataclass(frozen=True)
class Outcome:
    """What one rank did: returned ``value``, raised, or died.

    Attributes:
        rank: The rank in the default process group.
        value: What the function returned; None if it raised or died.
        error_type: Class name of the exception, or None.
        error_bases: Names of all classes of the exception, the most derived first.
        message: ``str(exception)``.
        fields: The exception's attributes that are plain data (``fqn``, ``unit``, ``ranks``, ...).
        traceback: The formatted traceback.
        exit_code: The exit status of a rank that died before it answered (negative: a signal), else None.
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    error_bases: tuple[str, ...] = ()
    message: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error_type is None and self.exit_code is None

    def raised(self, error: type[BaseException]) -> bool:
        """Whether the function raised ``error`` or a subclass of it."""
        return error.__name__ in self.error_bases


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message says which, with tracebacks or stacks.

    Attributes:
        outcomes: What is known of the ranks that answered or died, by rank.
    """

    def __init__(self, message: str, outcomes: dict[int, Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` fresh ranks and return their values in rank order.

    Inside ``fn`` the default process group is initialised, torch runs one thread and the seeds are 0 on every rank.

    Args:
        fn: A function at module level (it travels by name).
        world_size: Number of processes.
        args: Passed on; must pickle.
        timeout: Seconds for the whole world, and for each collective of the default process group.
        backend: Backend of the default process group; None makes no process group.
        kwargs: Passed on; must pickle.

    Returns:
        The ranks' return values; tensors as detached CPU tensors.

    Raises:
        RanksFailed: If a rank raised (its traceback is the message), died (its exit code) or hung (the stacks of all
            pending ranks).  The other ranks are killed half a second later.
    """
    __tracebackhide__ = True
    with _World(world_size, timeout=timeout, backend=backend) as world:
        outcomes = world.run(_Call(fn, args, kwargs), stop_at_failure=True)
    return world.values(outcomes)


def run_kept_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """:func:`run_ranks` on the ranks that answered the file's last such call, with its process group.

    A rank costs 0.1 s of processor time before it has trained its first model, and a few milliseconds from then on.
    For rules about values, therefore, whose cases are many and leave nothing behind: no patched module, no option of
    torch, no cache that the rule is about.  Every call finds the seeds at 0 and the garbage of the last one collected.
    After a failure of any rank the next call has fresh ranks, and so has every file.
    """
    __tracebackhide__ = True
    kind = world_size, timeout, backend
    with contextlib.ExitStack() as ending:
        world = _kept.pop(kind, None) or _World(world_size, timeout=timeout, backend=backend)
        ending.enter_context(world)
        outcomes = world.run(_Call(fn, args, kwargs), stop_at_failure=True)
        if all(outcome.ok for outcome in outcomes.values()):
            ending.pop_all()
            _kept[kind] = world
    return world.values(outcomes)


def end_kept_ranks() -> None:
    """End the ranks that ``run_kept_ranks`` keeps (``tests.conftest`` calls this after each file)."""
    while _kept:
        with _kept.popitem()[1]:
            pass


def run_ranks_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[Outcome]:
    """Like :func:`run_ranks`, but exceptions and deaths come back as data: one :class:`Outcome` a rank.

    A rank that raised leaves half a second after it answered, which breaks its connections as a crash would; ranks
    that returned stay until all have answered.

    Raises:
        RanksFailed: If a rank hung, which no test expects.
    """
    __tracebackhide__ = True
    with _World(world_size, timeout=timeout, backend=backend) as world:
        outcomes = world.run(_Call(fn, args, kwargs), stop_at_failure=False)
    return [outcomes[rank] for rank in range(world_size)]


@dataclass(frozen=True)
class _Call:
    """What the ranks of a world do next."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))


class _World:
    """Some ranks, seen from the parent; a context that leaves no process behind, and may be entered again before."""

    def __init__(self, world_size: int, *, timeout: float, backend: str | None) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._backend = backend
        self._name = ""
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> _World:
        if self._processes:
            return self
        context = _fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        try:
            for rank in range(self._world_size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                job = _Job(rank, self._world_size, self._folder.name, self._timeout, self._backend)
                process = context.Process(target=_rank_main, args=(theirs, job), daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()  # or the death of the rank would never show as the end of the pipe
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        # `values` still reads the outputs after the block.
        self._outputs = {rank: self._read(f"output-{rank}") for rank in range(self._world_size)}
        self._folder.cleanup()

    def run(self, call: _Call, *, stop_at_failure: bool) -> dict[int, Outcome]:
        """Send the call and collect the answers until all have come, or until soon after a failure that ends the wait.

        Soon after, not at once: the peers of a rank that dies may tell of their lost connection before its own pipe
        ends, and what is told has to name the cause.
        """
        self._name = call.name
        self._send(pickle.dumps(call))
        deadline = time.monotonic() + self._timeout
        outcomes: dict[int, Outcome] = {}
        leave_at: dict[int, float] = {}
        stop_at = math.inf
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while pending:
            next_event = min([deadline, stop_at, *leave_at.values()])
            ready = connection.wait(list(pending), max(0.0, next_event - time.monotonic()))
            now = time.monotonic()
            for pipe in ready:
                rank = pending.pop(pipe)
                outcome = outcomes[rank] = self._receive(pipe, rank)
                if stop_at_failure:
                    stop_at = stop_at if outcome.ok else min(stop_at, now + _LINGER_SECONDS)
                elif outcome.error_type is not None:
                    leave_at[rank] = now + _LINGER_SECONDS
            for rank in [rank for rank, at in leave_at.items() if at <= now]:
                self._pipes[rank].close()
                del leave_at[rank]
            if now >= stop_at:
                return outcomes
            if pending and now >= deadline:
                raise RanksFailed(self._describe_hang(sorted(pending.values()), outcomes), outcomes)
        return outcomes

    def values(self, outcomes: dict[int, Outcome]) -> list[Any]:
        """What the ranks returned, in their order; an error if not all did."""
        __tracebackhide__ = True
        failed = [outcome for outcome in outcomes.values() if not outcome.ok]
        if failed:
            failed.sort(
                key=lambda outcome: outcome.exit_code is None
            )  # the dead first: they are causes
            raise RanksFailed("\n".join(map(self._describe, failed)), outcomes) from None
        return [outcomes[rank].value for rank in range(self._world_size)]

    def _send(self, call: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(call)  # the death of a rank shows when its answer is waited for

    def _describe(self, outcome: Outcome) -> str:
        """Say what a rank that failed did, with what it printed."""
        where = f"rank {outcome.rank} of {self._world_size} in {self._name}"
        if outcome.exit_code is not None:
            text = f"{where} died with exit code {outcome.exit_code}"
        else:
            text = f"{where} raised {outcome.error_type}: {outcome.message}\n\n{outcome.traceback}"
        output = self._outputs.get(outcome.rank, "")[-_OUTPUT_CHARS:].strip()
        return f"{text}\n--- output of rank {outcome.rank} ---\n{output}" if output else text

    def _receive(self, pipe: connection.Connection, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return Outcome(rank, exit_code=self._processes[rank].exitcode)
        return outcome

    def _describe_hang(self, ranks: list[int], outcomes: dict[int, Outcome]) -> str:
        """Make every pending rank write its stacks, and collect them."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        give_up_at = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < give_up_at and not all(self._read(f"stacks-{r}") for r in ranks):
            time.sleep(0.05)
        time.sleep(0.05)  # the dump is not written in one piece
        names = ", ".join(map(str, ranks))
        what = f"ranks {names} of {self._world_size} in {self._name} hung"
        lines = [f"{what}: no answer in {self._timeout} s"]
        lines += [f"rank {rank} had {_state(done)}" for rank, done in sorted(outcomes.items())]
        for rank in ranks:
            stacks = self._read(f"stacks-{rank}").strip() or "(no stacks were written)"
            lines += [f"--- stacks of rank {rank} ---", stacks]
            if output := self._read(f"output-{rank}")[-_OUTPUT_CHARS:].strip():
                lines += [f"--- output of rank {rank} ---", output]
        return "\n".join(lines)

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text(errors="replace") if path.exists() else ""


def _state(outcome: Outcome) -> str:
    if outcome.exit_code is not None:
        return f"died with exit code {outcome.exit_code}"
    return f"raised {outcome.error_type}: {outcome.message}" if outcome.error_type else "returned"


_kept: dict[tuple[int, float, str | None], _World] = {}


@functools.cache
def _fork_server() -> Any:
    """The multiprocessing context of the preloaded server, which the first call starts (2 to 8 s)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    # The server ignores the parent's sys.path (CPython 3.11) and must find this package; its threads are set for
    # good when torch is imported.  Whoever asks there whether there is a GPU must not open it, which no process that
    # is forked from it could do again.
    wanted = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    # The server forks only once its imports are done; that time must not count against any test's timeout.
    first = context.Process(target=_do_nothing, daemon=True)
    first.start()
    first.join()
    return context


def _do_nothing() -> None:
    """Body of the first process."""


@dataclass(frozen=True)
class _Job:
    """What a rank needs to know."""

    rank: int
    world_size: int
    folder: str
    timeout: float
    backend: str | None


def _rank_main(pipe: connection.Connection, job: _Job) -> None:
    """Body of a rank: answer every call, stay until the parent lets go, leave without any teardown."""
    _redirect_output(Path(job.folder, f"output-{job.rank}"))
    stacks = Path(job.folder, f"stacks-{job.rank}").open("w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    exit_code = 0
    for number in itertools.count():
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            if number == 0:
                _join(job)
            else:
                gc.collect()  # what the last call left
                os.ftruncate(1, 0)
            answer = _dumps(Outcome(job.rank, value=_run(call)))
        except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's outcomes are answers as well
            answer = _dumps(_raised(job.rank, error))
            exit_code = 1
        pipe.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _redirect_output(path: Path) -> None:
    """Send what the rank prints, in Python or in C++, to a file: the server's own streams are pytest's, long closed."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - a stream on a descriptor
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _join(job: _Job) -> None:
    """Make the default process group."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no host name to resolve
    if job.backend is not None:
        dist.init_process_group(
            job.backend,
            store=dist.FileStore(str(Path(job.folder, "store")), job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=datetime.timedelta(seconds=job.timeout),
        )


def _run(pickled: bytes) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    call: _Call = pickle.loads(pickled)
    return call.fn(*call.args, **call.kwargs)


def _raised(rank: int, error: BaseException) -> Outcome:
    plain = (str, int, float, bool, tuple, list, dict, type(None))
    fields = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    return Outcome(
        rank,
        error_type=type(error).__name__,
        error_bases=tuple(cls.__name__ for cls in type(error).__mro__),
        message=str(error),
        fields=fields if _pickles(fields) else {},
        traceback="".join(traceback.format_exception(error)),
    )


def _pickles(value: object) -> bool:
    try:
        pickle.loads(_dumps(value))
    except Exception:  # noqa: BLE001 - anything may happen in foreign reducers
        return False
    return True


class _ByValue(pickle.Pickler):
    """Pickles tensors as plain CPU tensors: values only, without class, graph or shared memory."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            plain = obj.detach().as_subclass(torch.Tensor).cpu().clone()
            return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
