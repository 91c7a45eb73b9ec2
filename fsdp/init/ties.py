"""Ties between parameters of wrappers that were made one by one: the parameter moves to a unit around all its users.

With a policy the whole tree is planned at once and each tied parameter gets its owner (``flat/sharing.py``).  A wrapper
that was made earlier, by hand, owns what it found below itself.  When another module turns out to use one of its
parameters, it *gives it up*: its handles are built anew without it, and the parameter is whole again and *unclaimed*
until a wrapper is made around every module that uses it.  A forward before that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import ConfigError, describe, name_some
from ..flat.handle import FlatParamHandle
from ..flat.sharing import ManagedParam, Users
from ..names import join_names
from ..runtime.full_params import gather_flat
from ..runtime.guard import forget_left_behind, remember_left_behind
from ..runtime.unit import Unit, living_units

__all__ = ["Ties", "find_ties"]


@dataclass(frozen=True, slots=True)
class Ties:
    """What a new wrapper has to know of wrappers made earlier.

    Attributes:
        users: For each outermost wrapper below the new one, the unclaimed parameters it uses and where.
        elsewhere: Parameters that a wrapper uses which is not below the new one: to be left unclaimed.
        holders: Units below the new wrapper that use unclaimed parameters.
    """

    users: Mapping[nn.Module, Users] = field(default_factory=dict)
    elsewhere: Collection[nn.Parameter] = ()
    holders: Collection[Unit] = ()

    def settle(self) -> None:
        """Every parameter but those used elsewhere has an owner now.  Collective: none."""
        for unit in self.holders:
            unit.unclaimed = tuple(tie for tie in unit.unclaimed if tie.param in self.elsewhere)


def find_ties(
    module: nn.Module, inner: Mapping[nn.Module, Unit], is_wrapped: Callable[[nn.Module], bool]
) -> Ties:
    """Have earlier wrappers give up every parameter that ``module`` uses outside of them.

    Collective: every rank of the groups of the units that give something up.

    Args:
        module: What is about to be wrapped.
        inner: The outermost wrappers below it, each with its unit.
        is_wrapped: Whether a module is a wrapper.

    Raises:
        ConfigError: If one of these parameters has been used in its wrapper already; nothing has been changed then.
    """
    below = [unit for outer in inner.values() for unit in outer.root.units]
    outside = dict(_parameters_outside(module, "", is_wrapped))
    leaving: dict[Unit, list[tuple[ManagedParam, str]]] = {}
    owners = {
        managed.param: (unit, managed)
        for unit in living_units()
        for handle in unit.handles
        for managed in handle.params
    }
    for param, name in outside.items():
        if param in owners:
            unit, managed = owners[param]
            leaving.setdefault(unit, []).append((managed, name))
    for unit, ties in leaving.items():
        _check_unused(unit, ties)
    for unit, ties in leaving.items():
        _give_up(unit, [managed for managed, _ in ties])
    elsewhere = {
        tie.param for unit in living_units() if unit not in below for tie in unit.unclaimed
    }
    return Ties(
        {wrapper: _users(outer) for wrapper, outer in inner.items()},
        elsewhere,
        [unit for unit in below if unit.unclaimed],
    )


def _users(outer: Unit) -> Users:
    """The unclaimed parameters that units of one tree use, each site with its name in the tree."""
    return [
        (tie.param, site, join_names(unit.name, site.fqn))
        for unit in outer.root.units
        for tie in unit.unclaimed
        for site in tie.sites
    ]


def _parameters_outside(
    module: nn.Module, name: str, is_wrapped: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Parameter, str]]:
    """Parameters below ``module`` that are not below a wrapper, with their names."""
    if is_wrapped(module):
        return
    for param_name, param in module.named_parameters(recurse=False):
        yield param, join_names(name, param_name)
    for child_name, child in module.named_children():
        yield from _parameters_outside(child, join_names(name, child_name), is_wrapped)


def _check_unused(unit: Unit, ties: list[tuple[ManagedParam, str]]) -> None:
    grads = [param.grad for handle in unit.handles for param in handle.exposed]
    is_used = unit.root.started or any(grad is not None for grad in grads)
    if is_used or unit.summoned or any(managed.tensor_shard is not None for managed, _ in ties):
        names = [f"{join_names(unit.name, managed.fqn)} = {name}" for managed, name in ties]
        raise ConfigError(
            describe(
                f"parameters are tied to ones that an inner wrapper manages and has used already: {name_some(names)}",
                unit=unit.name,
                remedy="Make the outer wrapper before the first forward, or wrap the whole model in one call with "
                "auto_wrap_policy: it finds ties across units.",
            )
        )


def _give_up(unit: Unit, leaving: list[ManagedParam]) -> None:
    """Make ``leaving`` whole, unclaimed parameters, and build the unit's handles without them.

    Collective: every rank of the unit's shard group.
    """
    lost = {managed.param for managed in leaving}
    handles: list[FlatParamHandle] = []
    with torch.no_grad():
        for handle in unit.handles:
            if not any(managed.param in lost for managed in handle.params):
                handles.append(handle)
                continue
            (whole,) = gather_flat(unit, [handle.shard], [handle])
            replaced = handle.flat_param, handle.fqns[0]
            rest = handle.without(lost, whole)
            handles += [] if rest is None else [rest]
            if not handle.orig_mode:
                replaced[0].data = replaced[0].data[:0]
                remember_left_behind([replaced])
    forget_left_behind(lost)
    unit.unclaimed += tuple(leaving)
    unit.take_handles(handles)
