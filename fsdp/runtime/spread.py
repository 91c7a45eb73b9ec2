"""Units over fewer ranks than the rest of their tree: other ranks hold other parameters in their place (experts).

The widest unit of a tree is over all of its ranks.  A unit over fewer is *partial*: what it holds is a part of the
model that the ranks outside of its groups do not have, so sums over the model and names of the model are complete only
over the widest unit's ranks.

Example, W = 4 with experts over pairs of ranks (0, 2) and (1, 3)::

    root           ranks 0 1 2 3      the widest: what it holds, every rank shares
    experts 0, 1   ranks 0   2        partial
    experts 2, 3   ranks   1   3      partial
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..comm.telling import tell_all
from .unit import Unit

__all__ = ["partial_units", "tell_tree", "widest"]


def widest(units: Sequence[Unit]) -> Unit:
    """The first unit over the most ranks.  Collective: none."""
    return max(units, key=lambda unit: unit.world_size)


def partial_units(units: Sequence[Unit]) -> list[Unit]:
    """Those over fewer ranks than the widest.  Collective: none."""
    ranks = widest(units).world_size if units else 1
    return [unit for unit in units if unit.world_size < ranks]


def tell_tree(tree: Unit, message: Any) -> list[Any]:
    """The messages of every rank of the widest unit ``tree``, replica by replica.

    Collective: every rank of the tree; two small exchanges.
    """
    row = tell_all(tree.shard, message, tree.config.device)
    table = tell_all(tree.replicate, row, tree.config.device)
    return [message for row in table for message in row]
