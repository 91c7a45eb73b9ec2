"""An optimizer whose states rest in mapped files and come into memory a part at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..flat.home import MappedFiles
from .stepping import narrowed

__all__ = ["PagedOptimizer"]


class PagedOptimizer(Optimizer):
    """Any optimizer, with its states in files mapped from a folder: they may be larger than the host's memory.

    A step goes through the parameters part by part.  While one part is stepped the pages of the next are read by
    another thread, and those of the part before have left this process; so a step needs the memory of two parts, of
    parameters, gradients and states together.  States are moved into files as the optimizer makes them.

    The optimizer must update each parameter from that parameter's own gradient and state alone, on the CPU.  Use its
    fused implementation where it has one: it makes no temporary tensors.  Schedulers, ``FSDP.optim_state_dict`` and
    loss scaling take it as they take any optimizer; results are those of the optimizer itself, bit by bit.

    Collective: none; every rank pages its own states.

    Args:
        optimizer: Over the parameters of a model whose shards rest on the host (or that computes there).
        folder: Where the files are; on a disk of this host.  They are unlinked at once and vanish with their tensors.
        part_bytes: Parameters of how many bytes are stepped together; a larger one alone.

    Raises:
        ConfigError: If ``folder`` is no folder that this rank can write to, ``part_bytes`` is not positive, or
            parameters are not on the CPU.

    Example::

        model = FSDP(model, cpu_offload=CPUOffload(offload_params=True, folder="/nvme"))
        optimizer = PagedOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True), folder="/nvme"
        )

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        folder: str | os.PathLike[str],
        part_bytes: int = 64 << 20,
    ) -> None:
        if part_bytes <= 0:
            raise ConfigError(f"part_bytes is {part_bytes}: expected a positive number.")
        elsewhere = {p.device for p in _params_of(optimizer)} - {torch.device("cpu")}
        if elsewhere:
            raise ConfigError(
                f"PagedOptimizer got parameters on {', '.join(map(str, elsewhere))}: wrap with "
                "CPUOffload(offload_params=True) or CPUOffload(offload_optimizer=True), and build the optimizer after "
                "wrapping."
            )
        self._home = MappedFiles(folder)
        self._part_bytes = part_bytes
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, part by part.  Collective: none.

        Returns:
            What ``closure`` returned, if it was given; it is called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        parts = [*_parts(self._with_gradients(), self._part_bytes), []]
        for part, following in pairwise(parts):
            self._home.fetch(self._tensors_of(following))
            with narrowed(self.optimizer, set(part)):
                self.optimizer.step()
            self._settle(part)
            self._home.release(self._tensors_of(part))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the optimizer, and move what was loaded into files.

        Collective: none.  Takes the memory of the whole state for a moment.
        """
        self.optimizer.load_state_dict(state_dict)
        self._share()
        for param in _params_of(self.optimizer):
            self._settle([param])
            self._home.release(self._tensors_of([param]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer.  Collective: none."""
        if any(
            param_group is group for group in self.optimizer.param_groups
        ):  # the base class adds those that are there
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        self._share()

    def _share(self) -> None:
        """Groups and state are the optimizer's own, which may have made them anew."""
        if self.param_groups is not self.optimizer.param_groups:
            self.param_groups = self.optimizer.param_groups
        if self.state is not self.optimizer.state:
            self.state = self.optimizer.state

    def _with_gradients(self) -> list[torch.Tensor]:
        return [param for param in _params_of(self.optimizer) if param.grad is not None]

    def _settle(self, params: Iterable[torch.Tensor]) -> None:
        """Move states that are in ordinary memory into files; small ones stay (see Note [Mapped files])."""
        for param in params:
            values = self.optimizer.state.get(param, {})
            for value in values.values():
                if isinstance(value, torch.Tensor) and self._home.wants(value):
                    value.data = self._home.settle(value)

    def _tensors_of(self, params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for param in params:
            yield param.data
            if param.grad is not None:
                yield param.grad
            for value in self.optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _parts(params: Iterable[torch.Tensor], part_bytes: int) -> Iterator[list[torch.Tensor]]:
    """``params`` in order, in runs of up to ``part_bytes``, or of one that is larger."""
    part: list[torch.Tensor] = []
    held = 0
    for param in params:
        if part and held + param.nbytes > part_bytes:
            yield part
            part, held = [], 0
        part.append(param)
        held += param.nbytes
    if part:
        yield part
