"""Gradients that came to sharded parameters themselves, past the leaves that module code computes with.

Somebody has computed with a parameter outside its unit's forward: with this rank's piece, and nobody would reduce the
gradient.  Zeros do no harm (``loss + 0 * sum(p.sum() for p in model.parameters())``), anything else is an error.  A
rank whose piece is empty, or whose weights are zero, has zeros all the same, so the ranks ask each other.  They do so
when the backward has ended: one that raised in the middle of it would leave the others waiting in its collectives, and
the parameters' gradients half done.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .. import _torch
from ..errors import ShardedParameterError, describe

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit

__all__ = ["note_past_leaf"]


def note_past_leaf(unit: Unit, fqn: str, grad: torch.Tensor) -> None:
    """In the running backward the gradient ``grad`` has come to the sharded parameter ``fqn`` of ``unit`` itself.

    Collective: at the end of the backward, every rank of the tree.
    """
    root, task = unit.root, _torch.backward_task()
    found = _running.get(root)
    if found is None or found.task != task:
        found = _running[root] = _PastLeaves(task)
        _torch.queue_end_of_backward(_Settling(root, found))
    found.names.append(fqn)
    found.any_nonzero.append(grad.any())


class _PastLeaves:
    """What came in one backward: the names of the parameters, and for each whether any element was not zero."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.names: list[str] = []
        self.any_nonzero: list[torch.Tensor] = []


_running: weakref.WeakKeyDictionary[Root, _PastLeaves] = weakref.WeakKeyDictionary()


class _Settling:
    """Runs at the end of the backward, after the root's own end."""

    def __init__(self, root: Root, found: _PastLeaves) -> None:
        self._root = root
        self._found = found
        self._waited = False

    @torch.no_grad()
    def __call__(self) -> None:
        if self._root.backward_running and not self._waited:
            self._waited = True
            _torch.queue_end_of_backward(self)
            return
        root, found = self._root, self._found
        _running.pop(root, None)
        names = [fqn for unit in root.units for handle in unit.handles for fqn in handle.fqns]
        tree = max(root.units, key=lambda unit: unit.world_size)
        places = torch.tensor([1 + names.index(name) for name in found.names])
        device = tree.config.device
        refused = torch.stack(found.any_nonzero).to(device) * places.to(device)
        first = [refused.max().view(1)]
        if not root.lockstep.on:  # ranks may run different programs then
            tree.shard.all_reduce(first, op="max").wait()
            tree.replicate.all_reduce(first, op="max").wait()
        place = int(first[0])
        if place:
            raise _refusal(names[place - 1])


def _refusal(fqn: str) -> ShardedParameterError:
    return ShardedParameterError(
        describe(
            "a gradient reached a sharded parameter itself: it was computed with outside its module's forward, where "
            "it is this rank's piece, and the gradient would not be reduced",
            fqn=fqn,
            remedy="Compute inside the forward of the module that owns it. For a penalty on the parameters use the "
            "optimizer's weight_decay, or add its gradient to `.grad` under torch.no_grad() after backward; whole "
            "parameters are there inside `with FSDP.summon_full_params(model):`.",
        ),
        fqn=fqn,
    )
