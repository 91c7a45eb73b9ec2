"""The tables in which modules register their parameters, one for each thing there is to show.

Note [Tables]
    Where all parameters of a module belong to one handle, exposing them is one write: ``module._parameters``
    is exchanged for a table that was filled beforehand.  The module's own dictionary shows whole parameters
    (``summon_full_params``), one more the leaves, and a :class:`ShardedTable` what is registered while sharded.
    What a table holds that the handle does not manage (``bias=None``, mostly) is the same in all of them; where users
    change it, :meth:`ModuleTables.follow` carries it from the table they found to the others.
    Where they write over what is managed, the table notes it, so that nobody has to look in every forward.
    Where a module's parameters belong to several handles, or some to none, each entry is written by itself; so it is
    on the wrapped module, which may have flat parameters of several handles registered, and in modules of other units,
    with which parameters are tied.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, Self

from torch import nn

from .. import _torch

__all__ = ["ALWAYS", "Guard", "ModuleTables", "Notice", "ShardedTable"]


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


class ShardedTable(dict[str, Any]):
    """Registered parameters, which ``parameters()`` yields, with stand-ins for who looks one up by its name.

    Args:
        registered: What is registered.
        stand_ins: Of the managed parameters.
        guard: While it is on, they are found.
        notice: Given when something is written or deleted in the table.
    """

    __slots__ = ("_guard", "_hidden", "_notice", "_stand_ins")

    def __init__(
        self,
        registered: Mapping[str, Any],
        stand_ins: Mapping[str, Any],
        guard: Guard,
        notice: Notice,
    ) -> None:
        super().__init__(registered)
        self._stand_ins = dict(stand_ins)
        self._hidden = {name: registered[name] for name in stand_ins}
        self._guard = guard
        self._notice = notice

    def __getitem__(self, name: str) -> Any:
        """The stand-in, or what is registered."""
        if self._guard.on and name in self._stand_ins:
            return self._stand_ins[name]
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Register ``value``; for a stand-in, put back after an exchange (by ``functional_call``), what it hid."""
        if value is not None and value is self._stand_ins.get(name):
            value = self._hidden[name]
        self._notice.given = True
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        """Take it out."""
        self._notice.given = True
        super().__delitem__(name)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        """As :meth:`update`."""
        self.update(other)
        return self

    def pop(self, *args: Any) -> Any:
        """As a plain dictionary."""
        self._notice.given = True
        return super().pop(*args)

    def popitem(self) -> tuple[str, Any]:
        """As a plain dictionary."""
        self._notice.given = True
        return super().popitem()

    def clear(self) -> None:
        """As a plain dictionary."""
        self._notice.given = True
        super().clear()

    def setdefault(self, name: str, value: Any = None) -> Any:
        """As a plain dictionary, which knows nothing of stand-ins."""
        self._notice.given = True
        return super().setdefault(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As a plain dictionary, which knows nothing of stand-ins."""
        self._notice.given = True
        super().update(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A plain table: whoever copies the module gives it a handle of its own."""
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As :meth:`__deepcopy__`."""
        return dict, (dict(self),)


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
    ) -> dict[str, Any]:
        """A table that shows ``registered``, and hides it behind ``stand_ins``; may be empty."""
        self.follow()
        shown = {name: registered.get(name, other) for name, other in self.own.items()}
        self.sharded = ShardedTable(shown, stand_ins, guard, notice)
        return self.sharded

    def follow(self) -> None:
        """Let every table hold what users have registered in one of them, or deleted, beside the managed ones."""
        tables = [self.own, *self._leaves]
        for table in tables:
            for name in table.keys() - self._names - self._others - self.sharded.keys():
                self.sharded[name] = table[name]
        for name in self._others - self.sharded.keys():
            for table in tables:
                table.pop(name, None)
        self._others = self.sharded.keys() - self._names
        for table in tables:
            table.update({name: self.sharded.get(name) for name in self._others})

    def dissolve(self) -> None:
        """Let the module have its own dictionary again, with what is registered while sharded."""
        self.follow()
        if self.place[self.KEY] is not self.own:
            self.own.update(self.sharded)
            for name in self._names - self.sharded.keys():  # deleted by the user
                self.own.pop(name, None)
            self.place[self.KEY] = self.own
