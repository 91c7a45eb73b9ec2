"""A whole optimizer state that one rank has, handed out: to each rank its pieces, a unit at a time."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..comm.telling import pickled
from ..errors import CheckpointError, FsdpError, UnsupportedError, describe
from ..runtime.held import Held, held_params
from ..runtime.spread import partial_units
from ..runtime.unit import Unit
from .optim_load import Parts, plan_load
from .optim_names import SavedState, in_canonical_names, is_elementwise, without_unmanaged
from .optim_pieces import as_bytes
from .optim_view import OptimizerView, copy_of, view_of
from .tensor_parallel import refuse_tensor_parallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["scatter_optim_state"]


def scatter_optim_state(
    model: nn.Module,
    units: Sequence[Unit],
    source: torch.optim.Optimizer | Iterable[Any],
    full: Mapping[str, Any] | None,
    group: ProcessGroup,
    *,
    caller_completes: bool = False,
) -> dict[str, Any]:
    """Each rank's part of a state that the first rank of ``group`` has, for ``optimizer.load_state_dict``.

    The first rank sends each other one its pieces of one unit after the other, so beyond the state itself it needs
    the memory of one rank's pieces of one unit, and the others nothing but what they keep.

    Collective: every rank of ``group``, which must have the same units; two small exchanges, then one message a unit
    and rank.

    Args:
        model: A wrapper, or a module that contains some.
        units: The units in it.
        source: The optimizer, or the parameters (or groups) it would be built from.
        full: The state on the first rank; ignored on the others.
        group: Who takes part.
        caller_completes: Leave out what no wrapper manages and ``full`` does not name, instead of refusing it.

    Raises:
        CheckpointError: If the first rank has none or it does not fit; on every rank.
        UnsupportedError: For an optimizer that steps whole parameters; with experts over ranks of their own.
    """
    remedy = "Use optim_state_dict_to_load with the state on every rank."
    refuse_tensor_parallel(units, "scatter_full_optim_state_dict", remedy)
    partial = partial_units(units)
    if partial:
        raise UnsupportedError(
            describe(
                "scatter_full_optim_state_dict does not know units over fewer ranks than the rest (experts)",
                unit=partial[0].name,
                remedy=remedy,
            ),
            unit=partial[0].name,
        )
    held = held_params(model, units)
    view: OptimizerView | None = None
    named: SavedState | None = None
    outline: SavedState | None = None
    problem: FsdpError | None = None
    try:
        view = view_of(model, held, source)
        if group.rank() == 0:
            if caller_completes:
                view = without_unmanaged(held, view, full)
            named = _checked(held, view, full)
            outline = _outline(held, named)
    except FsdpError as error:
        problem = error
    outline = _first_ones(outline, problem, group)
    plan = None
    try:
        if view is not None and caller_completes:
            view = without_unmanaged(held, view, _as_dict(outline))
        plan = None if view is None else plan_load(held, view, outline)
    except FsdpError as error:
        problem = error
    shares = _agree([_share(unit) for unit in units], problem, group)
    assert plan is not None
    return plan.cut(_hand_out(units, held, (outline, named), shares, group))


def _checked(
    held: Sequence[Held], view: OptimizerView, full: Mapping[str, Any] | None
) -> SavedState:
    if full is None:
        raise CheckpointError(
            describe(
                "scatter_full_optim_state_dict got None on the first rank, which must have the state",
                remedy="Load the checkpoint on rank 0 of the group, and pass None on the others only.",
            )
        )
    if view.wholes:
        raise UnsupportedError(
            describe(
                "scatter_full_optim_state_dict does not know optimizers that step whole parameters",
                fqn=next(iter(view.wholes)),
                remedy="Use optim_state_dict_to_load with the state on every rank.",
            )
        )
    return in_canonical_names(held, view, full)


def _outline(held: Sequence[Held], named: SavedState) -> SavedState:
    """``named`` with tensors on the meta device in place of those that travel in pieces.

    One of shape ``[1]`` travels whole: it may be a scalar of the optimizer, to be compared with others.
    """
    items = {item.fqn: item for item in held}
    state = {}
    for fqn, values in named.state.items():
        item = items[fqn]
        state[fqn] = {
            name: torch.empty_like(value, device="meta")
            if item.handle is not None
            and is_elementwise(item, name, value, named.counters)
            and value.numel() > 1
            else copy_of(value)
            for name, value in values.items()
        }
    return SavedState(state, named.groups, named.counters)


def _as_dict(state: SavedState) -> dict[str, Any]:
    groups = {} if state.groups is None else {"param_groups": state.groups}
    return {"state": state.state, **groups}


def _first_ones(
    outline: SavedState | None, problem: FsdpError | None, group: ProcessGroup
) -> SavedState:
    """The outline the first rank made; raises its error everywhere."""
    told = [pickled(outline if problem is None else problem)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
    found = pickle.loads(told[0])
    if isinstance(found, FsdpError):
        raise found
    assert isinstance(found, SavedState)
    return found


def _share(unit: Unit) -> tuple[int, int]:
    return unit.shard.rank, unit.shard.size


def _agree(
    mine: list[tuple[int, int]], problem: FsdpError | None, group: ProcessGroup
) -> list[list[tuple[int, int]]]:
    """Every rank's place in every unit; raises what any rank found wrong, on all of them."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, problem if problem is not None else mine, group)
    for said in told:
        if isinstance(said, FsdpError):
            raise problem if problem is not None else said
    if any([size for _, size in said] != [size for _, size in mine] for said in told):
        raise CheckpointError(
            describe(
                "ranks of the group have different units, or shard them over groups of different sizes",
                remedy="Scatter within each group of ranks that share a model.",
            )
        )
    return told


def _hand_out(
    units: Sequence[Unit],
    held: Sequence[Held],
    states: tuple[SavedState, SavedState | None],
    shares: Sequence[Sequence[tuple[int, int]]],
    group: ProcessGroup,
) -> Parts:
    """This rank's piece of every state tensor, sent or received a unit at a time.

    ``states`` are the outline and, on the first rank, the state itself.
    """
    outline, named = states
    parts: dict[tuple[Held, str], torch.Tensor] = {}
    for at, unit in enumerate(units):
        wanted = [
            (item, name, value)
            for item in held
            if item.unit is unit
            for name, value in outline.state.get(item.fqn, {}).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        wire = _wire_device(unit, group)
        if named is None:
            parts.update(_received(wanted, wire, group))
            continue
        whole = [(item, name, named.state[item.fqn][name]) for item, name, _ in wanted]
        parts.update({(item, name): item.piece_of(value) for item, name, value in whole})
        for rank in range(1, group.size()):
            place = shares[rank][at][0]
            pieces = [item.piece_of(value, rank=place) for item, _, value in whole]
            packed = torch.cat([as_bytes(piece).to(wire) for piece in pieces] or [torch.empty(0)])
            if packed.numel():
                dist.send(packed, dist.get_global_rank(group, rank), group)
    return parts


def _received(
    wanted: Sequence[tuple[Held, str, torch.Tensor]], wire: torch.device, group: ProcessGroup
) -> dict[tuple[Held, str], torch.Tensor]:
    """This rank's pieces of one unit, from the first rank."""
    pieces = {}
    for item, name, outline in wanted:
        assert item.handle is not None
        numel = item.handle.pieces[item.index].in_slot.numel
        pieces[item, name] = torch.empty(numel, dtype=outline.dtype, device=item.handle.device)
    packed = torch.empty(
        sum(piece.nbytes for piece in pieces.values()), dtype=torch.uint8, device=wire
    )
    if packed.numel():
        dist.recv(packed, dist.get_global_rank(group, 0), group)
    start = 0
    for piece in pieces.values():
        stop = start + piece.nbytes
        piece.view(torch.uint8).copy_(packed[start:stop])
        start = stop
    return pieces


def _wire_device(unit: Unit, group: ProcessGroup) -> torch.device:
    """Where ``group`` moves bytes: the unit's device, unless its backend only knows the host."""
    device = unit.config.device
    try:
        backend = _torch.group_backend(group, device)
    except RuntimeError:
        backend = "gloo"
    return torch.device("cpu") if backend == "gloo" else device
