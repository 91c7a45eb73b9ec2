"""The hooks that users put on their parameters, which autograd never reaches: it computes with leaves.

Note [Hooks of parameters]
    ``param.register_hook(fn)`` runs on the gradient of the parameter's leaf: of the parameter's own shape, of this
    rank's data alone, before it is reduced, once a backward, and what ``fn`` returns takes the gradient's place.
    ``param.register_post_accumulate_grad_hook(fn)`` runs when the reduced gradient of this rank's piece is in place,
    so ``fn`` may step an optimizer and drop the gradient; not inside ``no_sync``, where nothing is published, and not
    on a rank that holds nothing of the parameter.
    In flat mode hooks of the first kind belong on the original parameters, before wrapping, and those of the second
    on the flat ones; the other combinations would never run, and are refused by the next forward.
    Whole parameters (``summon_full_params``) may get hooks later, too.

Note [Gradients past the leaves]
    A gradient reaches a sharded parameter itself only if somebody computed with it outside its unit's forward: with
    this rank's piece, that is, and nobody would reduce the gradient.  An own hook of ours on each such parameter
    notices it (see ``runtime.past_leaves``).  What is done to the whole parameters under ``summon_full_params``
    passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from ..flat.handle import FlatParamHandle
from .past_leaves import note_past_leaf

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["ParamHooks", "run_post_accumulate_hooks"]


class ParamHooks:
    """Runs users' gradient hooks of one unit's parameters on its leaves (see Note [Hooks of parameters])."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        self._handles: Sequence[FlatParamHandle] = ()
        self._watched: list[nn.Parameter] = []
        self._hook_tables: list[Mapping[int, Any]] = []
        self._hookless: list[nn.Parameter] = []
        self._looked = False
        self._bridges: dict[nn.Parameter, Any] = {}
        self._refusals: list[Any] = []

    def watch(self, handles: Sequence[FlatParamHandle], *, reduced: bool) -> None:
        """Look after the parameters of ``handles``, whose leaves may be new.

        Args:
            handles: Of one unit.
            reduced: Whether other ranks have gradients of them.
        """
        for hook in (*self._bridges.values(), *self._refusals):
            hook.remove()
        self._bridges = {}
        self._refusals = [
            param.register_hook(_Refusal(self._unit, handle, index))
            for handle in handles
            for index, param in enumerate(handle.exposed)
            if reduced and param.requires_grad
        ]
        self._handles = handles
        self._watched = [param for handle in handles for param in handle.exposed]
        tables = list(map(_torch.hooks_of, self._watched))
        self._hook_tables = [table for table in tables if table is not None]
        pairs = zip(self._watched, tables, strict=True)
        self._hookless = [param for param, table in pairs if table is None]
        self._looked = False

    def look_again(self) -> None:
        """Hooks may be on parameters that flat mode has replaced, which nobody looks at in every forward."""
        self._looked = False

    def follow(self) -> None:
        """Take over hooks registered since the last forward.

        Raises:
            UsageError: If one would never run; names the parameter.
        """
        if (
            self._looked
            and sum(map(len, self._hook_tables)) <= len(self._refusals)
            and not any(map(_torch.hooks_of, self._hookless))
            and not _torch.any_post_accumulate_hooks(self._watched)
        ):
            return
        self._looked = True  # at those that flat mode has replaced, too, which had theirs before
        for handle in self._handles:
            if not handle.orig_mode:
                _check_flat(handle)
            for managed, leaf in zip(handle.params, handle.unsharded.leaves, strict=True):
                param = managed.param
                if _users_hooks(param) and leaf.requires_grad and param not in self._bridges:
                    self._bridges[param] = leaf.register_hook(_Bridge(param))


class _Bridge:
    """A leaf's hook that runs whatever hooks the parameter has by then."""

    __slots__ = ("_param",)

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        for hook in _users_hooks(self._param):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad


class _Refusal:
    """Our own hook on an exposed parameter (see Note [Gradients past the leaves])."""

    __slots__ = ("_handle", "_index", "_unit")

    def __init__(self, unit: weakref.ref[Unit], handle: FlatParamHandle, index: int) -> None:
        # Weakly, because the garbage collector does not look into a tensor's hooks.
        self._unit = unit
        self._handle = weakref.ref(handle)
        self._index = index

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        unit, handle = self._unit(), self._handle()
        if unit is None or handle is None or handle.shows_full:
            return None
        note_past_leaf(unit, handle.fqns[self._index], grad)
        return torch.zeros_like(grad)


def _users_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    return [hook for hook in _torch.grad_hooks(param) if not isinstance(hook, _Refusal)]


def _check_flat(handle: FlatParamHandle) -> None:
    refused = {
        "register_hook on a flat parameter": _users_hooks(handle.flat_param),
        "register_post_accumulate_grad_hook on a parameter that a flat one has replaced": [
            hook
            for managed in handle.params
            for hook in _torch.post_accumulate_hooks(managed.param)
        ],
    }
    for what, hooks in refused.items():
        if hooks:
            raise UsageError(
                describe(
                    f"the hook of {what} would never run",
                    fqn=handle.fqns[0],
                    remedy="Wrap with use_orig_params=True, and register it on the model's own parameters.",
                ),
                fqn=handle.fqns[0],
            )


def run_post_accumulate_hooks(handle: FlatParamHandle, used: Sequence[bool]) -> None:
    """Run them for the exposed parameters whose gradient was published just now.

    Args:
        handle: Whose parameters.
        used: For each exposed parameter whether it was.
    """
    with torch.no_grad():
        for param, is_used in zip(handle.exposed, used, strict=True):
            for hook in _torch.post_accumulate_hooks(param) if is_used else ():
                if param.grad is not None:
                    hook(param)
