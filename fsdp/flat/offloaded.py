"""A handle whose shard, the one that the optimizer steps, rests on the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .. import _torch
from ..config import CPUOffload
from .handle import FlatParamHandle
from .home import Home, HostMemory, MappedFiles
from .sharing import ManagedParam

__all__ = ["OffloadedHandle", "handle_maker", "home_on"]


class OffloadedHandle(FlatParamHandle):
    """The owner of a flat parameter whose shard and gradient rest in a home, and whose leaves are on the device.

    Filling the own slice is then the copy to the device, cast included; nothing else of a gather changes.

    Attributes:
        home: Where the shard rests.
        keeps_copy: Whether the device keeps a copy of the shard, in the compute dtype, from a forward on: one copy to
            the device a forward, instead of one a gather, for the memory of the copy.
    """

    __slots__ = ("_copy", "home", "keeps_copy")

    def __init__(
        self, params: Sequence[ManagedParam], *, home: Home, keeps_copy: bool, **rest: Any
    ) -> None:
        self.home = home
        self.keeps_copy = keeps_copy
        self._copy: torch.Tensor | None = None
        super().__init__(params, **rest)

    @property
    def aliased(self) -> bool:
        """Never: the leaves lie elsewhere."""
        return False

    def fill_own_slice(self) -> None:
        """Allocate the unsharded storage and copy this rank's shard from the host into its own slice of it."""
        self.unsharded.allocate()
        own = self.unsharded.incoming.own
        if not self.keeps_copy:
            own.copy_(self.flat_param.data, non_blocking=True)
            return
        copy = self._copy
        if copy is None or copy.dtype is not own.dtype:
            copy = self._copy = torch.empty_like(own)
            copy.copy_(self.flat_param.data, non_blocking=True)
        elif not _torch.in_backward():  # a backward computes with the values of its forward
            copy.copy_(self.flat_param.data, non_blocking=True)
        own.copy_(copy)

    def take_own_slice(self) -> None:
        """The device's copy, which the backward reads, follows."""
        super().take_own_slice()
        if self._copy is not None:
            self._copy.copy_(self.unsharded.own)

    def drop_copy(self) -> None:
        """Free the device's copy of the shard until the next forward."""
        self._copy = None

    def _same(self) -> dict[str, Any]:
        return super()._same() | {"home": self.home, "keeps_copy": self.keeps_copy}

    def _settled(self, shard: torch.Tensor) -> torch.Tensor:
        return self.home.settle(shard)

    def _moved(self, shard: torch.Tensor) -> torch.Tensor:
        return self.home.settle(shard)  # ``module.to(device)`` does not bring it back to the device

    def at_rest(self) -> Iterable[torch.Tensor]:
        """What lies in the home: the shard, and gradients."""
        yield self.flat_param.data
        for param in self.exposed:
            if param.grad is not None:
                yield param.grad


def home_on(folder: str | os.PathLike[str] | None, device: torch.device) -> Home:
    """Mapped files in ``folder``, or the memory of the host; page-locked if ``device`` is an accelerator.

    Collective: none.

    Raises:
        ConfigError: If the folder is none that can be written to.
    """
    return HostMemory(pinned=device.type != "cpu") if folder is None else MappedFiles(folder)


def handle_maker(offload: CPUOffload, device: torch.device) -> Callable[..., FlatParamHandle]:
    """What makes the handles of a unit on ``device``, whose shards rest where ``offload`` says.

    Collective: none.

    Raises:
        ConfigError: If its folder is none that can be written to.
    """
    if not offload.is_on:
        return FlatParamHandle
    home = home_on(offload.folder, device)
    return partial(OffloadedHandle, home=home, keeps_copy=bool(offload.offload_optimizer))
