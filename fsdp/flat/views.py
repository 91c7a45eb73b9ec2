"""What module code sees of a parameter: the leaf while its unit is unsharded, a stand-in or a shard otherwise.

Note [Exposure]
    Module code finds a parameter by attribute lookup, which reads ``module.__dict__`` first and
    ``module._parameters`` only if that fails.  Exposing a parameter is therefore one dictionary write: to
    ``__dict__`` in flat mode (the parameter is not registered, so ``parameters()`` shows the flat parameter alone)
    and to ``_parameters`` in orig mode (where the user's own ``nn.Parameter`` is registered between forwards).
    Alternatives considered: ``setattr`` (2 us a parameter, and it insists on ``nn.Parameter``); properties on the
    class (wrong for other instances of it); parametrizations (change the class and the state-dict keys).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from .. import _torch
from ..errors import ShardedParameterError, describe
from .layout import FlatLayout, Slot

__all__ = ["Exposure", "ShardedStandIn", "fresh_leaves", "layout_views", "slot_view"]


class ShardedStandIn(torch.Tensor):
    """What flat mode shows of a sharded parameter: its metadata; touching its values raises.

    ``shape``, ``dtype``, ``device`` and ``requires_grad`` are those of the unsharded parameter in the compute
    dtype, because module code asks for them (``x.to(self.weight.dtype)``) before its forward runs.
    """

    fqn: str

    @staticmethod
    def make(fqn: str, like: torch.Tensor, slot: Slot, *, requires_grad: bool) -> ShardedStandIn:
        """Build the stand-in of the parameter ``fqn``, which lies in ``slot``; dtype and device as ``like``."""
        made = _torch.make_raising_tensor(
            ShardedStandIn, like, torch.Size(slot.shape), slot.stride, like.dtype
        )
        assert isinstance(made, ShardedStandIn)
        made.fqn = fqn
        made.requires_grad = requires_grad
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<sharded parameter {self.fqn!r} of shape {tuple(self.shape)}, {self.dtype}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> NoReturn:
        """Refuse every operation, naming the parameter."""
        flat_args = [*args, *(kwargs or {}).values()]
        touched = [item for item in _flatten(flat_args) if isinstance(item, cls)]
        raise _touched(str(func), touched[0].fqn if touched else None)

    def tolist(self) -> NoReturn:
        """Refused by name; torch has a message of its own for subclasses, which would say nothing of sharding."""
        raise _touched("tolist", self.fqn)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused by name, as :meth:`tolist`."""
        raise _touched("numpy", self.fqn)


def _touched(what: str, fqn: str | None) -> ShardedParameterError:
    return ShardedParameterError(
        describe(
            f"{what} touched the values of a parameter that is sharded across ranks",
            fqn=fqn,
            remedy="Read it inside `with FSDP.summon_full_params(model):`, or call the module that owns it "
            "instead of using its parameter directly, or name the method that uses it in "
            "`register_forward_method`.",
        ),
        fqn=fqn,
    )


def _flatten(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flatten(item)
        else:
            yield item


def slot_view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The view of ``flat`` that is ``slot``'s parameter, with its shape and strides."""
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.span.start)


def layout_views(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """One view of ``flat`` ``[padded_numel]`` for each slot of ``layout``."""
    return [slot_view(flat, slot) for slot in layout.slots]


def fresh_leaves(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """Tensors over ``flat``'s storage, one a slot, that autograd takes for unrelated leaves.

    They are no views in autograd's sense and each has its own version counter, so a gather into ``flat`` does
    not look like a user's in-place change to what a forward has saved.
    """
    storage = flat.untyped_storage()
    return [
        torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            storage, flat.storage_offset() + slot.span.start, slot.shape, slot.stride
        )
        for slot in layout.slots
    ]


class Exposure:
    """A prepared set of dictionary writes that shows one tensor at each site (see Note [Exposure])."""

    def __init__(self, sites: Iterable[tuple[dict[str, Any], str]]) -> None:
        self._sites = tuple(sites)
        self._recurrent: tuple[nn.Module, ...] = ()

    def watch_recurrent(self, modules: Iterable[nn.Module]) -> None:
        """Remember the ``nn.RNNBase`` modules: they keep a list of their weights that must follow each write."""
        unique = dict.fromkeys(module for module in modules if isinstance(module, nn.RNNBase))
        self._recurrent = tuple(unique)

    def prepare(self, tensors: Iterable[Any]) -> tuple[tuple[dict[str, Any], str, Any], ...]:
        """Pair every site with its tensor; pass the result to :meth:`show`."""
        return tuple(
            (table, name, tensor)
            for (table, name), tensor in zip(self._sites, tensors, strict=True)
        )

    def show(self, writes: tuple[tuple[dict[str, Any], str, Any], ...]) -> None:
        """Write each tensor to its site."""
        for table, name, tensor in writes:
            table[name] = tensor
        for module in self._recurrent:
            weights = [
                getattr(module, name, None) for name in module.__dict__["_flat_weights_names"]
            ]
            module.__dict__["_flat_weights"] = weights
            # Without matching references the module takes its weights for replaced and, on CUDA, moves them.
            module.__dict__["_flat_weight_refs"] = [
                None if weight is None else weakref.ref(weight) for weight in weights
            ]
