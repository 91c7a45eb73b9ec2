"""Copies and pickles of wrappers: of each unit the shards, of each module what is not ours."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from . import _torch
from .assembly import start_root, wrap_child
from .properties import wrappers_in
from .state.pickled import SAVING, SavedUnit, restore_unit, saved_unit
from .training import TrainingInterface

__all__ = ["CopiedWrapper"]


class CopiedWrapper(TrainingInterface):
    """What ``copy.deepcopy``, ``torch.save`` and ``torch.load`` do with a wrapper."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """An independent wrapper, sharded in the same way over the same process groups.  Collective: none."""
        unit = self._unit
        unit.root.check_idle("copy.deepcopy")
        unit.root.tree.follow()
        unit.reshard()
        unit.follow_user_changes()
        outermost = memo.setdefault(_COPYING, self) is self
        if id(unit) not in memo:  # the outermost wrapper, or one that was taken out of the tree
            self._let_hooks_be_found(memo)
        if SAVING in memo:
            return self._record(memo)
        module = self._copied_module(memo)
        made = memo[id(self)] = wrap_child(type(self), module, unit.copied(memo), self._arguments)
        made._exec_order_policy = self._exec_order_policy
        made._reasons = self._reasons
        made._state_hooks.settings = self._state_hooks.settings
        for mine, its in zip(self.params, made.params, strict=True):
            memo[id(mine)] = its  # for an optimizer that is copied along
        for name in self._forward_methods:
            made.register_forward_method(name)
        if outermost:
            del memo[_COPYING]
            start_root(made)
        return made

    def _copied_module(self, memo: dict[Any, Any]) -> nn.Module:
        """A deepcopy of the wrapped module without anything of ours on it."""
        stale = memo[_STALE]
        for handle in self._unit.handles:
            memo.update((id(stand_in), None) for stand_in in handle.stand_ins)
            memo[id(handle.flat_param)] = None
        module = copy.deepcopy(self._fsdp_wrapped_module, memo)
        for original in self._state_hooks.hooked:
            copied = copy.deepcopy(original, memo)  # there already, if it is still in the tree
            if isinstance(copied, nn.Module):  # an inner wrapper may be a record
                _torch.remove_hooks_of(copied, stale)
        for name in self._forward_methods:
            del vars(module)[name]
        return module

    def _let_hooks_be_found(self, memo: dict[Any, Any]) -> None:
        """Put a stand-in for every unit inside, since a module may be in several and carry hooks of each."""
        stale = memo.setdefault(_STALE, _Stale())
        for wrapper in wrappers_in(self):
            assert isinstance(wrapper, CopiedWrapper)
            unit = wrapper._unit
            memo[id(unit)] = memo[id(wrapper._state_hooks)] = stale
            if unit.rule_casts is not None:
                memo[id(unit.rule_casts)] = stale

    def _record(self, memo: dict[Any, Any]) -> SavedUnit:
        module = self._copied_module(memo)
        saved = memo[id(self)] = saved_unit(
            self._unit,
            module,
            self._arguments,
            self._state_hooks.settings,
            tuple(self._forward_methods),
            memo,
        )
        return saved

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle this rank's shards and what it takes to be the same wrapper again in the same world.

        Every rank saves and loads its own: ``torch.save(model, f"model-{model.rank}.pt")``, later ``torch.load`` with
        ``weights_only=False`` once the process groups are there.  Collective: none.
        """
        memo: dict[Any, Any] = {SAVING: True}
        return _unpickled, (type(self), copy.deepcopy(self, memo))


def _unpickled(cls: type[CopiedWrapper], saved: SavedUnit) -> Any:
    """The outermost wrapper that was pickled as ``saved``."""
    made = _restored(cls, saved, {})
    start_root(made)
    return made


def _restored(
    cls: type[CopiedWrapper],
    saved: SavedUnit,
    known: dict[int, Any],
) -> Any:
    """The wrapper that ``saved`` is the record of, inner ones first, each once."""
    for table in _tables_below(saved.module):
        for name, child in table.items():
            if isinstance(child, SavedUnit):
                if id(child) not in known:
                    known[id(child)] = _restored(cls, child, known)
                table[name] = known[id(child)]
    unit, arguments = restore_unit(saved)
    made = wrap_child(cls, saved.module, unit, arguments)
    made._state_hooks.settings = saved.settings
    made.training = saved.training
    for name in saved.forward_methods:
        made.register_forward_method(name)
    return made


def _tables_below(module: nn.Module) -> list[dict[str, Any]]:
    """The child tables of ``module`` and of everything in it that no record holds."""
    tables: list[dict[str, Any]] = []
    todo: list[object] = [module]
    seen: set[nn.Module] = set()
    while todo:
        current = todo.pop()
        if isinstance(current, nn.Module) and current not in seen:
            seen.add(current)
            tables.append(_torch.child_table(current))
            todo.extend(_torch.child_table(current).values())
    return tables


_COPYING = "fsdp: the outermost wrapper that is being copied"
_STALE = "fsdp: what stands for units"


class _Stale:
    """Stands for units while their modules are copied, so that the copies of their hooks can be found and removed."""
