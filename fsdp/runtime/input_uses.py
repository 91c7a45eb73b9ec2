"""When the gradients of a unit's inputs are computed: then nothing reads its frozen parameters any more.

Nothing arrives on frozen leaves that would tell, so the node that produced each input does.  The gradients of trained
ones may all have come by then: those of adapters come before the frozen layer beside them is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pytree import iter_tensors

__all__ = ["InputUses"]


class InputUses:
    """The uses of one unit whose inputs a backward has not reached yet.

    Args:
        done: Called when it has reached those of one use.

    Attributes:
        open: How many uses there are.
    """

    __slots__ = ("_done", "open")

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self.open = 0

    def hook(self, inputs: Any) -> None:
        """A use begins, with ``inputs``, a tree of anything; those that want no gradient tell nothing."""
        tensors = [tensor for tensor in iter_tensors(inputs) if tensor.requires_grad]
        if tensors:
            self.open += 1
            first = _Once(self._close)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(first)
                else:
                    tensor.register_hook(first)

    def _close(self) -> None:
        self.open = max(0, self.open - 1)
        self._done()


class _Once:
    """A hook that calls its function the first time only."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self, *_: Any) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
