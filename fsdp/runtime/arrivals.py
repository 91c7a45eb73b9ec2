"""Counts the gradients that arrive on a unit's leaves, and tells when the last one is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Arrivals"]


class Arrivals:
    """How many of a unit's leaves still wait for the gradient of the running backward.

    It holds neither the unit nor the leaves: the garbage collector does not look into a tensor's hooks, so unit -> leaf
    -> hook -> unit would keep the parameters of a deleted model for ever.

    Args:
        all_arrived: A method of the unit: called when every expected gradient has arrived, or one that was not.

    Attributes:
        expected: How many gradients a backward brings that uses all parameters.
        armed: Whether they are about to arrive.
        missing: How many of them have not yet.
    """

    __slots__ = ("_all_arrived", "_hooks", "armed", "expected", "missing")

    def __init__(self, all_arrived: Callable[[], None]) -> None:
        self._all_arrived = weakref.WeakMethod(all_arrived)
        self._hooks: list[Any] = []
        self.expected = 0
        self.armed = False
        self.missing = 0

    def watch(self, leaves: Sequence[torch.Tensor]) -> None:
        """Count the gradients of ``leaves`` from now on, instead of those before."""
        for hook in self._hooks:
            hook.remove()
        self.expected = len(leaves)
        self.disarm()

        def arrived(_: torch.Tensor) -> None:
            self.missing -= 1
            if self.missing <= 0:
                all_arrived = self._all_arrived()
                if all_arrived is not None:
                    all_arrived()

        self._hooks = [leaf.register_post_accumulate_grad_hook(arrived) for leaf in leaves]

    @property
    def some(self) -> bool:
        """Whether some of the leaves have gradients and others have not."""
        return self.armed and self.missing != self.expected

    def arm(self) -> None:
        """Gradients are about to arrive, one on each leaf if all parameters were used."""
        self.armed = True
        self.missing = self.expected

    def disarm(self) -> None:
        """No gradient is expected: the next one that arrives is the first of a backward."""
        self.armed = False
        self.missing = 0

    def look(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Count the ``leaves`` without a gradient as missing; whether there are none.

        Where a leaf's gradient comes in several backwards, each was counted.
        """
        self.missing = 0
        for leaf in leaves:
            if leaf.grad is None:
                self.missing += 1
        return not self.missing
