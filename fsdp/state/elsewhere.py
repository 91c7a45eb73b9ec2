"""What other ranks hold of a model: experts that this rank has not (see :mod:`fsdp.runtime.spread`).

A parameter's name stands for one tensor in the whole job.  So experts are named by their global number, each rank has
the names of its own, and the names of all ranks together are those of the model that has every expert.  A name that
means different parameters on different ranks can not be saved, and is an error that says so.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from .. import _torch
from ..comm.collectives import Collectives
from ..comm.telling import tell_all
from ..errors import CheckpointError, FsdpWarning, describe, name_some
from ..names import clean_tensor_name, join_names
from ..runtime.held import held_params
from ..runtime.spread import partial_units, tell_tree, widest
from ..runtime.unit import Unit

__all__ = ["Elsewhere", "completed", "find_elsewhere", "merged_order"]

_Key = TypeVar("_Key", bound=Hashable)
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The names in partial units, on every rank.

    Attributes:
        tree: The widest unit: its ranks together have the whole model.
        here: Those that this rank holds.
        first_here: Those among them that no rank before this one holds.
        others: Those that only other ranks hold.
        order: Every key of the whole model, as the model that has all of it orders them.
    """

    tree: Unit
    here: frozenset[str]
    first_here: frozenset[str]
    others: frozenset[str]
    order: tuple[str, ...]

    def in_order(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """``values`` in the order of the whole model; what it does not know comes last."""
        known = {key: values[key] for key in self.order if key in values}
        return known | dict(values)


_Value = TypeVar("_Value")


def find_elsewhere(
    model: nn.Module, units: Sequence[Unit], order: Sequence[str], *, may_clash: bool = False
) -> Elsewhere | None:
    """What other ranks hold; None, without any communication, where no unit is partial.

    Collective: every rank of the widest unit, if there are partial ones.

    Args:
        model: A wrapper, or a module that contains some.
        units: The units in it.
        order: The keys that this rank's state dict may have, in order.
        may_clash: Whether every rank keeps what it has, so that a name may mean something else on each: it is warned
            about, and belongs to no other rank.

    Raises:
        CheckpointError: If a trainable parameter's name stands for different parameters on different ranks.
    """
    partial = partial_units(units)
    if not partial:
        return None
    tree = widest(units)
    mine = _names_in(model, partial)
    told = tell_tree(tree, (list(order), mine))
    clashing = _clashing([names for _, names in told])
    if clashing:
        if not may_clash:
            raise CheckpointError(_describe_clash(clashing), fqn=clashing[0])
        warnings.warn(_describe_clash(clashing), FsdpWarning, stacklevel=2)
        told = [(keys, _without(names, clashing)) for keys, names in told]
        mine = _without(mine, clashing)
    me = tree.replicate.rank * tree.shard.size + tree.shard.rank
    before = {name for _, names in told[:me] for name in names}
    every = {name for _, names in told for name in names}
    return Elsewhere(
        tree,
        frozenset(mine),
        frozenset(mine) - before,
        frozenset(every) - frozenset(mine),
        tuple(merged_order([order for order, _ in told])),
    )


def _names_in(model: nn.Module, partial: Sequence[Unit]) -> dict[str, int]:
    """The names in ``partial`` units, with the number of ranks that hold each; 0 where it does not matter."""
    names: dict[str, int] = {}
    wanted = set(partial)
    for item in held_params(model, partial):
        if item.unit in wanted:
            ranks = item.unit.world_size if item.key.requires_grad else 0
            names.update(dict.fromkeys((item.fqn, *item.aliases), ranks))
    inside = {module for unit in partial for module in unit.modules}
    for path, module in model.named_modules():
        if module in inside:
            for name in _torch.persistent_buffers(module):
                names[join_names(clean_tensor_name(path), name)] = 0
    return names


def _clashing(told: Sequence[Mapping[str, int]]) -> list[str]:
    """Names that more ranks have than hold the parameter: some of them mean another one."""
    holders = Counter(name for names in told for name in names)
    return sorted(
        {name for names in told for name, ranks in names.items() if ranks and holders[name] > ranks}
    )


def _without(names: Mapping[str, int], clashing: Collection[str]) -> dict[str, int]:
    return {name: ranks for name, ranks in names.items() if name not in clashing}


def _describe_clash(names: Sequence[str]) -> str:
    return describe(
        f"the same names stand for different parameters on different ranks: {name_some(names)}; these units are over "
        "fewer ranks than the rest, and other ranks have units of the same names",
        fqn=names[0],
        remedy="Name experts by their global number, nn.ModuleDict({str(number): Expert() for number in mine}) for "
        "example; where the parameters are meant to be equal, use hybrid sharding.  Until then only a full state dict "
        "on every rank can be had, in which each rank has its own.",
    )


def merged_order(lists: Iterable[Sequence[str]]) -> list[str]:
    """One order of all names: what only one list has comes before what follows it there.  Pure.

    Example:
        >>> merged_order([["a", "e0", "e1", "b"], ["a", "e2", "b"]])
        ['a', 'e0', 'e1', 'e2', 'b']
    """
    order: list[str] = []
    for names in lists:
        known = set(order)
        following: str | None = None
        inserted: dict[str | None, list[str]] = {}
        for name in reversed(names):
            if name in known:
                following = name
            else:
                inserted.setdefault(following, []).append(name)
        order = [
            name
            for old in (*order, None)
            for name in (*reversed(inserted.get(old, ())), *([old] if old is not None else ()))
        ]
    return order


# -- values ------------------------------------------------------------------------------------------------------------


def completed(
    mine: Mapping[_Key, torch.Tensor], tree: Unit, *, to_all: bool
) -> dict[_Key, torch.Tensor]:
    """The tensors that other ranks have and this one has not.

    Costs the memory of the result and of some 64 MiB on their way.

    Collective: every rank of ``tree``; along each axis one small exchange, then one for each 64 MiB.

    Args:
        mine: What this rank has; equal keys mean equal tensors on every rank.
        tree: The widest unit.
        to_all: Whether every rank wants the result, or only the first one.

    Returns:
        New tensors on the tree's device, by key; empty on ranks that want nothing.
    """
    have = dict(mine)
    wants = (to_all or tree.shard.rank == 0, to_all or tree.shard.rank == tree.replicate.rank == 0)
    for axis, is_wanted in zip((tree.shard, tree.replicate), wants, strict=True):
        if axis.size > 1:
            have |= _received(have, axis, tree.config.device, is_wanted=is_wanted)
    return {key: value for key, value in have.items() if key not in mine} if wants[1] else {}


def _received(
    have: Mapping[_Key, torch.Tensor], axis: Collectives, device: torch.device, *, is_wanted: bool
) -> dict[_Key, torch.Tensor]:
    """What the other ranks of one axis have and this one has not, if it wants it."""
    described = {key: (value.shape, value.dtype) for key, value in have.items()}
    told = tell_all(axis, (described, is_wanted), device)
    holder: dict[_Key, int] = {}
    for rank, (theirs, _) in enumerate(told):
        for key in theirs:
            holder.setdefault(key, rank)
    results: dict[_Key, torch.Tensor] = {}
    for batch in _batches(holder, told):
        sends, receives = [], []
        for peer, (theirs, wants) in enumerate(told):
            going = [k for k in batch if holder[k] == axis.rank and wants and k not in theirs]
            coming = [k for k in batch if holder[k] == peer and is_wanted and k not in have]
            sends.append(_packed([have[key] for key in going], device))
            for key in coming:
                shape, dtype = told[peer][0][key]
                results[key] = torch.empty(shape, dtype=dtype, device=device)
            receives.append(_packed([results[key] for key in coming], device))
        axis.exchange(sends, receives).wait()
        for peer, received in enumerate(receives):
            start = 0
            for key in [k for k in batch if holder[k] == peer and k in results]:
                flat = results[key].view(-1).view(torch.uint8)
                flat.copy_(received[start : start + flat.numel()])
                start += flat.numel()
    return results


def _batches(
    holder: Mapping[_Key, int],
    told: Sequence[tuple[Mapping[_Key, tuple[torch.Size, torch.dtype]], bool]],
) -> Iterator[list[_Key]]:
    """The keys that some rank lacks, a bounded number of bytes at a time; equal on every rank."""
    batch: list[_Key] = []
    nbytes = 0
    for key, rank in holder.items():
        if all(key in theirs or not wants for theirs, wants in told):
            continue
        shape, dtype = told[rank][0][key]
        batch.append(key)
        nbytes += shape.numel() * dtype.itemsize
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _packed(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The elements of ``tensors`` one after another, as bytes."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [t.detach().contiguous().view(-1).view(torch.uint8).to(device) for t in tensors]
    return torch.cat([nothing, *parts])
