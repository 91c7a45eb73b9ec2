"""Whether the processes of other ranks still run, as far as this host can tell."""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path

__all__ = ["Watched", "named_process", "this_process"]


class Watched:
    """A process on this host, of which the kernel tells when it has ended.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self._is_gone = False
        self._ended = select.poll()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except OSError:
            return  # the kernel cannot tell
        else:
            weakref.finalize(self, os.close, descriptor)
            self._ended.register(descriptor, select.POLLIN)

    def has_ended(self) -> bool:
        """Whether it is known to be no more."""
        return self._is_gone or bool(self._ended.poll(0))


def this_process() -> str:
    """This process for :func:`named_process` of others; ``""`` where none could follow it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getpid()}"
    except OSError:
        return ""


def named_process(name: str) -> Watched | None:
    """The process that calls itself ``name``; None if it is on another host."""
    here, _, pid = name.rpartition("/")
    if not here or this_process().rpartition("/")[0] != here:
        return None
    return Watched(int(pid))
