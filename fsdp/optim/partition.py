"""Who owns what: whole parameters by sorted greedy, or elements by an even split.

Pure: no tensors, no process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Slice", "assign_parameters", "cut_elements", "split_evenly"]


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements ``[start, stop)`` of one parameter, counted in storage order, that ``rank`` owns.

    Attributes:
        rank: Rank in the process group of the optimizer.
        start: First element.
        stop: One past the last element.
    """

    rank: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def assign_parameters(
    numels_by_group: Sequence[Sequence[int]], world_size: int
) -> list[list[list[int]]]:
    """Give whole parameters to ranks: group by group, the largest first, each to the least loaded rank.

    Equal sizes keep their order, equal loads go to the lowest rank, and loads add up over groups, so that a later
    group never changes the owners of an earlier one.

    Args:
        numels_by_group: Elements of each parameter, group by group.
        world_size: Number of ranks.

    Returns:
        For each rank and each group the positions, within the group, of the parameters it owns, in the order in which
        they were assigned.

    Example: sizes 7 and 5 in one group, then 3, 7 and 3 in three more, on two ranks.

        >>> assign_parameters([[7, 5], [3], [7], [3]], 2)
        [[[0], [], [0], []], [[1], [0], [], [0]]]
    """
    loads = [0] * world_size
    owned: list[list[list[int]]] = [[] for _ in range(world_size)]
    for numels in numels_by_group:
        for groups in owned:
            groups.append([])
        for position in sorted(range(len(numels)), key=lambda at: -numels[at]):
            rank = min(range(world_size), key=loads.__getitem__)
            owned[rank][-1].append(position)
            loads[rank] += numels[position]
    return owned


def split_evenly(total: int, world_size: int) -> list[tuple[int, int]]:
    """Half-open spans that tile ``[0, total)``, one a rank, whose lengths differ by one at most.

    Example:
        >>> split_evenly(10, 4)
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    bounds = [rank * total // world_size for rank in range(world_size + 1)]
    return list(pairwise(bounds))


def cut_elements(numels: Sequence[int], world_size: int) -> list[tuple[Slice, ...]]:
    """Lay parameters end to end, split the line evenly, and say which slices of each parameter that makes.

    Example: parameters of 3, 0 and 4 elements on two ranks, which own 3 and 4 elements.

        >>> cut_elements([3, 0, 4], 2)
        [(Slice(rank=0, start=0, stop=3),), (), (Slice(rank=1, start=0, stop=4),)]
    """
    spans = split_evenly(sum(numels), world_size)
    cuts = []
    offset = 0
    for numel in numels:
        pieces = [
            Slice(rank, max(start, offset) - offset, min(stop, offset + numel) - offset)
            for rank, (start, stop) in enumerate(spans)
            if max(start, offset) < min(stop, offset + numel)
        ]
        cuts.append(tuple(pieces))
        offset += numel
    return cuts
