"""Whether all ranks ran the same units in the same order, asked once a forward and never waited for.

The backends of accelerators match collectives by the order they are launched in, so ranks that take different turns
hang, or gather one unit's parameters into another's where sizes agree.  Hangs end by the backend's watchdog; the other
kind would go unnoticed.  So each rank sends a hash of the order of its forward, 16 bytes, and looks at the answer in a
later forward, when it has arrived: the host waits for nothing.  Only ranks that find a difference meet, through the
store, to find out which unit it is.

On the CPU units have tags of their own (see ``comm/process_group.py``), so nothing can go wrong unnoticed, and nothing
is sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..comm.collectives import Work
from .streams import Streams, capturing

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["OrderCheck"]

_LONGEST_QUEUE = 8  # forwards that a host may be ahead of its device before answers are given up
_NOTHING = -(2**63)


@dataclass(slots=True)
class _Exchange:
    """One forward's hash on its way.

    Attributes:
        path: The units in the order they ran.
        code: Their hash.
        answer: On the host: the largest hash of all ranks and the largest complement, once they are there.
        work: What to wait for where the host does the work itself; None elsewhere.
        in_use: What the device reads until the answer is there.
    """

    path: list[int]
    code: int
    answer: torch.Tensor
    work: Work | None
    in_use: tuple[torch.Tensor, ...]

    @property
    def has_arrived(self) -> bool:
        if self.work is not None:
            self.work.wait()
        return _NOTHING not in self.answer.tolist()

    @property
    def differs(self) -> bool:
        """Whether any rank had another hash: it is the largest one and the smallest one only if all are equal."""
        return self.answer.tolist() != [self.code, ~self.code]


class OrderCheck:
    """The exchange of one tree of units.

    Args:
        units: Every unit, the outermost first.
        sequence: A name for the meeting, the same on every rank.

    Attributes:
        on: Whether anything is sent.
        path: The units that ran since the last exchange, in order.
    """

    def __init__(self, units: tuple[Unit, ...], sequence: str) -> None:
        outermost = units[0]
        is_accelerated = outermost.config.device.type != "cpu"
        self.on = is_accelerated and outermost.world_size > 1 and outermost.gate.has_store
        self.path: list[int] = []
        self._units = units
        self._sequence = f"{sequence}.order"
        self._pending: deque[_Exchange] = deque(maxlen=_LONGEST_QUEUE)

    def exchange(self, streams: Streams) -> None:
        """Send the hash of what has run.

        Collective: every rank of the outermost unit's groups.
        """
        unit = self._units[0]
        path, self.path = self.path, []
        code = hash(tuple(path))  # of integers: the same in every process
        device = unit.config.device
        is_here = device.type == "cpu"
        if not is_here and capturing(torch.get_device_module(device)):
            return  # a graph repeats what it has recorded, in one order
        mine = torch.tensor([code, ~code], pin_memory=not is_here)
        answer = torch.full((2,), _NOTHING, dtype=torch.int64, pin_memory=not is_here)
        flags: list[torch.Tensor] = []

        def launch() -> Work:
            # Allocated here, in the pool of the stream that uses it: the host lets go of it before the device does.
            flags.append(mine.to(device, non_blocking=True, copy=True))
            unit.shard.all_reduce(flags, op="max").wait()
            return unit.replicate.all_reduce(flags, op="max")

        def finish() -> None:
            answer.copy_(flags[0], non_blocking=True)

        work = streams.run_reduce(launch, finish)
        awaited = work if is_here else None
        self._pending.append(_Exchange(path, code, answer, awaited, (mine, *flags)))

    def look(self) -> None:
        """See whether answers that have arrived were the right ones.  Collective: none if they were.

        Raises:
            ShardMismatchError: If ranks ran other units, or in another order; names the first that differ.
        """
        while self._pending and self._pending[0].has_arrived:
            exchange = self._pending.popleft()
            if exchange.differs:
                self._pending.clear()
                names = [self._units[index].name or "<root>" for index in exchange.path]
                self._units[0].gate.compare(self._sequence, names)

    def forget(self) -> None:
        """A forward has failed.  Collective: none."""
        self.path = []
