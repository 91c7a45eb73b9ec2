"""An optimizer seen by the names of the original parameters: which state it keeps here, of what, in which form."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from ..errors import UsageError, describe
from ..names import clean_tensor_name
from ..runtime.held import Held

__all__ = ["Form", "KeyedByName", "LocalKey", "OptimizerView", "copy_of", "view_of"]

_NOT_OPTIONS = frozenset({"params", "param_names"})


class Form(Enum):
    """What an elementwise state tensor holds of its parameters on this rank.

    Members:
        FLAT: This rank's shard of a flat parameter, in which several original ones lie.
        PIECE: This rank's piece of one original parameter.
        WHOLE: One original parameter, all of it: nothing is sharded, or this rank is its owner.
    """

    FLAT = auto()
    PIECE = auto()
    WHOLE = auto()


@runtime_checkable
class KeyedByName(Protocol):
    """An optimizer that knows the names of original parameters itself, and may own whole ones."""

    param_groups: list[dict[str, Any]]

    def group_names(self) -> list[list[str]]:
        """Names of the original parameters in each group."""

    def whole_names(self) -> Mapping[str, bool]:
        """Those it steps whole, and whether this rank is the owner."""

    def state_by_name(self) -> Mapping[str, Mapping[str, Any]]:
        """What this rank keeps of each: whole, or of this rank's piece."""


@dataclass(frozen=True, eq=False, slots=True)
class LocalKey:
    """One entry of the optimizer's own state.

    Attributes:
        name: What the optimizer's state dict calls it: a number, or a name.
        items: The original parameters it covers.
        form: What its elementwise tensors hold of them.
        shape: Shape of these tensors on this rank; None where any shape is allowed.
    """

    name: int | str
    items: tuple[Held, ...]
    form: Form
    shape: torch.Size | None


@dataclass(frozen=True, eq=False, slots=True)
class OptimizerView:
    """The optimizer on this rank.

    Attributes:
        keys: The entries its state may have here.
        state: The entries it has.
        groups: Its parameter groups without the parameters: copies of the hyper-parameters.
        group_keys: For each group, what its state dict calls its parameters, in order.
        group_names: For each group, the names of its original parameters.
        wholes: Names of the parameters that one rank steps whole for all.
        optimizer: Itself; None where only parameters were given.
    """

    keys: tuple[LocalKey, ...]
    state: Mapping[int | str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    group_keys: list[list[int | str]]
    group_names: list[list[str]]
    wholes: frozenset[str]
    optimizer: torch.optim.Optimizer | None


def view_of(
    model: nn.Module,
    held: Sequence[Held],
    source: torch.optim.Optimizer | Iterable[Any],
    state_dict: Mapping[str, Any] | None = None,
) -> OptimizerView:
    """See an optimizer, or what one would be built from, by original names.

    Collective: none.

    Args:
        model: A wrapper, or a module that contains some.
        held: The model's parameters.
        source: The optimizer, or its parameters (or groups of them).
        state_dict: Its state dict, if it is not ``optimizer.state_dict()``.

    Raises:
        UsageError: If it holds parameters that the model does not have.
    """
    if isinstance(source, KeyedByName):
        return _view_by_name(held, source)
    optimizer = None
    if isinstance(source, torch.optim.Optimizer):
        optimizer, groups = source, source.param_groups
    else:
        groups = _groups_from(source)
    by_key: dict[nn.Parameter, list[Held]] = {}
    for item in held:
        by_key.setdefault(item.key, []).append(item)
    _check_known(groups, by_key)
    numbers: dict[nn.Parameter, int] = {}
    for group in groups:
        for param in group["params"]:
            numbers.setdefault(param, len(numbers))
    names = [
        [item.fqn for item in _in_users_order(model, held, group["params"], by_key)]
        for group in groups
    ]
    options = groups if state_dict is None else state_dict.get("param_groups", groups)
    return OptimizerView(
        tuple(_local_key(number, by_key[param]) for param, number in numbers.items()),
        _state_of(optimizer, numbers, held, state_dict),
        [_options(group) for group in options],
        [[numbers[param] for param in group["params"]] for group in groups],
        names,
        frozenset(),
        optimizer,
    )


def _in_users_order(
    model: nn.Module,
    held: Sequence[Held],
    params: Sequence[nn.Parameter],
    by_key: Mapping[nn.Parameter, Sequence[Held]],
) -> list[Held]:
    """The original parameters of a group in the order that an optimizer of the unwrapped model has them in.

    Flat parameters come in another order than what lies in them.  A stretch of ``params`` that goes forward through
    ``model.parameters()`` stands for the same stretch of the unwrapped model, so ``a.parameters()`` after
    ``b.parameters()`` stays after it.
    """
    if all(len(by_key[param]) == 1 for param in params):
        return [item for param in params for item in by_key[param]]
    exposed = {param: number for number, param in enumerate(model.parameters())}
    place = {item: number for number, item in enumerate(held)}
    stretches: list[list[Held]] = [[]]
    last = -1
    for param in params:
        number = exposed.get(param, last)
        if number < last:
            stretches.append([])
        stretches[-1].extend(by_key[param])
        last = number
    return [item for stretch in stretches for item in sorted(stretch, key=place.__getitem__)]


def _local_key(number: int, items: Sequence[Held]) -> LocalKey:
    first = items[0]
    if first.handle is None:
        return LocalKey(number, tuple(items), Form.WHOLE, None)
    form = Form.PIECE if first.handle.orig_mode else Form.FLAT
    return LocalKey(number, tuple(items), form, first.key.shape)


def _view_by_name(held: Sequence[Held], optimizer: KeyedByName) -> OptimizerView:
    items = {item.fqn: item for item in held}
    wholes = optimizer.whole_names()
    names = optimizer.group_names()
    keys = []
    for fqn in (fqn for group in names for fqn in group):
        item = items[fqn]
        if item.handle is None or wholes.get(fqn, False):
            keys.append(LocalKey(fqn, (item,), Form.WHOLE, None))
        elif fqn not in wholes:
            piece = item.handle.pieces[item.index].in_slot.numel
            shape = item.key.shape if item.handle.orig_mode else torch.Size((piece,))
            keys.append(LocalKey(fqn, (item,), Form.PIECE, shape))
    return OptimizerView(
        tuple(keys),
        cast("Mapping[int | str, Mapping[str, Any]]", optimizer.state_by_name()),
        [_options(group) for group in optimizer.param_groups],
        [list(group) for group in names],
        names,
        frozenset(wholes),
        cast("torch.optim.Optimizer", optimizer),
    )


def _groups_from(source: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(source)
    if any(isinstance(entry, Mapping) for entry in listed):
        return [{**entry, "params": _params_in(entry["params"])} for entry in listed]
    return [{"params": _params_in(listed)}]


def _params_in(source: Any) -> list[nn.Parameter]:
    listed: list[Any] = [source] if isinstance(source, torch.Tensor) else list(source)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in listed]


def _check_known(groups: Sequence[Mapping[str, Any]], known: Mapping[nn.Parameter, Any]) -> None:
    for number, group in enumerate(groups):
        strange = [at for at, param in enumerate(group["params"]) if param not in known]
        if not strange:
            continue
        param_names = group.get("param_names")
        raise UsageError(
            describe(
                f"the optimizer holds {len(strange)} parameters in group {number} that the model does not have; the "
                f"first is number {strange[0]} there, of shape {tuple(group['params'][strange[0]].shape)}",
                fqn=param_names[strange[0]] if param_names else None,
                remedy="Give the model this optimizer trains; build the optimizer from model.parameters() after "
                "wrapping, or wrap with use_orig_params=True.",
            )
        )


def _state_of(
    optimizer: torch.optim.Optimizer | None,
    numbers: Mapping[nn.Parameter, int],
    held: Sequence[Held],
    state_dict: Mapping[str, Any] | None,
) -> Mapping[int | str, Mapping[str, Any]]:
    if state_dict is None:
        state = {} if optimizer is None else optimizer.state
        return {
            numbers[cast("nn.Parameter", param)]: values
            for param, values in state.items()
            if param in numbers
        }
    found: dict[int | str, Mapping[str, Any]] = {}
    by_name = {clean_tensor_name(item.fqn): numbers.get(item.key) for item in held}
    for key, values in state_dict["state"].items():
        number = key if isinstance(key, int) else by_name.get(clean_tensor_name(key))
        if number is None:
            raise UsageError(
                describe(
                    "optim_state_dict has state of a parameter that the optimizer does not hold",
                    fqn=key,
                    remedy="Give the optimizer's own state dict.",
                ),
                fqn=key,
            )
        found[number] = values
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy_of(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def copy_of(value: Any) -> Any:
    """``value``, sharing no memory with it.  Collective: none."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
