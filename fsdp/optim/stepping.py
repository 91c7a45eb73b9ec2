"""The local optimizer at work: a whole step, or a step in parts, over what this rank owns.

Any optimizer can step a part of its parameters with any gradients: while its own ``step`` runs it is shown only these
parameters, and they show those gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .ownership import Ownership, Piece
from .shared_group import copy_settings

__all__ = ["LocalSteps", "copy_groups", "lent_grads", "narrowed"]

_Groups = Sequence[dict[str, Any]]


class LocalSteps:
    """Steps of the local optimizer with the settings users see.

    Settings are copied from the exposed groups before a step, which matters where a user replaced a whole group, and
    back after it, which shows what the optimizer wrote into its own.

    Args:
        optim: The local optimizer.
        ownership: What it holds of which parameter.
    """

    def __init__(self, optim: Optimizer, ownership: Ownership) -> None:
        self._optim = optim
        self._ownership = ownership

    def whole(
        self,
        groups: _Groups,
        before: Callable[[], None],
        closure: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Step everything with the parameters' gradients.

        Args:
            groups: The exposed groups.
            before: Runs once gradients are there: after the closure if there is one.
            closure: Passed to the local optimizer.
            kwargs: Passed to the local optimizer's ``step``.

        Returns:
            What the local optimizer returned.
        """
        pieces = self._ownership.pieces([param for group in groups for param in group["params"]])

        def prepare() -> None:
            before()
            copy_groups(groups, self._optim.param_groups)
            for piece in pieces:
                piece.lend_grad()

        with _released(pieces):
            if closure is None:
                prepare()
                loss = self._optim.step(**kwargs)
            elif callable(closure):
                loss = self._optim.step(closure=_and_then(closure, prepare), **kwargs)
            else:  # whatever it is, it is the local optimizer's business
                prepare()
                loss = self._optim.step(closure=closure, **kwargs)
        copy_groups(self._optim.param_groups, groups)
        return loss

    def part(
        self,
        groups: _Groups,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """Step ``params`` with ``grads`` in place of their own gradients.

        What the local optimizer writes into its groups is shown by :meth:`finish_parts`, so that all parts of one step
        begin with the same settings.
        """
        pieces = self._ownership.pieces(params)
        if not pieces:
            return
        copy_groups(groups, self._optim.param_groups)
        chosen = {piece.tensor for piece in pieces}
        with lent_grads(params, grads), narrowed(self._optim, chosen), _released(pieces):
            for piece in pieces:
                piece.lend_grad()
            self._optim.step()

    def finish_parts(self, groups: _Groups) -> None:
        """End a step made of parts."""
        copy_groups(self._optim.param_groups, groups)


def copy_groups(sources: Sequence[Mapping[str, Any]], targets: _Groups) -> None:
    """Copy all settings, group by group."""
    for source, target in zip(sources, targets, strict=True):
        copy_settings(source, target)


@contextlib.contextmanager
def lent_grads(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """Give parameters other gradients for a while."""
    before = [param.grad for param in params]
    try:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextlib.contextmanager
def narrowed(optim: Optimizer, chosen: set[torch.Tensor]) -> Iterator[None]:
    """Let an optimizer see only some of its parameters."""
    before = [group["params"] for group in optim.param_groups]
    try:
        for group, params in zip(optim.param_groups, before, strict=True):
            group["params"] = [param for param in params if param in chosen]
        yield
    finally:
        for group, params in zip(optim.param_groups, before, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _released(pieces: Sequence[Piece]) -> Iterator[None]:
    """Have pieces let go of the gradients that were lent to them."""
    try:
        yield
    finally:
        for piece in pieces:
            piece.release_grad()


def _and_then(closure: Callable[[], Any], finish: Callable[[], None]) -> Callable[[], Any]:
    """``closure``, followed by ``finish``; returns the closure's loss."""

    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        finish()
        return loss

    return run
