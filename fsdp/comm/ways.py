"""One set of gloo's connections for each direction between two ranks.

Note [Two ways]
    While a thread sends, it holds gloo's lock of the connection for as long as the kernel takes to copy the message.
    gloo's own thread, woken by what arrives on that connection meanwhile, skips it and asks the kernel again at once.
    Where every core computes, it has been given the core of the very thread that holds the lock, and asks until its
    time slice has ended: 3 to 7 ms of computation lost for a message of 1.5 MiB, half of gloo's processor time
    (measured, docs/explanation/performance.md).

    So messages to a higher rank go over the group's own connections, and those to a lower rank over a second set:
    what arrives never meets what is sent.  The second set is made when the group first sends a message through gloo,
    and is no process group of the job: ``new_group`` would count as one on some ranks only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch
from .collectives import Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["Ways", "interrupt"]

_AT_ONCE = timedelta(milliseconds=1)
_LOCK = threading.Lock()
_BACK: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()


class Ways:
    """Messages through gloo between the ranks of ``group``, which has at least two.

    Until :meth:`connect` has been called they all use the group's own connections.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._rank = group.rank()
        self._up = group
        self._down: Any = group

    def connect(self) -> None:
        """Make the second set of connections, unless it is there.

        Collective: every rank of the group, before the same message.
        """
        if self._down is self._up:
            with _LOCK:
                if self._up not in _BACK:
                    _BACK[self._up] = _torch.more_gloo(self._up, "fsdp-back")
                self._down = _BACK[self._up]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start sending ``tensor`` to ``peer``."""
        way = self._up if self._rank < peer else self._down
        work: Work = way.send([tensor], peer, tag)
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start receiving ``tensor`` from ``peer``."""
        way = self._up if peer < self._rank else self._down
        work: Work = way.recv([tensor], peer, tag)
        return work


def interrupt(group: ProcessGroup, peer: int, tag: int) -> None:
    """End every wait over ``group`` with an error, now and later: gloo closes connections when a receive times out.

    Args:
        group: Whose waits.
        peer: Another rank of it.
        tag: Of messages that nobody sends.
    """
    for way in (group, _BACK.get(group)):
        if way is not None:
            with contextlib.suppress(RuntimeError):
                way.recv([torch.empty(1)], peer, tag).wait(_AT_ONCE)
