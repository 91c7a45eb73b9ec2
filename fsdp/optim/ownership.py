"""Which rank's optimizer works on which part of which parameter, and where these parts lie in memory.

Note [Two ways to share]
    Whole parameters go to ranks by sorted greedy; the local optimizer then holds the user's own parameters.  Elements
    are cut from a flat tensor per device, dtype and trainability; the local optimizer then holds pieces, 1-D views
    into that memory.  Everything else is the same: a parameter is a row of slices with owners, what a rank hands out
    is the memory of its slices, and slices that lie side by side in a packed tensor travel as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UsageError, describe
from .packed import Packed, like_storage_of
from .partition import Slice, assign_parameters, cut_elements

__all__ = ["Ownership", "Piece", "Regions"]

Regions = list[tuple[torch.device, list[list[torch.Tensor]]]]  # a device, and tensors by owner


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What the local optimizer holds of one parameter.

    Attributes:
        param: The user's parameter.
        tensor: The parameter itself, or ``[stop - start]``, a view of a part of its memory.
        start: First element, in storage order.
        stop: One past the last element.
    """

    param: torch.Tensor
    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def is_cut(self) -> bool:
        """Whether the tensor is a view and not the parameter itself."""
        return self.tensor is not self.param

    def lend_grad(self) -> None:
        """Let a view see the parameter's gradient."""
        grad = self.param.grad
        if self.is_cut and grad is not None:
            if grad.layout is not torch.strided:
                raise UsageError(
                    describe(
                        f"a parameter of shape {tuple(self.param.shape)} has a sparse gradient",
                        remedy="Element-wise sharding needs dense ones: use partition='parameter'.",
                    )
                )
            grad = like_storage_of(grad, self.param)[self.start : self.stop]
        if self.is_cut:
            self.tensor.grad = grad

    def release_grad(self) -> None:
        """Let go of the gradient, so that ``zero_grad`` frees it."""
        if self.is_cut:
            self.tensor.grad = None


@dataclass(slots=True, eq=False)
class _Row:
    """One parameter.

    Attributes:
        param: The user's parameter.
        slices: Who owns which elements, in storage order.
        pieces: What this rank's optimizer holds of it.
        packed: The flat tensor it lies in, or None.
        offset: Its first element there.
    """

    param: torch.Tensor
    slices: tuple[Slice, ...]
    pieces: tuple[Piece, ...] = ()
    packed: Packed | None = None
    offset: int = 0


class Ownership:
    """The rows of all parameters, group by group.

    Args:
        groups: Parameters of each group.
        rank: This rank in the optimizer's process group.
        world_size: Ranks in that group.
        by_element: Cut elements evenly instead of assigning whole parameters.
        as_views: Make parameters views into packed tensors; by element they always are.

    Attributes:
        by_rank: For each rank and group the parameters it owns (with elements: those whose first element it owns), in
            the order in which they were assigned.
        packs: Packed tensors: for each device and dtype one a rank; by element one that all ranks share.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        rank: int,
        world_size: int,
        *,
        by_element: bool,
        as_views: bool,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._by_element = by_element
        self._as_views = as_views
        self._rows: dict[torch.Tensor, _Row] = {}
        self._numels: list[list[int]] = []
        self._inactive: frozenset[torch.Tensor] = frozenset()
        self.by_rank: list[list[list[torch.Tensor]]] = [[] for _ in range(world_size)]
        self.packs: list[list[Packed]] = []
        for params in groups:
            self._add(params)
        self._pack_by_rank()

    def add_group(self, params: Sequence[torch.Tensor]) -> None:
        """Give the parameters of one more group to ranks; those of earlier groups stay where they are."""
        self._add(params)
        self._pack_by_rank()

    def _add(self, params: Sequence[torch.Tensor]) -> None:
        if self._by_element:
            self._cut(params)
        else:
            self._assign(params)

    def _assign(self, params: Sequence[torch.Tensor]) -> None:
        self._numels.append([param.numel() for param in params])
        for rank, owned in enumerate(assign_parameters(self._numels, self._world_size)):
            chosen = [params[position] for position in owned[-1]]
            self.by_rank[rank].append(chosen)
            for param in chosen:
                piece = (Piece(param, param, 0, param.numel()),) if rank == self._rank else ()
                self._rows[param] = _Row(param, (Slice(rank, 0, param.numel()),), piece)

    def _cut(self, params: Sequence[torch.Tensor]) -> None:
        alike: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        for param in params:
            alike[param.device, param.dtype, param.requires_grad].append(param)
        for members in alike.values():
            first = members[0]
            packed = Packed(members, first.dtype, first.device)
            self.packs.append([packed])
            cuts = cut_elements([param.numel() for param in members], self._world_size)
            for param, slices, (offset, _) in zip(members, cuts, packed.spans(), strict=True):
                pieces = tuple(
                    _cut_piece(param, packed.flat[offset:], part)
                    for part in slices
                    if part.rank == self._rank
                )
                self._rows[param] = _Row(param, slices, pieces, packed, offset)
        for rank, groups in enumerate(self.by_rank):
            groups.append([param for param in params if self.owner(param) == rank])

    def _pack_by_rank(self) -> None:
        """Pack whole parameters, all but the inactive ones, by owner; release those that became inactive."""
        if self._by_element or not self._as_views:
            return
        members: dict[tuple[torch.device, torch.dtype], list[list[_Row]]] = {}
        for row in self._rows.values():
            if row.param in self._inactive:
                if row.packed is not None:
                    row.param.data = row.param.data.clone()  # keeps its strides
                    row.packed = None
                continue
            key = (row.param.device, row.param.dtype)
            by_rank = members.setdefault(key, [[] for _ in range(self._world_size)])
            by_rank[self.owner(row.param)].append(row)
        self.packs = []
        for (device, dtype), by_rank in members.items():
            self.packs.append([])
            for rows in by_rank:
                packed = Packed([row.param for row in rows], dtype, device)
                self.packs[-1].append(packed)
                for row, (offset, _) in zip(rows, packed.spans(), strict=True):
                    row.packed, row.offset = packed, offset

    def set_inactive(self, inactive: frozenset[torch.Tensor]) -> None:
        """Keep ``inactive`` parameters out of the ranks' packed tensors from now on."""
        self._inactive = inactive
        self._pack_by_rank()

    def owner(self, param: torch.Tensor) -> int:
        """The rank that owns the first element (rank 0 where there is none)."""
        slices = self._rows[param].slices
        return slices[0].rank if slices else 0

    def holds(self, param: torch.Tensor) -> bool:
        """Whether ``param`` was given to any rank."""
        return param in self._rows

    def slices(self, param: torch.Tensor) -> tuple[Slice, ...]:
        """Who owns which elements of ``param``; empty for a parameter that was never given."""
        row = self._rows.get(param)
        return row.slices if row else ()

    def pieces(self, params: Iterable[torch.Tensor]) -> list[Piece]:
        """What this rank's optimizer holds of ``params``, in their order."""
        return [piece for param in params for piece in self._rows[param].pieces]

    def local_groups(self) -> list[list[torch.Tensor]]:
        """What this rank's optimizer holds, group by group."""
        if not self._by_element:
            return self.by_rank[self._rank]
        return [
            [piece.tensor for piece in self.pieces(params)] for params in self._groups_in_order()
        ]

    def _groups_in_order(self) -> list[list[torch.Tensor]]:
        """All parameters, group by group, each group in the order of its rows."""
        count = len(self.by_rank[0])
        members = [
            {id(param) for groups in self.by_rank for param in groups[index]}
            for index in range(count)
        ]
        return [[param for param in self._rows if id(param) in chosen] for chosen in members]

    def restore_views(self) -> None:
        """Bring back into its packed tensor any parameter whose ``.data`` was replaced since."""
        for packs in self.packs:
            for packed in packs:
                packed.restore()

    def regions(self, params: Iterable[torch.Tensor]) -> Regions:
        """The memory of ``params`` by device and owner; the same on all ranks but for the addresses."""
        runs: dict[torch.device, list[list[_Run]]] = {}
        for param in params:
            row = self._rows[param]
            by_rank = runs.setdefault(param.device, [[] for _ in range(self._world_size)])
            for part in row.slices:
                run = _Run(row.packed, row.param, row.offset + part.start, row.offset + part.stop)
                mine = by_rank[part.rank]
                if mine and mine[-1].touches(run):
                    mine[-1].stop = run.stop
                else:
                    mine.append(run)
        return [
            (device, [[run.tensor() for run in mine] for mine in by_rank])
            for device, by_rank in runs.items()
        ]


@dataclass(slots=True, eq=False)
class _Run:
    """Elements ``[start, stop)`` of a packed tensor, or a whole parameter that lies in none."""

    packed: Packed | None
    param: torch.Tensor
    start: int
    stop: int

    def touches(self, other: _Run) -> bool:
        return self.packed is not None and self.packed is other.packed and self.stop == other.start

    def tensor(self) -> torch.Tensor:
        return self.param if self.packed is None else self.packed.flat[self.start : self.stop]


def _cut_piece(param: torch.Tensor, flat: torch.Tensor, part: Slice) -> Piece:
    view = flat[part.start : part.stop]
    can_train = view.is_floating_point() or view.is_complex()
    view = nn.Parameter(view, requires_grad=can_train)
    return Piece(param, view, part.start, part.stop)
