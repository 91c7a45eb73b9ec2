"""Two hosts on one machine: network namespaces joined by a link of stated speed (Linux, root, iproute2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["INTERFACE", "enter", "linked_hosts", "why_not"]

INTERFACE = "wire"  # the name of each host's end
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why hosts cannot be made here, or None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    return None


@contextlib.contextmanager
def linked_hosts(gigabits: float, count: int = 2) -> Iterator[list[str]]:
    """Namespaces whose ``INTERFACE`` ends meet in one bridge, each sending at ``gigabits`` Gbit/s at most.

    Raises:
        RuntimeError: With the tool's words, if the machine does not let us.
    """
    stem = f"fsdp{os.getpid()}"
    names = [f"{stem}n{index}" for index in range(count)]
    switch = f"{stem}s"
    try:
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            _add_host(name, index, switch, gigabits)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def enter(namespace: str) -> None:
    """Move the calling process into ``namespace``; sockets it opens from now on are there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _add_host(name: str, index: int, switch: str, gigabits: float) -> None:
    end = f"port{index}"
    rate: Sequence[str] = (
        "rate",
        f"{round(gigabits * 1000)}mbit",
        "burst",
        "256kb",
        "latency",
        "50ms",
    )
    _call("ip", "netns", "add", name)
    _call("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", end)
    _call("ip", "-n", name, "link", "set", end, "netns", switch)
    _call("ip", "-n", switch, "link", "set", end, "master", "bridge", "up")
    _call("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", INTERFACE)
    _call("ip", "-n", name, "link", "set", "lo", "up")
    _call("ip", "-n", name, "link", "set", INTERFACE, "up")
    _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate)


def _call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
