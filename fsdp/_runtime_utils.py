"""The end-of-backward callback, under the path that tools import it from."""

from __future__ import annotations

from torch import nn

from .wrapper import FullyShardedDataParallel

__all__ = ["_post_backward_final_callback"]


def _post_backward_final_callback(
    state: FullyShardedDataParallel,
    module: nn.Module,  # noqa: ARG001 the reference's signature
) -> None:
    """Reduce what is left, publish gradients and free parameters, as at the end of a backward."""
    state._unit.root.end_backward()  # noqa: SLF001
