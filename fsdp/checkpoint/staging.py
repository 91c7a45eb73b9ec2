"""Where tensors are kept on the host from the moment of the save until they are written."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Direct", "HostBuffers", "Staging"]


class Staging(Protocol):
    """Takes tensors one after another; they are complete after :meth:`finish`."""

    def keep(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor that has, or will have, the values of ``value`` until they are written."""

    def finish(self) -> None:
        """Wait until all are complete."""


class Direct:
    """For a save that waits for the disk: nothing changes meanwhile, so nothing is copied."""

    def keep(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself, wherever it is."""
        return value

    def finish(self) -> None:
        """Nothing is under way."""


class HostBuffers:
    """For a save in the background: a copy of everything in host memory that is used again by the next save.

    Pinned where values come from an accelerator, so that copies run at full speed and one behind the other.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def keep(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """A copy in the buffer of ``key``."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pinned = value.device.type != "cpu"
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        self._kept[key] = buffer.copy_(value, non_blocking=True)
        if value.device.type != "cpu":
            self._devices.add(value.device)
        return buffer

    def finish(self) -> None:
        """Wait for the copies; forget buffers that this save did not use."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._buffers, self._kept = self._kept, {}
        self._devices = set()
