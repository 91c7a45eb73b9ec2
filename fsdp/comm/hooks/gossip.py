"""GossipGrad: instead of averaging over all nodes, each node averages with one other, drawn anew each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..collectives import Collectives
from ..process_group import collectives_for
from ..topology import node_groups
from .default import DefaultState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["GossipState", "gossip_hook"]


class GossipState(DefaultState):
    """What :func:`gossip_hook` needs.

    Collective: construction is; every rank of ``process_group``.

    Args:
        process_group: Ranks of all nodes, those of one node beside each other.
        ranks_per_node: How many those are; what ``LOCAL_WORLD_SIZE`` says if None.
        seed: Of the draws; the same on all ranks.

    Raises:
        ConfigError: If ``process_group`` is None or can not be divided into such nodes.

    Example:
        >>> model.register_comm_hook(GossipState(group, ranks_per_node=8), gossip_hook)
    """

    __slots__ = ("_draws", "_of_nodes", "nodes")

    def __init__(
        self,
        process_group: ProcessGroup | None,
        ranks_per_node: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        self.nodes = node_groups(self.process_group, ranks_per_node)
        self._of_nodes: dict[torch.device, tuple[Collectives, Collectives]] = {}
        self._draws = torch.Generator().manual_seed(seed)

    def collectives_of_nodes(self, device: torch.device) -> tuple[Collectives, Collectives]:
        """Among this node's ranks, and among those of all nodes that have this one's place.  Collective: none."""
        found = self._of_nodes.get(device)
        if found is None:
            found = (
                collectives_for(self.nodes.inside, device),
                collectives_for(self.nodes.across, device),
            )
            self._of_nodes[device] = found
        return found

    def draw_peer(self) -> int:
        """The node to average with this time; this rank's own if it is left over.

        All ranks draw the same pairs, because they draw equally often.  Collective: none.
        """
        count, own = self.nodes.across.size(), self.nodes.across.rank()
        order: list[int] = torch.randperm(count, generator=self._draws).tolist()
        place = order.index(own)
        partner = place ^ 1  # neighbours in the drawn order are pairs
        return order[partner] if partner < count else own


def gossip_hook(state: GossipState, grad: torch.Tensor) -> None:
    """Average ``grad`` in place over this node's ranks and those of one other node.

    A rank sends one gradient whatever the number of nodes.  The mean over all nodes stays what it was, but nodes get
    different gradients: their models drift, and agree only over many steps.  For ``NO_SHARD``.

    Collective: every rank of the group, in the same order.

    Args:
        state: The state; one for a model.
        grad: Contiguous, any shape.
    """
    inside, across = state.collectives_of_nodes(grad.device)
    inside.all_reduce([grad]).wait()
    grad.div_(inside.size)
    peer = state.draw_peer()
    nothing = torch.empty(0, dtype=torch.uint8, device=grad.device)
    sends, receives = [nothing] * across.size, [nothing] * across.size
    if peer == across.rank:  # an odd one out, but an exchange is one of all ranks
        across.exchange(sends, receives).wait()
        return
    theirs = torch.empty_like(grad)
    sends[peer] = grad.view(-1).view(torch.uint8)
    receives[peer] = theirs.view(-1).view(torch.uint8)
    across.exchange(sends, receives).wait()
    grad.add_(theirs).div_(2)
