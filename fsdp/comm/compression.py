"""What users ask of compressed communication, and the collectives that do it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .collectives import Collectives
from .process_group import collectives_for
from .quantized import Blocks, Halves, Hops, QuantizedCollectives, Rounding
from .secondary import SecondaryShards
from .topology import NodeGroups

__all__ = ["Compression", "compressed"]

_HALVES = "bfloat16"
_BITS = {"int8": 8, "int4": 4}
_SMALLEST_BLOCK = 16
_ALIGNED = 8  # so that scales begin at a multiple of their width


@dataclass(frozen=True)
class Compression:
    """How the wrapper compresses what it sends; see docs/how-to/compress-communication.md.

    Attributes:
        weights: ``"bfloat16"`` or ``"int8"`` rounds gathered parameters; None leaves them exact.
        gradients: ``"bfloat16"``, ``"int8"`` or ``"int4"`` rounds gradients on the wire, sums are float32; None leaves
            them exact.
        block_size: Integers that share a scale; a multiple of 8, at least 16.
        error_feedback: Add what rounding took from a gradient to the next one of the same unit.
        ranks_per_node: Sum gradients inside a node first.  None: at once, or, with ``secondary_shard``, what
            ``LOCAL_WORLD_SIZE`` (set by torchrun) says.
        secondary_shard: Gather from the ranks of this node in backward.

    Raises:
        ConfigError: If a value is none of these, or a feature is asked for that would have nothing to work on.

    Example:
        >>> model.compress_communication(
        ...     Compression(weights="int8", gradients="int4")
        ... )  # doctest: +SKIP
    """

    weights: str | None = "int8"
    gradients: str | None = "int8"
    block_size: int = 256
    error_feedback: bool = False
    ranks_per_node: int | None = None
    secondary_shard: bool = False

    def __post_init__(self) -> None:
        """Refuse what can not be."""
        if self.weights not in (None, _HALVES, "int8"):
            raise ConfigError(f"weights={self.weights!r}: expected 'bfloat16', 'int8' or None.")
        if self.gradients not in (None, _HALVES, *_BITS):
            raise ConfigError(
                f"gradients={self.gradients!r}: expected 'bfloat16', 'int8', 'int4' or None."
            )
        size = self.block_size
        if type(size) is not int or size < _SMALLEST_BLOCK or size % _ALIGNED:
            raise ConfigError(f"block_size={size!r}: expected a multiple of 8, at least 16.")
        if self.error_feedback and self.gradients is None:
            raise ConfigError("error_feedback=True needs rounded gradients: set gradients.")
        if self.weights is None and self.gradients is None and not self.secondary_shard:
            raise ConfigError("Compression asks for nothing: set weights, gradients or both.")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"ranks_per_node={self.ranks_per_node!r}: expected at least 1.")

    @property
    def needs_nodes(self) -> bool:
        """Whether ranks have to know which of them share a node."""
        return self.ranks_per_node is not None or self.secondary_shard


def compressed(
    exact: Collectives, compression: Compression, nodes: NodeGroups | None, device: torch.device
) -> Collectives:
    """What a unit's gathers and reductions go through in a step, over ``exact``.

    Collective: none.
    """
    hops = inside = None
    if nodes is not None:
        inside = collectives_for(nodes.inside, device)
        if compression.ranks_per_node is not None and compression.gradients is not None:
            hops = Hops(inside, collectives_for(nodes.across, device))
    rounded: Collectives = QuantizedCollectives(
        exact,
        weights=_rounding(compression.weights, compression.block_size),
        gradients=_rounding(compression.gradients, compression.block_size),
        hops=hops,
        error_feedback=compression.error_feedback,
    )
    if not compression.secondary_shard or inside is None:
        return rounded
    return SecondaryShards(rounded, inside)


def _rounding(kind: str | None, size: int) -> Rounding | None:
    if kind is None:
        return None
    return Halves() if kind == _HALVES else Blocks(_BITS[kind], size)
