"""Where a backward may enter a unit: the outputs of its forward, and whatever else of it a user can get hold of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._pytree import iter_tensors
from ..flat.handle import FlatParamHandle

__all__ = ["Entrances"]

_LONGEST_KEPT = 256
_ATTRIBUTES_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class Entrances:
    """Hooks the graph nodes at which a backward may begin to need a unit's parameters.

    Args:
        module: The unit's module.
        modules: The modules that belong to the unit, ``module`` among them.
        reached: Called by a backward that comes to an output; with ``inside=True`` if it is another tensor.
        after_inside: A forward hook that gives :meth:`hook_inside` what passes; a method of the unit, since that is
            how copies of a module are rid of the unit's hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        reached: Callable[..., None],
        after_inside: Callable[..., None],
    ) -> None:
        self._module = module
        self._modules = modules
        self._reached = reached
        self._after_inside = after_inside
        self._hook_tables = [_torch.forward_hook_table(module) for module in modules]
        self._forward_hooks_seen = 0
        self._watched_inside: set[nn.Module] = set()
        self._shown: set[tuple[nn.Module, str]] = set()
        # torch's own modules have settings as attributes and never set them in a forward.
        self._settings = {m: frozenset(vars(m)) for m in modules if _is_torchs_own(m)}
        self._find_attributes()

    def leave_out(self, handles: Iterable[FlatParamHandle]) -> None:
        """Do not take the parameters of ``handles`` for tensors that a forward has left on a module."""
        sites = [site for handle in handles for param in handle.params for site in param.sites]
        self._shown = {(site.module, site.name) for site in sites}
        self._find_attributes()

    def hook_outputs(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Hook each of ``outputs`` and what the forward left on modules; whether there is any to hook.

        The hooks sit on graph nodes: they fire whichever output of a node the gradient comes through, and a view
        is hooked at its base as well, because writing into the view in place replaces the view's own node.
        Hooks that module code has put on an output run before those on its node, and may run backwards of their own
        (deep equilibrium models do): then ours is put before them, too.
        """
        found = False
        for tensor in (*outputs, *self._kept_on_modules()):
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(self._reached)
                found = True
                if _torch.hooks_of(tensor):
                    _torch.hook_first(tensor, self._reached)
                if _torch.is_view(tensor):
                    base = _torch.view_base(tensor)
                    if base is not None and base.grad_fn is not None:
                        base.grad_fn.register_prehook(self._reached)
        return found

    def hook_what_inputs_hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook what lists and dictionaries among the inputs hold, which the forward may have put there."""
        for values in (args, kwargs.values()) if kwargs else (args,):
            for value in values:
                if type(value) is list or type(value) is dict:
                    self.hook_inside(value)

    def follow_user_hooks(self) -> None:
        """Hook what users' forward hooks inside the unit see: they may keep it, and a backward may start there."""
        if sum(map(len, self._hook_tables)) == self._forward_hooks_seen:
            return
        for module, hooks in zip(self._modules, self._hook_tables, strict=True):
            is_new = module is not self._module and module not in self._watched_inside
            if is_new and hooks:
                self._watched_inside.add(module)
                module.register_forward_hook(self._after_inside)
        self._forward_hooks_seen = sum(map(len, self._hook_tables))

    def hook_inside(self, tree: Any) -> None:
        """Hook every tensor in ``tree``, which is no output of the unit."""
        for tensor in iter_tensors(tree):
            if tensor.grad_fn is not None:
                # A partial is no Python frame: the root finds by its callers which backward this is.
                tensor.grad_fn.register_prehook(partial(self._reached, inside=True))

    def _kept_on_modules(self) -> list[torch.Tensor]:
        """Tensors that the forward left on the unit's modules (an auxiliary loss, say)."""
        if sum(map(len, self._tables)) != self._table_sizes:
            self._find_attributes()
        places = self._attributes
        for place in self._plain:
            if place[0].get(place[1]) is not place[2]:
                places = [*places, place]
        kept: list[torch.Tensor] = []
        for table, name, _ in places:
            kept += [t for t in _tensors_of(table.get(name)) if t.grad_fn is not None]
        return kept

    def _find_attributes(self) -> None:
        """Where the unit's modules keep attributes of their own, which a forward might set to tensors.

        Apart from those whose present values, a number say, hold none.
        """
        found = [
            (vars(module), name, value)
            for module in self._modules
            for name, value in vars(module).items()
            if name not in self._settings.get(module, _ATTRIBUTES_OF_ALL_MODULES)
            and (module, name) not in self._shown
        ]
        self._attributes = [place for place in found if _may_hold(place[2])]
        self._plain = [place for place in found if not _may_hold(place[2])]
        self._tables = [vars(module) for module in self._modules]
        self._table_sizes = sum(map(len, self._tables))


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _may_hold(value: Any) -> bool:
    """Whether ``value`` is, or might come to hold, what :func:`_tensors_of` finds."""
    return isinstance(value, torch.Tensor) or type(value) in (list, tuple, dict)


def _tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """A tensor, or those in a short list, tuple or dictionary; longer ones hold something else than intermediates."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) in (list, tuple, dict) and 0 < len(value) <= _LONGEST_KEPT:
        return iter_tensors(value)
    return ()
