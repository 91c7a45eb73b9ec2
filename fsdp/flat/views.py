"""What module code sees of a parameter: the leaf while its unit is unsharded, a stand-in or a shard otherwise.

Note [Exposure]
    Module code finds a parameter by attribute lookup, which reads ``module.__dict__`` first and
    ``module._parameters`` only if that fails.  Exposing a parameter is therefore a dictionary write or two a site:

    ==============================  ====================  ======================
    mode and moment                 ``module.__dict__``   ``module._parameters``
    ==============================  ====================  ======================
    flat, own forward runs          -                     the leaf
    flat, else                      a stand-in            None (nothing)
    orig, own forward runs          -                     the leaf
    orig, another forward runs      a stand-in            the user's parameter
    orig, no forward runs           -                     the user's parameter
    ==============================  ====================  ======================

    So ``self.parameters()`` inside a module's forward yields its whole parameters, as it does unwrapped, and the
    flat parameter is not registered meanwhile; ``torch.func.functional_call`` on a part of the module, which
    exchanges what is registered, computes with what it was given.  In orig mode the user's own ``nn.Parameter``,
    over this rank's piece, is what attribute lookup finds between forwards, since it is what users freeze, hook and
    hand to optimizers; but code that runs inside a forward and reaches for a parameter of another unit means to
    compute with it, and is told that it is sharded.
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

__all__ = ["Exposure", "ShardedStandIn", "Writes", "fresh_leaves", "layout_views", "slot_view"]

Writes = tuple[tuple[dict[str, Any], str, Any], ...]
"""Dictionary writes: where, under which name, what; :data:`_ABSENT` takes the entry away."""

_ABSENT = object()


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
            ShardedStandIn,
            like,
            torch.Size(slot.shape),
            slot.stride,
            like.dtype,
            requires_grad=requires_grad,
        )
        assert isinstance(made, ShardedStandIn)
        made.fqn = fqn
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<sharded parameter {self.fqn!r} of shape {tuple(self.shape)}, {self.dtype}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Refuse what needs no operation and would be done to the stand-in, to no effect."""
        refused = _REFUSED.get(func)
        if refused is not None:
            raise _replaced(refused, args[0].fqn)
        return super().__torch_function__(func, types, args, kwargs)

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


_TENSOR: Any = torch.Tensor  # whose annotations speak of instances
_REFUSED = {
    _TENSOR.grad.__get__: "reading the gradient",
    _TENSOR.grad.__set__: "setting the gradient",
    _TENSOR.data.__set__: "setting the data",
    _TENSOR.requires_grad.__set__: "freezing or thawing",
    torch.Tensor.requires_grad_: "freezing or thawing",
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    torch.Tensor.retain_grad: "retain_grad",
    torch.Tensor.untyped_storage: "reading the storage",
    torch.Tensor.data_ptr: "reading the address",
    torch.Tensor.share_memory_: "sharing the memory",
    torch.Tensor.__reduce_ex__: "pickling",
}


def _replaced(what: str, fqn: str) -> ShardedParameterError:
    return ShardedParameterError(
        describe(
            f"{what} of a parameter that is sharded across ranks, whose place something else has taken",
            fqn=fqn,
            remedy="Do it before wrapping, inside `with FSDP.summon_full_params(model, with_grads=True):`, or wrap "
            "with use_orig_params=True and do it between forwards.",
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
    """Prepared dictionary writes that show one tensor at each site (see Note [Exposure])."""

    def __init__(self, sites: Iterable[tuple[nn.Module, str]]) -> None:
        self._sites = [
            (vars(module), _torch.parameter_table(module), name) for module, name in sites
        ]
        self._recurrent: tuple[nn.Module, ...] = ()

    def watch_recurrent(self, modules: Iterable[nn.Module]) -> None:
        """Remember the ``nn.RNNBase`` modules: they keep a list of their weights that must follow each write."""
        unique = dict.fromkeys(module for module in modules if isinstance(module, nn.RNNBase))
        self._recurrent = tuple(unique)

    def as_attributes(self, tensors: Iterable[Any]) -> Writes:
        """Write each tensor where attribute lookup finds it first."""
        pairs = zip(self._sites, tensors, strict=True)
        return tuple((attributes, name, tensor) for (attributes, _, name), tensor in pairs)

    def without_attributes(self) -> Writes:
        """Let attribute lookup find what is registered."""
        return tuple((attributes, name, _ABSENT) for attributes, _, name in self._sites)

    def as_parameters(self, tensors: Iterable[Any]) -> Writes:
        """Write each tensor where ``parameters()`` finds it; None for nothing."""
        pairs = zip(self._sites, tensors, strict=True)
        return tuple((table, name, tensor) for (_, table, name), tensor in pairs)

    def show(self, writes: Writes) -> None:
        """Make the writes."""
        for table, name, tensor in writes:
            if tensor is _ABSENT:
                table.pop(name, None)
            else:
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
