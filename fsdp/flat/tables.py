"""The tables in which modules register their parameters, one for each thing there is to show.

Note [Tables]
    Where all parameters of a module belong to one handle, exposing them is one write: ``module._parameters``
    is exchanged for a table that was filled beforehand.  The module's own dictionary shows whole parameters
    (``summon_full_params``), one more the leaves, and a :class:`ShardedTable` what is registered while sharded.
    What a table holds that the handle does not manage (``bias=None``, mostly) is the same in all of them; where users
    change it, :meth:`ModuleTables.follow` carries it from the table they found to the others.
    Where they write over what is managed, the table notes it, so that nobody has to look in every forward.
    A backward needs leaves in the tables only where module code runs in it (checkpoints recompute), so there they are
    only pending: the first that asks a :class:`ShardedTable` for one has them exposed.  Compiled code reads tables past
    anything that could notice, so once there is any, they are exposed in every backward.
    Where a module's parameters belong to several handles, or some to none, each entry is written by itself; so it is
    on the wrapped module, which may have flat parameters of several handles registered, and in modules of other units,
    with which parameters are tied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Self

from torch import nn

from .. import _torch

__all__ = ["ALWAYS", "NOTHING", "Guard", "ModuleTables", "Notice", "Pending", "ShardedTable"]


class Guard:
    """Whether who looks a sharded parameter up finds its stand-in, and not what is registered.

    Attributes:
        on: Whether.
    """

    __slots__ = ("on",)

    def __init__(self, *, on: bool = False) -> None:
        self.on = on


ALWAYS = Guard(on=True)


class Notice:
    """Whether somebody has written where a managed parameter is registered.

    Attributes:
        given: Whether; whoever has looked at the table since takes it back.
    """

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given = True


class Pending:
    """Leaves that are filled, and shown to whoever asks for one.

    Args:
        expose: Exposes them.

    Attributes:
        on: Whether there are any.
    """

    __slots__ = ("_expose", "on")

    def __init__(self, expose: Callable[[], None]) -> None:
        self.on = False
        self._expose = expose

    def expose(self) -> None:
        """Exchange the tables for those that show the leaves."""
        self.on = False
        self._expose()


NOTHING = Pending(lambda: None)


class ShardedTable(dict[str, Any]):
    """Registered parameters, which ``parameters()`` yields, with stand-ins for who looks one up by its name.

    Args:
        registered: What is registered.
        stand_ins: Of the managed parameters.
        guard: While it is on, they are found.
        notice: Given when something is written or deleted in the table.
        place: Where the table in force is.
        pending: The leaves that take its place when somebody reads a parameter.
    """

    __slots__ = ("_guard", "_hidden", "_notice", "_pending", "_place", "_stand_ins")

    def __init__(
        self,
        registered: Mapping[str, Any],
        stand_ins: Mapping[str, Any],
        guard: Guard,
        notice: Notice,
        place: Mapping[str, Any],
        pending: Pending,
    ) -> None:
        super().__init__(registered)
        self._stand_ins = dict(stand_ins)
        self._hidden = {name: registered[name] for name in stand_ins}
        self._guard = guard
        self._notice = notice
        self._place = place
        self._pending = pending

    def _other(self) -> dict[str, Any] | None:
        """The table in force, if this is not the one, as it is not once leaves that were pending are exposed.

        Who has kept this one means what the module has.
        """
        if self._pending.on:
            self._pending.expose()
        in_force: dict[str, Any] = self._place.get(ModuleTables.KEY, self)
        return None if in_force is self else in_force

    def _written(self) -> dict[str, Any] | None:
        """The table in force, if this is not the one; else notice is given."""
        other = self._other()
        if other is None:
            self._notice.given = True
        return other

    # Reading: where no stand-in is said to be found, what is registered is.

    def __getitem__(self, name: str) -> Any:
        """The stand-in, or what is registered."""
        other = self._other()
        if other is not None:
            return other[name]
        if self._guard.on and name in self._stand_ins:
            return self._stand_ins[name]
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        """Names.  Without this, ``dict(table)`` and ``**table`` would read past every other method."""
        other = self._other()
        return super().__iter__() if other is None else iter(other)

    def get(self, name: str, default: Any = None) -> Any:
        """As a plain dictionary, which knows nothing of stand-ins."""
        other = self._other()
        return super().get(name, default) if other is None else other.get(name, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As :meth:`get`."""
        other = self._other()
        return super().items() if other is None else other.items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As :meth:`get`."""
        other = self._other()
        return super().values() if other is None else other.values()

    def copy(self) -> dict[str, Any]:
        """As :meth:`get`."""
        return dict(self.items())

    def __or__(self, others: Any) -> dict[str, Any]:  # type: ignore[override]
        """As :meth:`get`."""
        made: dict[str, Any] = self.copy() | others
        return made

    # Writing.

    def __setitem__(self, name: str, value: Any) -> None:
        """Register ``value``; for a stand-in, put back after an exchange (by ``functional_call``), what it hid."""
        other = self._written()
        if other is not None:
            other[name] = value
            return
        if value is not None and value is self._stand_ins.get(name):
            value = self._hidden[name]
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        """Take it out."""
        other = self._written()
        if other is None:
            super().__delitem__(name)
        else:
            del other[name]

    def __ior__(self, other: Any) -> Self:  # type: ignore[override]
        """As :meth:`update`."""
        self.update(other)
        return self

    def pop(self, *args: Any) -> Any:
        """As a plain dictionary."""
        other = self._written()
        return super().pop(*args) if other is None else other.pop(*args)

    def popitem(self) -> tuple[str, Any]:
        """As a plain dictionary."""
        other = self._written()
        return super().popitem() if other is None else other.popitem()

    def clear(self) -> None:
        """As a plain dictionary."""
        other = self._written()
        if other is None:
            super().clear()
        else:
            other.clear()

    def setdefault(self, name: str, value: Any = None) -> Any:
        """As a plain dictionary, which knows nothing of stand-ins."""
        other = self._written()
        return super().setdefault(name, value) if other is None else other.setdefault(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As a plain dictionary, which knows nothing of stand-ins."""
        other = self._written()
        if other is None:
            super().update(*args, **kwargs)
        else:
            other.update(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A plain table: whoever copies the module gives it a handle of its own."""
        return copy.deepcopy(dict(dict.items(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As :meth:`__deepcopy__`."""
        return dict, (dict(dict.items(self)),)


class ModuleTables:
    """The tables of one module (see Note [Tables]).

    Args:
        module: All of whose parameters one handle manages (see :meth:`fit`).
        names: Theirs.

    Attributes:
        place: Where the table in force is.
        own: The module's own dictionary.
        sharded: What is in force while the parameters are sharded.
    """

    KEY = "_parameters"

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self.place = vars(module)
        self.own = _torch.parameter_table(module)
        self.sharded: dict[str, Any] = self.own
        self._names = frozenset(names)
        self._others = {name for name in self.own if name not in self._names}
        self._leaves: list[dict[str, Any]] = []

    @staticmethod
    def fit(module: nn.Module, names: Collection[str]) -> bool:
        """Whether ``module`` has no parameters but those called ``names``."""
        table = _torch.parameter_table(module)
        return type(table) is dict and all(
            name in names or (param is None and name not in vars(module))
            for name, param in table.items()
        )

    def of_leaves(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """A table that shows ``leaves``."""
        self.follow()
        made = {name: leaves.get(name, other) for name, other in self.own.items()}
        self._leaves.append(made)
        return made

    def while_sharded(
        self,
        registered: Mapping[str, Any],
        stand_ins: Mapping[str, Any],
        guard: Guard,
        notice: Notice,
        pending: Pending,
    ) -> dict[str, Any]:
        """A table that shows ``registered``, and hides it behind ``stand_ins``; may be empty."""
        self.follow()
        shown = {name: registered.get(name, other) for name, other in self.own.items()}
        self.sharded = ShardedTable(shown, stand_ins, guard, notice, self.place, pending)
        return self.sharded

    def follow(self) -> None:
        """Let every table hold what users have registered in one of them, or deleted, beside the managed ones."""
        tables = [self.own, *self._leaves]
        for table in tables:
            for name in table.keys() - self._names - self._others - self.sharded.keys():
                dict.__setitem__(self.sharded, name, table[name])
        for name in self._others - self.sharded.keys():
            for table in tables:
                table.pop(name, None)
        self._others = self.sharded.keys() - self._names
        for table in tables:
            table.update({name: dict.get(self.sharded, name) for name in self._others})

    def dissolve(self) -> None:
        """Let the module have its own dictionary again, with what is registered while sharded."""
        self.follow()
        if self.place[self.KEY] is not self.own:
            self.own.update(dict.items(self.sharded))
            for name in self._names - self.sharded.keys():  # deleted by the user
                self.own.pop(name, None)
            self.place[self.KEY] = self.own
