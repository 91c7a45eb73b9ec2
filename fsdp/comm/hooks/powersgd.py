"""PowerSGD: a gradient travels as two thin matrices, and what they miss is added to the next one.

Note [Which gradient is which]
    What was missed has to be added to the next gradient of the same unit, but a hook is not told the unit.  It is the
    how-manieth call of its backward that tells: units have to be reduced in the same order in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ... import _torch
from ...errors import ConfigError
from .default import DefaultState, allreduce_hook, reduce_scatter_hook

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["PowerSGDState", "powersgd_hook"]


@dataclass(slots=True)
class _Memory:
    """What one gradient leaves for its next reduction.

    Attributes:
        missed: ``[numel]`` float32.
        right: ``[columns, rank]`` float32, where the next search begins; equal on all ranks.
        reductions: How often it has been reduced.
    """

    missed: torch.Tensor
    right: torch.Tensor
    reductions: int = 0


class PowerSGDState(DefaultState):
    """What :func:`powersgd_hook` needs.

    Args:
        process_group: Ranks to average over.
        rank: Columns of each of the two matrices: 1 sends least; more are more exact.
        exact_steps: So many first reductions of each gradient are exact, because gradients change fast at first.

    Attributes:
        rank: The same.
        exact_steps: The same.

    Raises:
        ConfigError: If ``process_group`` is None, ``rank`` is below 1 or ``exact_steps`` below 0.

    Example:
        >>> model.register_comm_hook(PowerSGDState(group, rank=4), powersgd_hook)
    """

    __slots__ = ("_backward", "_calls", "_memories", "exact_steps", "rank")

    def __init__(
        self, process_group: ProcessGroup | None, rank: int = 4, exact_steps: int = 0
    ) -> None:
        if rank < 1 or exact_steps < 0:
            raise ConfigError(
                f"rank={rank}, exact_steps={exact_steps}: expected at least 1 and at least 0."
            )
        super().__init__(process_group)
        self.rank = rank
        self.exact_steps = exact_steps
        self._memories: dict[int, _Memory] = {}
        self._backward = -1
        self._calls = 0

    def memory_of(self, grad: torch.Tensor) -> _Memory:
        """What the gradient that is reduced now has left behind (see the module's note)."""
        backward = _torch.backward_task()
        if backward not in (-1, self._backward):
            self._backward = backward
            self._calls = 0
        place = self._calls
        self._calls += 1
        memory = self._memories.get(place)
        if memory is None or memory.missed.numel() != grad.numel():
            missed = torch.zeros(grad.numel(), dtype=torch.float32, device=grad.device)
            memory = self._memories[place] = _Memory(missed, self._first_guess(grad, place))
        return memory

    def _first_guess(self, grad: torch.Tensor, place: int) -> torch.Tensor:
        rows, columns = _shape(grad.numel())
        generator = torch.Generator().manual_seed(place)
        guess = torch.randn(columns, min(self.rank, rows, columns), generator=generator)
        return guess.to(grad.device)


def powersgd_hook(
    state: PowerSGDState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average the best ``state.rank`` directions of ``grad``, seen as a nearly square matrix.

    A gradient of n elements travels as about ``2 * rank * sqrt(n)`` float32 elements in two all-reduces; one that is
    too small for that to pay is averaged exactly.  On every rank float32 memory of the size of ``grad`` is kept.

    Collective: every rank of the group, in the same order in every step.

    Args:
        state: The state; one for a model.
        grad: ``[world_size * n]``, or any shape under ``NO_SHARD``.
        output: ``[n]``, receives this rank's slice; None to leave the mean in ``grad``.
    """
    memory = state.memory_of(grad)
    memory.reductions += 1
    rows, columns = _shape(grad.numel())
    pays = memory.right.shape[1] * (rows + columns) < grad.numel()
    if memory.reductions <= state.exact_steps or not pays:
        _exact(state, grad, output)
        return
    mean = _approximate_mean(state, memory, grad)
    if output is None:
        grad.copy_(mean.view(grad.shape))
    else:
        rank = state.collectives_on(grad.device).rank
        output.copy_(mean.view(state.world_size, -1)[rank].view(output.shape))


def _approximate_mean(state: PowerSGDState, memory: _Memory, grad: torch.Tensor) -> torch.Tensor:
    """The mean of ``grad`` and what was missed before, as far as the matrices reach; ``[numel]`` float32."""
    numel = grad.numel()
    rows, columns = _shape(numel)
    memory.missed += grad.reshape(-1)
    matrix = torch.zeros(rows * columns, dtype=torch.float32, device=grad.device)
    matrix[:numel] = memory.missed
    matrix = matrix.view(rows, columns)
    group = state.collectives_on(grad.device)
    left = matrix @ memory.right
    group.all_reduce([left]).wait()
    left = torch.linalg.qr(left).Q
    right = matrix.t() @ left
    group.all_reduce([right]).wait()
    right /= state.world_size
    mean: torch.Tensor = (left @ right.t()).view(-1)[:numel]
    memory.missed -= mean
    # A step that overflowed is skipped, and must leave nothing behind.
    memory.missed.nan_to_num_(0.0, 0.0, 0.0)
    # Where it was: a captured graph reads it there.
    memory.right.copy_(right.nan_to_num_(0.0, 0.0, 0.0))
    return mean


def _exact(state: PowerSGDState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    if output is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, output)


def _shape(numel: int) -> tuple[int, int]:
    """Rows and columns of a nearly square matrix with room for ``numel`` elements."""
    columns = max(1, math.isqrt(numel))
    return -(-numel // columns), columns
