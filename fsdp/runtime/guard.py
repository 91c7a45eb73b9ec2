"""Mistakes that would otherwise train nothing, found when an optimizer steps for the first time.

Note [Left behind]
    With ``use_orig_params=False`` the module's own parameters are replaced by flat ones.  An optimizer that was built
    before wrapping still holds the old, now empty parameters and would step without effect or error.  Wrapping
    therefore remembers them (weakly, by identity) and a hook that torch runs before every optimizer step looks them
    up, once an optimizer.

Note [Whole parameters wanted]
    An optimizer that looks at rows, norms or all parameters at once computes something else on shards, without an error
    of its own.  It is known by its class's name.  One warning an optimizer, since some train with Adafactor on shards
    on purpose; L-BFGS, whose ranks would search along directions of their own, is refused.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import FsdpWarning, UsageError, describe
from ..flat.parameter import FlatParameter
from ..flat.tensor_parallel import is_distributed

if TYPE_CHECKING:
    from .unit import Unit

__all__ = [
    "NEEDS_ALL_PARAMETERS",
    "NOT_ELEMENTWISE",
    "check_not_overlapped",
    "forget_left_behind",
    "remember_accumulating",
    "remember_hidden",
    "remember_left_behind",
]

# Optimizers whose update of one element depends on others, by a part of their class's name.
NOT_ELEMENTWISE = (
    "adafactor", "adalomo", "came", "galore", "kfac", "lamb", "lars", "lbfgs", "muon", "scion", "shampoo", "soap",
    "sparseadam",
)  # fmt: skip
NEEDS_ALL_PARAMETERS = ("lbfgs",)


class _LeftBehind:
    """Parameters that flat ones have replaced, with their names."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._installed = False

    def add(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        """Remember parameters for as long as anybody else does."""
        self.install()
        for param, name in params:
            self._names[id(param)] = (weakref.ref(param, partial(self._forget, id(param))), name)

    def forget(self, params: Iterable[nn.Parameter]) -> None:
        """Optimizers may hold ``params`` again."""
        for param in params:
            self._names.pop(id(param), None)

    def install(self) -> None:
        """Have torch call :meth:`_check` before every optimizer step."""
        if not self._installed:
            self._installed = True
            register_optimizer_step_pre_hook(self._check)

    def _forget(self, key: int, _: weakref.ref[nn.Parameter]) -> None:
        self._names.pop(key, None)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _accumulating:
            _check_reduced(optimizer)
        if _hidden:
            _check_shown(optimizer)
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        _check_elementwise(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                found = self._names.get(id(param))
                if (
                    found is not None
                    and found[0]() is param
                    and (not cast("nn.Parameter", param).numel() or is_distributed(param))
                ):
                    raise UsageError(
                        describe(
                            "the optimizer holds a parameter from before wrapping, which a flat parameter has "
                            "replaced: it would train nothing",
                            fqn=found[1],
                            remedy="Build the optimizer from model.parameters() after wrapping, or wrap with "
                            "use_orig_params=True.",
                        ),
                        fqn=found[1],
                    )


_left_behind = _LeftBehind()
_accumulating: weakref.WeakSet[Unit] = weakref.WeakSet()
_hidden: weakref.WeakSet[Unit] = weakref.WeakSet()


def _check_reduced(optimizer: torch.optim.Optimizer) -> None:
    for unit in list(_accumulating):
        if not unit.accumulating:
            _accumulating.discard(unit)
            continue
        if _steps(optimizer, unit):
            raise UsageError(
                describe(
                    "the optimizer steps while gradients of no_sync backwards are still unreduced",
                    unit=unit.name,
                    remedy="Run the last backward of the accumulation outside no_sync, or zero the gradients.",
                ),
                unit=unit.name,
            )


def _check_shown(optimizer: torch.optim.Optimizer) -> None:
    for unit in list(_hidden):
        if _steps(optimizer, unit):
            raise UsageError(
                describe(
                    "the optimizer steps inside summon_full_params, where gradients are not shown: it would do nothing",
                    unit=unit.name,
                    remedy="Step outside the context.",
                ),
                unit=unit.name,
            )


def _steps(optimizer: torch.optim.Optimizer, unit: Unit) -> bool:
    ours = {id(param) for handle in unit.handles for param in handle.exposed}
    return any(id(param) in ours for group in optimizer.param_groups for param in group["params"])


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """See Note [Whole parameters wanted]."""
    names = [base.__name__.lower() for base in type(optimizer).__mro__]
    known = [part for part in NOT_ELEMENTWISE if any(part in name for name in names)]
    if not known:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    name = type(optimizer).__name__
    if known[0] in NEEDS_ALL_PARAMETERS:
        if any(_is_part(param) for param in params):
            raise UsageError(
                describe(
                    f"{name} looks at all parameters at once, and steps on shards: every rank would go another way",
                    remedy="Use ShardingStrategy.NO_SHARD, or another optimizer.",
                )
            )
    elif any(isinstance(param, FlatParameter) or _is_part(param) for param in params):
        warnings.warn(
            f"{name} looks at more than single elements of a parameter, and steps on shards: the result is not that "
            f"of unsharded training. Use fsdp.optim.WholeParamOptimizer(model, {name}, ...).",
            FsdpWarning,
            stacklevel=5,
        )


def _is_part(param: torch.Tensor) -> bool:
    """Whether ``param`` is a rank's part of one parameter, or of several."""
    if isinstance(param, FlatParameter):
        return param.numel() != param._padded_unsharded_size.numel()  # noqa: SLF001 the reference's name
    return getattr(param, "fsdp_shape", param.shape) != param.shape


def remember_hidden(unit: Unit, *, hidden: bool) -> None:
    """Have optimizers refuse to step, or not any more, while ``unit`` does not show the gradients that it has."""
    if hidden:
        _hidden.add(unit)
        _left_behind.install()
    else:
        _hidden.discard(unit)


def remember_accumulating(unit: Unit) -> None:
    """Have optimizers refuse to step while ``unit`` holds gradients that ``no_sync`` left unreduced."""
    _accumulating.add(unit)
    _left_behind.install()


def remember_left_behind(params: Iterable[tuple[nn.Parameter, str]]) -> None:
    """Have every optimizer that holds one of ``params`` refuse its first step (see Note [Left behind])."""
    _left_behind.add(params)


def forget_left_behind(params: Iterable[nn.Parameter]) -> None:
    """Let optimizers hold ``params`` again: no flat parameter has their place any more."""
    _left_behind.forget(params)


def check_not_overlapped(units: Iterable[Unit]) -> None:
    """Refuse optimizers that torch's ``_apply_optimizer_in_backward`` has left on parameters for the wrapper to run.

    Collective: none.

    Raises:
        UsageError: If there are any: nothing would step these parameters.
    """
    for unit in units:
        for handle in unit.handles:
            for param, fqn in zip(handle.exposed, handle.fqns, strict=False):
                if getattr(param, "_in_backward_optimizers", None):
                    raise UsageError(
                        describe(
                            "a parameter carries `_in_backward_optimizers`, which torch's wrapper steps (they are only "
                            "supported with use_orig_params=True there) and this one does not",
                            unit=unit.name,
                            fqn=fqn,
                            remedy="Use fsdp.optim.apply_optimizer_in_backward.",
                        ),
                        unit=unit.name,
                        fqn=fqn,
                    )
