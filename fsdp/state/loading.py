"""What comes before values are loaded: does every tensor fit, do all ranks agree, and who has the values.

Nothing is changed until every rank knows that the dict fits on every rank.  A dict that only the first rank has is
sent from there a handle at a time, each rank getting its own pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..comm.topology import Axes, gates_of
from ..errors import CheckpointError, describe, name_some
from ..flat.handle import FlatParamHandle
from ..flat.layout import Slot
from ..flat.tensor_parallel import is_distributed
from ..names import clean_tensor_name, flat_param_name, join_names
from ..runtime.held import Held, held_params, settle_assigned, units_in
from ..runtime.spread import partial_units, tell_tree
from ..runtime.unit import Unit
from .elsewhere import Elsewhere, find_elsewhere
from .exchange import all_on_first, flat_spread, only, redistribute
from .sharded import local_part
from .tensor_parallel import refuse_tensor_parallel

__all__ = [
    "RECEIVED",
    "agree",
    "agree_on_slices",
    "check_loadable",
    "in_memory_order",
    "local_misfit",
    "misfit",
    "problem_of",
    "receive_from_first",
]


class _Received:
    """Stands in a dict for a value that is in the shard already."""

    def __repr__(self) -> str:
        return "<received>"


RECEIVED = _Received()


# -- does it fit -------------------------------------------------------------------------------------------------------


def misfit(value: Any, shape: tuple[int, ...]) -> str:
    """Why ``value`` can not be loaded into a tensor of ``shape``; empty if it can.  Collective: none."""
    if not isinstance(value, torch.Tensor):
        return f"the checkpoint holds a {type(value).__name__}, not a tensor."
    if value.is_meta:
        return "the checkpoint holds a tensor on the meta device, which has no values."
    if tuple(value.shape) == shape or (not shape and value.shape == (1,)):
        return ""
    return (
        f"copying a param with shape {value.shape} from checkpoint, the shape in current model is "
        f"{torch.Size(shape)}."
    )


def check_loadable(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raise before anything is changed if a tensor has the wrong shape or tied names have different values.

    Collective: none.

    Raises:
        CheckpointError: Naming every tensor that does not fit, with both shapes.
    """
    problem = problem_of(module, state_dict)
    if problem:
        raise CheckpointError(problem)


def problem_of(module: nn.Module, state_dict: object) -> str:
    """What is wrong with loading ``state_dict`` into ``module``, a wrapper or the module in one; empty if nothing.

    Collective: none.
    """
    if not isinstance(state_dict, Mapping):
        return (
            f"state_dict is a {type(state_dict).__name__}: expected a mapping of names to tensors."
        )
    problems = _local_misfits(module, state_dict)
    for held in held_params(module, units_in(module)):
        names = (held.fqn, *held.aliases)
        present = [name for name in names if state_dict.get(name, RECEIVED) is not RECEIVED]
        wrong = [
            f"size mismatch for {name}: {problem}"
            for name in present
            if (problem := misfit(state_dict[name], held.shape))
        ]
        problems += wrong or _tie_conflict(present, state_dict)
    for name, buffer in _buffers(module):
        if name in state_dict and (problem := misfit(state_dict[name], tuple(buffer.shape))):
            problems.append(f"size mismatch for {name}: {problem}")
    listed = "\n\t".join(problems)
    return f"Error(s) in loading state_dict:\n\t{listed}" if problems else ""


def _local_misfits(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """What is wrong with the flat shards in the dict, if it is a local one."""
    prefixes = {child: clean_tensor_name(path) for path, child in module.named_modules()}
    problems = []
    for unit in units_in(module):
        for index, handle in enumerate(unit.handles):
            key = join_names(prefixes[unit.module], flat_param_name(index))
            value = state_dict.get(key)
            if value is not None and (problem := local_misfit(value, handle)):
                problems.append(f"size mismatch for {key}: {problem}")
    return problems


def local_misfit(value: Any, handle: FlatParamHandle) -> str:
    """Why ``value`` is not a flat shard of ``handle`` on this rank; empty if it is.  Collective: none."""
    if not isinstance(value, torch.Tensor):
        return f"the checkpoint holds a {type(value).__name__}, not a tensor."
    shape, own = tuple(local_part(value).shape), tuple(handle.shard.shape)
    if shape == own:
        return ""
    return (
        f"the checkpoint holds a shard of {shape}, this rank's is {own}; local state dicts load only at the same "
        "world size and wrapping."
    )


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers of modules that load by torch's rules."""
    for path, child in module.named_modules():
        own_rules = type(child)._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001 a protocol
        if own_rules and not type(child).__module__.startswith("torch."):
            continue
        for name in _torch.persistent_buffers(child):
            buffer = _torch.buffer_table(child)[name]
            if buffer is not None:
                yield join_names(clean_tensor_name(path), name), buffer


def _tie_conflict(names: Sequence[str], state_dict: Mapping[str, Any]) -> list[str]:
    if not names:
        return []
    first = state_dict[names[0]]
    for name in names[1:]:
        other = state_dict[name]
        if other is not first and type(other) is torch.Tensor and not torch.equal(other, first):
            return [
                describe(
                    f"{name_some(names)} are one tied parameter but have different values",
                    remedy="Keep one of the names, or make the values equal.",
                )
            ]
    return []


def agree(axes: Axes, call: str, problem: str = "") -> None:
    """Raise on every rank if any has a ``problem`` with ``call``.

    Collective: every rank of both axes, through the store.

    Raises:
        CheckpointError: Saying which ranks have which problem.
    """
    for gate in gates_of(axes):
        problem = gate.agree(call, problem)
    if problem:
        raise CheckpointError(problem)


def agree_on_slices(
    unit: Unit, sites: Mapping[nn.Module, Iterable[str]], state_dict: Mapping[str, Any], prefix: str
) -> None:
    """See, before any slice of a parameter of ``unit`` moves, that all ranks have slices of the same ones.

    Collective: every rank of the group that users named, if the dict has any.

    Args:
        unit: The unit that is about to load.
        sites: Its modules, and the names of its parameters there.
        state_dict: The dict, with the names that this part of the tree has now.
        prefix: Before the names of what the unit's module holds.

    Raises:
        ShardMismatchError: Naming what each rank lacks.
    """
    from torch.distributed.tensor import DTensor

    slices = {
        clean_tensor_name(key.removeprefix(prefix))
        for key, value in state_dict.items()
        if isinstance(value, DTensor) and key.startswith(prefix)
    }
    own = [
        join_names(clean_tensor_name(path), name)
        for path, module in unit.module.named_modules()
        for name in sites.get(module, ())
    ]
    if not slices.isdisjoint(own):
        lacking = name_some(name for name in own if name not in slices)
        without = f" without {lacking}" if lacking else ""
        unit.gate.agree(f"load_state_dict of the slices of unit {unit.name or '<root>'!r}{without}")


# -- from the first rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What other ranks need to know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def receive_from_first(
    module: nn.Module, axes: Axes, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Put the first rank's values into every rank's shards, a handle at a time.

    Other ranks need the memory of their pieces of one handle, and of what no unit manages.

    Collective: every rank of both axes; one small broadcast, then one exchange a handle.

    Args:
        module: The wrapper.
        axes: Its axes.
        state_dict: Whole values on the first rank; not looked at elsewhere.

    Returns:
        What is left for ``nn.Module`` to load: values of what no unit manages, and :data:`RECEIVED` for the rest.

    Raises:
        CheckpointError: On every rank, if the dict does not fit; nothing is changed then.
    """
    units = units_in(module)
    refuse_tensor_parallel(
        units,
        "load_state_dict(broadcast_from_rank0=True)",
        "Give every rank the dict, read with torch.load(..., mmap=True): each takes its own part.",
    )
    first = units[0]
    is_first = first.shard.rank == 0 and first.replicate.rank == 0
    described: dict[str, Any] = {}
    problem = ""
    if is_first:
        problem = problem_of(module, state_dict) or _slices_in(state_dict)
        if not problem:
            described = {key: _describe(value) for key, value in state_dict.items()}
    problem, described = _broadcast_object(axes, (problem, described))
    if problem:
        raise CheckpointError(f"on rank 0: {problem}")
    settle_assigned(units)
    held = held_params(module, units)
    elsewhere = find_elsewhere(module, units, ())
    apart = _in_partial_units(held, elsewhere, described)
    partial = partial_units(units)
    for unit in units:
        for handle in unit.handles if unit not in partial else ():
            present = _present(held, handle, described)
            for dtype in dict.fromkeys(described[key].dtype for key in present.values()):
                chosen = {
                    index: key for index, key in present.items() if described[key].dtype == dtype
                }
                _receive(unit, handle, chosen, state_dict if is_first else {}, dtype)
    received: dict[str, Any] = dict.fromkeys(described, RECEIVED)
    received |= {key: value for key, value in described.items() if not isinstance(value, _Tensor)}
    for key in _unmanaged(module, held, described):
        if key not in apart:
            received[key] = _broadcast_whole(first, described[key], state_dict.get(key))
    for key, is_here in apart.items():
        value = _broadcast_whole(first, described[key], state_dict.get(key))
        received[key] = value if is_here else RECEIVED
    return received


def _in_partial_units(
    held: Sequence[Held], elsewhere: Elsewhere | None, described: Mapping[str, Any]
) -> dict[str, bool]:
    """The tensors of the dict that only some ranks hold, experts, and whether this one does.

    Collective: every rank of the widest unit, if there are any.

    Raises:
        CheckpointError: On every rank, if one does not fit where it is held.
    """
    if elsewhere is None:
        return {}
    shapes = {name: item.shape for item in held for name in (item.fqn, *item.aliases)}
    known = elsewhere.here | elsewhere.others
    apart = {
        key: key in elsewhere.here
        for key, value in described.items()
        if key in known and isinstance(value, _Tensor)
    }
    wrong = [
        f"{key} is {described[key].shape} in the dict and {shapes[key]} in the model"
        for key, is_here in apart.items()
        if is_here and described[key].shape != shapes.get(key, described[key].shape)
    ]
    found = dict.fromkeys(one for theirs in tell_tree(elsewhere.tree, wrong) for one in theirs)
    if found:
        raise CheckpointError(f"size mismatch for {'; '.join(found)}")
    return apart


def _slices_in(state_dict: Mapping[str, Any]) -> str:
    sliced = [key for key, value in state_dict.items() if is_distributed(value)]
    if not sliced:
        return ""
    return (
        f"broadcast_from_rank0 takes whole tensors, and {name_some(sliced)} are slices (DTensors): give every rank its "
        "own."
    )


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype)
    return value


def _present(
    held: Sequence[Held], handle: FlatParamHandle, described: Mapping[str, Any]
) -> dict[int, str]:
    """Under which name the dict has each parameter of ``handle``, by index; those it lacks left out."""
    found = {}
    for item in held:
        if item.handle is handle:
            names = [name for name in (item.fqn, *item.aliases) if name in described]
            if names:
                found[item.index] = names[0]
    return found


def _receive(
    unit: Unit,
    handle: FlatParamHandle,
    keys: Mapping[int, str],
    values: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Send every rank its pieces of the parameters named by ``keys`` and put them into the shard."""
    layout = handle.layout
    nothing = torch.empty(0, dtype=dtype, device=handle.device)
    pieces = [piece.in_slot.numel if i in keys else 0 for i, piece in enumerate(handle.pieces)]
    if unit.replicate.rank == 0:
        whole = [
            in_memory_order(values[keys[index]], slot) if values and index in keys else nothing
            for index, slot in enumerate(layout.slots)
        ]
        slots = list(keys)
        source, target = only(all_on_first(layout), slots), only(flat_spread(layout), slots)
        parts = redistribute(whole, source, target, unit.shard, dtype=dtype, device=handle.device)
    else:
        parts = [torch.empty(numel, dtype=dtype, device=handle.device) for numel in pieces]
    for index in keys:
        if pieces[index]:
            unit.replicate.broadcast([parts[index]]).wait()
            span = handle.pieces[index].in_shard
            handle.shard[span.start : span.stop].copy_(parts[index])


def in_memory_order(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The elements of ``value`` in the order in which ``slot`` keeps them, ``[numel]``; a view if they lie so."""
    value = value.detach().reshape(slot.shape)
    if value.stride() != slot.stride:
        ordered = torch.empty_strided(
            slot.shape, slot.stride, dtype=value.dtype, device=value.device
        )
        value = ordered.copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def _unmanaged(module: nn.Module, held: Sequence[Held], described: Mapping[str, Any]) -> list[str]:
    """The tensors of the dict that every rank holds whole: buffers, and parameters of no unit."""
    names = [item.fqn for item in held if item.handle is None]
    for path, child in module.named_modules():
        names += [
            join_names(clean_tensor_name(path), name) for name in _torch.persistent_buffers(child)
        ]
    return [name for name in dict.fromkeys(names) if isinstance(described.get(name), _Tensor)]


def _broadcast_whole(first: Unit, described: _Tensor, value: torch.Tensor | None) -> torch.Tensor:
    device = first.config.device
    if first.shard.rank == 0 and first.replicate.rank == 0:
        assert value is not None
        whole = value.detach().to(device).contiguous()
    else:
        whole = torch.empty(described.shape, dtype=described.dtype, device=device)
    as_bytes = whole.reshape(-1).view(torch.uint8)
    if as_bytes.numel():
        if first.shard.rank == 0:
            first.replicate.broadcast([as_bytes]).wait()
        first.shard.broadcast([as_bytes]).wait()
    return whole


def _broadcast_object(axes: Axes, value: Any) -> Any:
    """The first rank's ``value``, on every rank."""
    box = [value]
    if axes.replicate is not None and (axes.shard is None or axes.shard.rank() == 0):
        _broadcast_box(axes.replicate, box)
    if axes.shard is not None:
        _broadcast_box(axes.shard, box)
    return box[0]


def _broadcast_box(group: Any, box: list[Any]) -> None:
    if group.size() > 1:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
