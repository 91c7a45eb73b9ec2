"""The hooks that users put on their parameters, which autograd never reaches: it computes with leaves.

Note [Hooks of parameters]
    ``param.register_hook(fn)`` runs on the gradient of the parameter's leaf: of the parameter's own shape, of this
    rank's data alone, before it is reduced, once a backward, and what ``fn`` returns takes the gradient's place.
    ``param.register_post_accumulate_grad_hook(fn)`` runs when the reduced gradient of this rank's piece is in place,
    so ``fn`` may step an optimizer and drop the gradient; not inside ``no_sync``, where nothing is published, and not
    on a rank that holds nothing of the parameter.
    In flat mode hooks of the first kind belong on the original parameters, before wrapping, and those of the second
    on the flat ones; the other combinations would never run, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from ..flat.handle import FlatParamHandle

__all__ = ["ParamHooks", "run_post_accumulate_hooks"]


class ParamHooks:
    """Runs users' gradient hooks of one unit's parameters on its leaves (see Note [Hooks of parameters])."""

    def __init__(self) -> None:
        self._handles: Sequence[FlatParamHandle] = ()
        self._watched: list[nn.Parameter] = []
        self._bridges: dict[nn.Parameter, Any] = {}

    def watch(self, handles: Sequence[FlatParamHandle]) -> None:
        """Look after the parameters of ``handles``, whose leaves may be new."""
        for bridge in self._bridges.values():
            bridge.remove()
        self._bridges = {}
        self._handles = handles
        self._watched = [managed.param for handle in handles for managed in handle.params]
        self._watched += [handle.flat_param for handle in handles if not handle.orig_mode]

    def follow(self) -> None:
        """Take over hooks registered since the last forward.

        Raises:
            UsageError: If one would never run; names the parameter.
        """
        if not _torch.any_hooks(self._watched):
            return
        for handle in self._handles:
            if not handle.orig_mode:
                _check_flat(handle)
            for managed, leaf in zip(handle.params, handle.unsharded.leaves, strict=True):
                param = managed.param
                if _torch.grad_hooks(param) and leaf.requires_grad and param not in self._bridges:
                    self._bridges[param] = leaf.register_hook(_Bridge(param))


class _Bridge:
    """A leaf's hook that runs whatever hooks the parameter has by then."""

    __slots__ = ("_param",)

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        for hook in _torch.grad_hooks(self._param):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad


def _check_flat(handle: FlatParamHandle) -> None:
    refused = {
        "register_hook on a flat parameter": _torch.grad_hooks(handle.flat_param),
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


@torch.no_grad()
def run_post_accumulate_hooks(handle: FlatParamHandle, used: Sequence[bool]) -> None:
    """Run them for the exposed parameters whose gradient was published just now.

    Args:
        handle: Whose parameters.
        used: For each exposed parameter whether it was.
    """
    exposed = handle.exposed
    if not _torch.any_hooks(exposed):
        return
    for param, is_used in zip(exposed, used, strict=True):
        for hook in _torch.post_accumulate_hooks(param) if is_used else ():
            if param.grad is not None:
                hook(param)
