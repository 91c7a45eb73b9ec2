"""Optimizer state between its owners and the canonical format, which is that of one plain optimizer.

The canonical format keys state by the index of a parameter in group order and gives tensors of elements the
parameter's shape; it says nothing of ranks, so any world size and a plain optimizer can load it.

Note [Consolidation]
    Owners first describe what they hold (names, dtypes, shapes, plain values and zero-dimensional tensors; a few
    hundred bytes a parameter).  The target makes room from the descriptions, and every tensor then travels once,
    straight from its owner into its final place, all owners at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, ConfigError, name_some
from .exchange import Wire
from .ownership import Ownership, Piece
from .packed import is_dense, like_storage_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = [
    "NOT_SHARED",
    "check_fits",
    "consolidate",
    "in_own_order",
    "keyed_by_name",
    "local_state_dict",
    "pack_groups",
]

NOT_SHARED = frozenset(
    {"params", "param_names"}
)  # what an exposed group and a local one have each for themselves


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A zero-dimensional tensor, by value."""

    dtype: torch.dtype
    value: Any


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that travels apart from its description."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Like ``_Whole``: the elements ``[start, stop)`` of a tensor of the parameter's shape, in storage order."""

    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Described:
    """The state of one piece: the parameter's index, and its entries with tensors replaced by descriptions."""

    index: int
    entries: dict[str, Any]


def consolidate(
    group: ProcessGroup,
    wire: Wire,
    params: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    state: Mapping[torch.Tensor, dict[str, Any]],
    target: int | None,
) -> dict[int, dict[str, Any]] | None:
    """Bring the state of all ranks to ``target``, as clones on the CPU.

    Collective: every rank of ``group``.

    Args:
        group: The optimizer's process group.
        wire: For tensors on the CPU.
        params: All parameters in group order.
        pieces: What this rank's optimizer holds.
        state: Its state.
        target: Rank in ``group``, or None for all ranks.

    Returns:
        Canonical state on the target, None elsewhere.
    """
    position = {param: index for index, param in enumerate(params)}
    own_tensors: list[torch.Tensor] = []
    own = [
        _describe(position[piece.param], piece, state[piece.tensor], own_tensors)
        for piece in pieces
        if piece.tensor in state
    ]
    described = _gather_descriptions(group, own, target)
    rank = group.rank()
    if described is None:
        assert target is not None
        wire.send_to(target, [own_tensors] * group.size()).wait()
        return None
    room = _Room(params)
    incoming = [[part for entry in entries for part in room.make(entry)] for entries in described]
    for place, tensor in zip(incoming[rank], own_tensors, strict=True):
        place.copy_(tensor)
    for receiver in range(group.size()) if target is None else [target]:
        tensors = incoming if receiver == rank else [own_tensors] * group.size()
        wire.send_to(receiver, tensors).wait()
    return dict(sorted(room.state.items()))


def _gather_descriptions(
    group: ProcessGroup, own: list[_Described], target: int | None
) -> list[list[_Described]] | None:
    """The descriptions of all ranks on the target, None elsewhere."""
    everyone: list[Any] = [None] * group.size()
    if target is None:
        dist.all_gather_object(everyone, own, group=group)
        return everyone
    here = everyone if group.rank() == target else None
    dist.gather_object(own, here, dst=dist.get_global_rank(group, target), group=group)
    return here


def _describe(
    index: int, piece: Piece, entries: Mapping[str, Any], tensors: list[torch.Tensor]
) -> _Described:
    """Describe one piece's state; append the tensors that travel apart."""

    def take_apart(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _describe_tensor(value, piece, tensors)
        if isinstance(value, Mapping):
            return {key: take_apart(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [take_apart(item) for item in value]
        return value

    return _Described(index, {key: take_apart(value) for key, value in entries.items()})


def _describe_tensor(value: torch.Tensor, piece: Piece, tensors: list[torch.Tensor]) -> Any:
    if value.dim() == 0:
        return _Scalar(value.dtype, value.item())
    if piece.is_cut and value.shape == piece.tensor.shape:
        tensors.append(value.contiguous())
        return _Part(value.dtype, piece.start, piece.stop)
    dense = value if is_dense(value) else value.contiguous()
    tensors.append(dense)
    return _Whole(dense.dtype, dense.shape, dense.stride())


class _Room:
    """Canonical state being filled: every description gets a place of its final shape.

    Attributes:
        state: Parameter index to entries.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._flats: dict[tuple[int, str], torch.Tensor] = {}
        self.state: dict[int, dict[str, Any]] = {}

    def make(self, described: _Described) -> list[torch.Tensor]:
        """Add one piece's entries to the state; return where its tensors go, in the order of their descriptions."""
        places: list[torch.Tensor] = []

        def put_together(value: Any) -> Any:
            if isinstance(value, _Scalar):
                return torch.tensor(value.value, dtype=value.dtype)
            if isinstance(value, _Whole):
                places.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype))
                return places[-1]
            if isinstance(value, dict):
                return {key: put_together(item) for key, item in value.items()}
            if isinstance(value, list):
                return [put_together(item) for item in value]
            return value

        entries = self.state.setdefault(described.index, {})
        for key, value in described.entries.items():
            if isinstance(value, _Part):
                full, flat = self._full(described.index, key, value.dtype)
                places.append(flat[value.start : value.stop])
                entries[key] = full
            else:
                made = put_together(value)
                entries.setdefault(key, made)  # pieces of one parameter agree
        return places

    def _full(self, index: int, key: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor like the parameter on the CPU, and its memory."""
        param = self._params[index]
        flat = self._flats.get((index, key))
        if flat is None:
            flat = self._flats[index, key] = torch.empty(param.numel(), dtype=dtype)
        return flat.as_strided(param.shape, param.stride()), flat


def pack_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups in the canonical format: parameters by index, everything else cloned."""
    packed = []
    start = 0
    for group in groups:
        stop = start + len(group["params"])
        kept = {key: deepcopy(value) for key, value in group.items() if key != "params"}
        packed.append({**kept, "params": list(range(start, stop))})
        start = stop
    return packed


def keyed_by_name(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A canonical state dict with the names of parameters in place of their indices.

    Raises:
        ConfigError: If a group was given without names.
    """
    names: list[str] = []
    for number, group in enumerate(groups):
        if "param_names" not in group:
            raise ConfigError(
                f"keys='name': param_groups[{number}] has no names. Construct the optimizer with "
                "(name, parameter) pairs, as model.named_parameters() yields them."
            )
        names += group["param_names"]
    return {
        "state": {names[index]: entries for index, entries in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


def in_own_order(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A canonical state dict with the parameters of each group in the order of ``groups``.

    Where both sides have names, these say which parameter is which; otherwise their order does.

    Raises:
        CheckpointError: If both have names and these differ.
    """
    ordered = []
    for number, (ours, theirs) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        keys, names = theirs["params"], ours.get("param_names")
        if names is not None and all(isinstance(key, str) for key in keys):
            if set(keys) != set(names):
                raise CheckpointError(
                    f"param_groups[{number}]: the loaded state dict has other parameters than the optimizer: "
                    f"only there {name_some(sorted(set(keys) - set(names)))}; "
                    f"only here {name_some(sorted(set(names) - set(keys)))}."
                )
            keys = list(names)
        ordered.append({**theirs, "params": keys})
    return {"state": state_dict["state"], "param_groups": ordered}


def check_fits(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that a canonical state dict has the groups of the optimizer it is loaded into.

    Raises:
        CheckpointError: If there is no ``"state"`` or ``"param_groups"``.
        ConfigError: If groups differ in number or in their number of parameters.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise CheckpointError(f"state_dict has no {key!r}: expected what state_dict() returns.")
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ConfigError(
            "loaded state dict has a different number of parameter groups: "
            f"expected {len(groups)}, got {len(saved)}."
        )
    for number, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            raise ConfigError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{number}] has {len(ours['params'])} parameters here, {len(theirs['params'])} there."
            )


def local_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    ownership: Ownership,
    local_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The part of a canonical state dict that belongs to this rank, as its local optimizer loads it; all cloned.

    Raises:
        CheckpointError: If a tensor of state does not have its parameter's shape and so cannot be cut.
    """
    ids = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
    params = [param for group in groups for param in group["params"]]
    held = [tensor for group in local_groups for tensor in group["params"]]
    position = {tensor: index for index, tensor in enumerate(held)}
    state = {}
    for id_, param in zip(ids, params, strict=True):
        entries = state_dict["state"].get(id_)
        if entries is None:
            continue
        for piece in ownership.pieces([param]):
            state[position[piece.tensor]] = {
                key: _clone_for(piece, f"state[{id_!r}][{key!r}]", value)
                for key, value in entries.items()
            }
    packed = pack_groups(local_groups)
    for ours, theirs in zip(packed, state_dict["param_groups"], strict=True):
        indices = ours["params"]
        ours.clear()
        ours.update(
            {key: deepcopy(value) for key, value in theirs.items() if key not in NOT_SHARED}
        )
        ours["params"] = indices
    return {"state": state, "param_groups": packed}


def _clone_for(piece: Piece, name: str, value: Any) -> Any:
    """A clone of one entry of a parameter's state; of a tensor of elements only the piece's part."""
    if not piece.is_cut:
        return deepcopy(value)
    return _map_tensors(lambda tensor: _cut(piece, name, tensor), value)


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(fn, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_tensors(fn, item) for item in value]
    return value


def _cut(piece: Piece, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        # Of a parameter without dimensions all but the step count are tensors of elements.
        is_element = piece.param.dim() == 0 and not name.endswith("['step']")
        return tensor.reshape(piece.tensor.shape).clone() if is_element else tensor.clone()
    if tensor.shape != piece.param.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, its parameter {tuple(piece.param.shape)}: "
            "element-wise sharding cuts tensors of the parameter's shape only. Use partition='parameter'."
        )
    return like_storage_of(tensor, piece.param)[piece.start : piece.stop].clone()
