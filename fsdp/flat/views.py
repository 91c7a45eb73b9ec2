"""What module code sees of a parameter: the leaf while its unit is unsharded, a stand-in or a shard otherwise.

Note [Exposure]
    Module code finds a parameter by attribute lookup, which reads ``module.__dict__`` first and
    ``module._parameters`` only if that fails.  Exposing a parameter is therefore a matter of dictionary writes:

    ==============================  ================  ======================
    mode and moment                 lookup finds      ``parameters()`` yields
    ==============================  ================  ======================
    flat, own forward runs          the leaf          the leaf
    flat, else                      a stand-in        nothing
    orig, own forward runs          the leaf          the leaf
    orig, another forward runs      a stand-in        the user's parameter
    orig, no forward runs           the user's        the user's parameter
                                    parameter
    ==============================  ================  ======================

    Usually one write a module, which exchanges its whole table (Note [Tables] in ``flat/tables.py``).  Where a module's
    parameters belong to several handles, or not all to us, each has an entry in ``_parameters``, and the stand-ins are
    in ``module.__dict__``.

    So ``self.parameters()`` inside a module's forward yields its whole parameters, as it does unwrapped, and the
    flat parameter is not registered meanwhile; ``torch.func.functional_call`` on a part of the module, which
    exchanges what is registered, computes with what it was given.  In orig mode the user's own ``nn.Parameter``,
    over this rank's piece, is what attribute lookup finds between forwards, since it is what users freeze, hook and
    hand to optimizers; but code that runs inside a forward and reaches for a parameter of another unit means to
    compute with it, and is told that it is sharded.
    Alternatives considered: ``setattr`` (2 us a parameter, and it insists on ``nn.Parameter``); a write or two a
    parameter, and stand-ins in ``module.__dict__`` for all (19 us a unit of twelve parameters, where exchanged tables
    cost 5); properties on the class (wrong for other instances of it); parametrizations (change the class and the
    state-dict keys).
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import nn

from .. import _torch
from ..errors import ShardedParameterError, describe
from .layout import FlatLayout, Slot
from .tables import Guard, ModuleTables, Notice, Pending

__all__ = [
    "Exposure",
    "Leaves",
    "Sharded",
    "ShardedStandIn",
    "Writes",
    "fresh_leaves",
    "layout_views",
    "slot_view",
]

Write = tuple[dict[str, Any], str, Any]
"""Where, under which name, what."""

_consume = deque[None](maxlen=0).extend
"""Runs an iterator to its end."""


class Writes:
    """Dictionary writes that are made again and again, without a line of Python for each.

    Args:
        writes: Where, under which name, what.
        removals: What else is taken away: where, under which name.
        recurrent: Modules among those written to that keep a list of their weights, which follows.

    Attributes:
        some: Whether there are any writes.
    """

    __slots__ = ("_names", "_recurrent", "_removals", "_tables", "_values", "some")

    def __init__(
        self,
        writes: Iterable[Write] = (),
        removals: Iterable[tuple[dict[str, Any], str]] = (),
        recurrent: Sequence[nn.RNNBase] = (),
    ) -> None:
        made = tuple(writes)
        self._tables = tuple([table for table, _, _ in made])
        self._names = tuple([name for _, name, _ in made])
        self._values = tuple([value for _, _, value in made])
        self._removals = tuple(removals)
        self._recurrent = recurrent
        self.some = bool(made)

    def and_also(self, write: Write) -> Writes:
        """These and one more."""
        writes = zip(self._tables, self._names, self._values, strict=True)
        return Writes([*writes, write], self._removals, self._recurrent)

    def make(self) -> None:
        """Make them."""
        _consume(map(operator.setitem, self._tables, self._names, self._values))
        for table, name in self._removals:
            table.pop(name, None)
        for module in self._recurrent:
            _list_weights(module)

    def undo(self) -> None:
        """Take away what they write."""
        for table, name in zip(self._tables, self._names, strict=True):
            table.pop(name, None)

    def stand(self) -> bool:
        """Whether all that they write is found where they write it."""
        found = map(dict.get, self._tables, self._names, repeat(self))
        return all(map(operator.is_, found, self._values))


@dataclass(frozen=True, slots=True)
class Leaves:
    """How leaves are exposed.

    Attributes:
        writes: Expose them.
        tables: Those of them that exchange a table.
        entries: The others.
    """

    writes: Writes
    tables: Writes
    entries: Writes

    def and_also(self, write: Write) -> Leaves:
        """The same and one entry more."""
        return Leaves(self.writes.and_also(write), self.tables, self.entries.and_also(write))


@dataclass(frozen=True, slots=True)
class Sharded:
    """How parameters are exposed while they are sharded.

    Attributes:
        writes: Expose them so.
        entries: Those of them that exchange no table.
        guards: Where stand-ins go while another unit's forward runs, if not in the table.
        registered: Never made: what is then to be found in the tables, unless users change it.
        notice: Given when they may have, in a table that tells.
        untold: Those of ``registered`` that are in other tables.
    """

    writes: Writes
    entries: Writes
    guards: Writes
    registered: Writes
    notice: Notice
    untold: Writes

    def and_also(self, write: Write) -> Sharded:
        """The same and one entry more, which is registered in a table that does not tell."""
        return replace(
            self,
            writes=self.writes.and_also(write),
            entries=self.entries.and_also(write),
            registered=self.registered.and_also(write),
            untold=self.untold.and_also(write),
        )

    def changed(self) -> bool:
        """Whether users have changed what is registered."""
        if self.notice.given:
            self.notice.given = not self.registered.stand()
            return self.notice.given
        return self.untold.some and not self.untold.stand()


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
    """Prepared dictionary writes that show one tensor at each site (see Note [Exposure]).

    Args:
        sites: Modules and the names there.
        hides: Whether lookup always finds the stand-ins while sharded (flat mode).
        exchanged: Modules whose tables may be exchanged.
    """

    def __init__(
        self,
        sites: Iterable[tuple[nn.Module, str]],
        *,
        hides: bool,
        exchanged: Collection[nn.Module],
    ) -> None:
        self._hides = hides
        self._names: dict[nn.Module, dict[str, int]] = {}
        for index, (module, name) in enumerate(sites):
            self._names.setdefault(module, {})[name] = index
        self._tables = {
            module: ModuleTables(module, names)
            for module, names in self._names.items()
            if module in exchanged and ModuleTables.fit(module, names)
        }
        self._entries = [
            (vars(module), _torch.parameter_table(module), name, index)
            for module, names in self._names.items()
            if module not in self._tables
            for name, index in names.items()
        ]
        self._recurrent = tuple(m for m in self._names if isinstance(m, nn.RNNBase))

    def of_leaves(self, leaves: Sequence[Any]) -> Leaves:
        """Show ``leaves``, one a site."""
        tables = [
            (tables.place, tables.KEY, tables.of_leaves(self._at(module, leaves)))
            for module, tables in self._tables.items()
        ]
        entries = [(table, name, leaves[index]) for _, table, name, index in self._entries]
        shadows = [(attributes, name) for attributes, _, name, _ in self._entries]
        removals = shadows if self._hides else ()
        return Leaves(
            Writes((*tables, *entries), removals, self._recurrent),
            Writes(tables, (), self._recurrent),
            Writes(entries, removals, self._recurrent),
        )

    def while_sharded(
        self,
        registered: Sequence[Any],
        stand_ins: Sequence[Any] | None,
        guard: Guard,
        pending: Pending,
    ) -> Sharded:
        """Show ``registered``, one a site, behind ``stand_ins`` while ``guard`` is on; the leaves if ``pending``."""
        notice = Notice()
        tables = [
            (
                tables.place,
                tables.KEY,
                tables.while_sharded(
                    self._at(module, registered),
                    {} if stand_ins is None else self._at(module, stand_ins),
                    guard,
                    notice,
                    pending,
                ),
            )
            for module, tables in self._tables.items()
        ]
        entries = [(table, name, registered[index]) for _, table, name, index in self._entries]
        hiding: list[Write] = []
        if stand_ins is not None:
            hiding = [(where, name, stand_ins[index]) for where, _, name, index in self._entries]
        hidden = hiding if self._hides else ()
        expected = [
            (tables.sharded, name, registered[index])
            for module, tables in self._tables.items()
            for name, index in self._names[module].items()
        ]
        return Sharded(
            writes=Writes((*tables, *entries, *hidden), (), self._recurrent),
            entries=Writes((*entries, *hidden), (), self._recurrent),
            guards=Writes(() if self._hides else hiding),
            registered=Writes((*expected, *entries)),
            notice=notice,
            untold=Writes(entries),
        )

    def show_own(self) -> None:
        """Let modules have their own tables again, for whole parameters to be registered there."""
        for tables in self._tables.values():
            tables.place[tables.KEY] = tables.own

    def follow_own(self) -> None:
        """Whole parameters have been registered there."""
        for module in self._recurrent:
            _list_weights(module)

    def follow(self) -> None:
        """Carry what users have registered beside the managed parameters to every table."""
        for tables in self._tables.values():
            tables.follow()

    def dissolve(self) -> None:
        """Leave the modules as they were, apart from what is registered."""
        for tables in self._tables.values():
            tables.dissolve()
        for attributes, _, name, _ in self._entries:
            if isinstance(attributes.get(name), ShardedStandIn):
                del attributes[name]

    def _at(self, module: nn.Module, values: Sequence[Any]) -> dict[str, Any]:
        return {name: values[index] for name, index in self._names[module].items()}


def _list_weights(module: nn.RNNBase) -> None:
    """Let the list of its weights that ``module`` keeps have what is found by their names now."""
    weights = [getattr(module, name, None) for name in module.__dict__["_flat_weights_names"]]
    module.__dict__["_flat_weights"] = weights
    # Without matching references the module takes its weights for replaced and, on CUDA, moves them.
    module.__dict__["_flat_weight_refs"] = [
        None if weight is None else weakref.ref(weight) for weight in weights
    ]
