"""The original parameters of a model: their names, and where on this rank an optimizer finds what it holds of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import _torch
from ..flat.handle import FlatParamHandle
from ..flat.layout import Span
from ..flat.sharing import Site
from ..flat.tensor_parallel import TensorShard
from ..names import clean_tensor_name, join_names
from .unit import Unit

__all__ = ["Held", "held_params", "settle_assigned", "unit_of", "units_in"]


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """One original parameter, and what optimizers hold of it on this rank.

    Attributes:
        fqn: Name in the unwrapped model; of a tied parameter the first one.
        aliases: Its other names.
        key: The parameter an optimizer holds: the original one, or the flat one it lies in.
        unit: The unit that owns it; None for a parameter no unit manages.
        handle: Its handle, likewise.
        index: Its place in the handle.
    """

    fqn: str
    aliases: tuple[str, ...]
    key: nn.Parameter
    unit: Unit | None = None
    handle: FlatParamHandle | None = None
    index: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the unwrapped model."""
        if self.handle is None:
            return tuple(self.key.shape)
        return self.handle.whole_shape(self.index)

    @property
    def tensor_shard(self) -> TensorShard | None:
        """How it is cut over tensor-parallel ranks, if it is."""
        return None if self.handle is None else self.handle.params[self.index].tensor_shard

    @property
    def numel(self) -> int:
        """Elements in the unwrapped model; of this rank's part, if it is cut over tensor-parallel ranks."""
        if self.handle is None:
            return self.key.numel()
        return self.handle.layout.slots[self.index].span.numel

    def span_on(self, rank: int) -> Span:
        """Which of its elements, counted in memory order, a rank of the shard group holds; none is ``Span(0, 0)``."""
        assert self.handle is not None
        layout = self.handle.layout
        slot = layout.slots[self.index].span
        held = slot.clip(layout.owned(rank))
        return held.shift(-slot.start) if held.numel else Span(0, 0)

    @property
    def is_kept_here(self) -> bool:
        """Whether this rank's part of it is not empty (or the whole is), so that an optimizer here steps it."""
        if self.handle is None or not self.numel:
            return True
        return self.handle.pieces[self.index].in_slot.numel > 0

    def piece_of(self, value: torch.Tensor, *, rank: int | None = None) -> torch.Tensor:
        """This rank's piece of ``value``, which has the parameter's shape: ``[n]`` in memory order, always a copy.

        It lies where the parameter does.  Only for parameters that a unit manages.

        Args:
            value: The whole, on any device.
            rank: Another rank of the shard group whose piece is wanted.
        """
        assert self.handle is not None
        slot = self.handle.layout.slots[self.index]
        span = self.span_on(self.handle.rank if rank is None else rank)
        shard = self.tensor_shard
        value = value if shard is None else shard.local_part(value)
        value = value.detach().reshape(slot.shape)
        if value.stride() != slot.stride:
            ordered = torch.empty_strided(
                slot.shape, slot.stride, dtype=value.dtype, device=value.device
            )
            value = ordered.copy_(value)
        memory = value.as_strided((slot.span.numel,), (1,), value.storage_offset())
        return memory[span.start : span.stop].to(self.handle.device, copy=True)

    def shaped(self, piece: torch.Tensor) -> torch.Tensor:
        """``piece`` ``[n]`` in the shape the exposed original parameter has on this rank; a view."""
        assert self.handle is not None
        if self.handle.uses_sharded_strategy:
            return piece
        slot = self.handle.layout.slots[self.index]
        return piece.as_strided(slot.shape, slot.stride, piece.storage_offset())


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose hooks sit on ``module``, if it is wrapped.  Collective: none."""
    for hook in _torch.forward_pre_hooks(module):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Unit):
            return owner
    return None


def units_in(model: nn.Module) -> list[Unit]:
    """The units of ``model`` and of everything in it, in ``modules()`` order.  Collective: none."""
    found = (unit_of(module) for module in model.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def settle_assigned(units: Sequence[Unit]) -> None:
    """Put what users have assigned to parameters into the shards now, so that what is loaded next comes over it.

    Collective: none.
    """
    for unit in units:
        unit.follow_user_changes()


def held_params(model: nn.Module, units: Sequence[Unit]) -> list[Held]:
    """Every parameter of the unwrapped model once, in the order its ``named_parameters()`` has.

    Collective: none.

    Args:
        model: A wrapper, or a module that contains some.
        units: The units in it.
    """
    managed: dict[tuple[nn.Module, str], Held] = {}
    siblings: dict[nn.Module, tuple[str, ...]] = {}
    for item, sites in _managed(model, units):
        for site in sites:
            managed[site.module, site.name] = item
            siblings[site.module] = site.siblings
    flat_params = {handle.flat_param for unit in units for handle in unit.handles}
    found: dict[object, Held] = {}
    for path, module in model.named_modules():
        table = _torch.parameter_table(module)
        for name in dict.fromkeys((*siblings.get(module, ()), *table)):
            owned = managed.get((module, name))
            param = table.get(name)
            if owned is not None:
                found.setdefault(owned, owned)
            elif param is not None and param not in flat_params:
                fqn = join_names(clean_tensor_name(path), name)
                found.setdefault(param, Held(fqn, (), param))
    return list(found.values())


def _managed(model: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[Held, list[Site]]]:
    """Every parameter that a unit manages, with the places where modules look it up."""
    prefixes = {module: clean_tensor_name(path) for path, module in model.named_modules()}
    for unit in units:
        prefix = prefixes[unit.module]
        for handle in unit.handles:
            for index, param in enumerate(handle.params):
                key = param.param if handle.orig_mode else handle.flat_param
                first, *others = [join_names(prefix, site.fqn) for site in param.sites]
                yield Held(first, tuple(others), key, unit, handle, index), param.sites
