"""Embeddings that write into their weights while they read them."""

from __future__ import annotations

from torch import nn

from ..comm.topology import Axes
from ..errors import UnsupportedError, describe
from ..names import clean_tensor_name, join_names
from .ignored import Ignored

__all__ = ["check_renormed"]


def check_renormed(module: nn.Module, ignored: Ignored, axes: Axes) -> None:
    """Refuse ``max_norm`` where several ranks hold the weights.

    Each rank would shrink the rows that its own data looks up, and keep what of them it holds: another model than that
    of one process, and nothing would tell.  Collective: none.

    Raises:
        UnsupportedError: If there is such an embedding among what is managed; it names the weight.
    """
    if axes.whole.size() == 1:
        return
    for name, child in module.named_modules():
        renorms = isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None
        if renorms and child.weight not in ignored.params:
            fqn = join_names(clean_tensor_name(name), "weight")
            raise UnsupportedError(
                describe(
                    f"an embedding with max_norm={child.max_norm} shrinks the rows that it looks up, and each rank "
                    "would shrink others",
                    fqn=fqn,
                    remedy="Build it with max_norm=None and shrink rows between steps, inside `with "
                    "FSDP.summon_full_params(model):`; or leave it out with ignored_modules.",
                ),
                fqn=fqn,
            )
