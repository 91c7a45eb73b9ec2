"""The modules of a wrapped model, and what becomes of those that are put into it after wrapping.

Note [Changes of the tree]
    A module or parameter that is added to a wrapped model belongs to no unit: its gradients would stay on their rank,
    and ranks would drift apart in silence.  torch tells of every registration of a module or parameter in the process;
    one dictionary lookup finds out whether it was in a wrapped model, and marks that model as changed.  The next
    forward of a marked one walks its modules, before anything is communicated:

    ======================================================  ===================================================
    what it finds                                           what it does
    ======================================================  ===================================================
    a trainable parameter that nobody averages              an error, with more than one rank; before the first
                                                            forward a warning: it was taken out for the wrapping
                                                            and put back, as tests of the reference do, and is
                                                            from now on an ignored one
    a frozen one                                            from now on each forward looks whether it is thawed
    a parameter that a unit manages, at a second place      an error: it would be used as a piece
    a wrapper                                               its units join the tree
    anything below a module that was ignored at wrapping    nothing: it is ignored too
    ======================================================  ===================================================

    A model that nobody changes is not looked at.  What is put in past registration, as ``nn.ModuleList.insert`` does,
    is found when something else is registered.  A new parameter in the place of one that a unit manages is no change
    of the tree (see ``FlatParamHandle.adopt_changes``), and a module that is taken out leaves its parameters to their
    unit, unused.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .. import _torch
from ..errors import FsdpWarning, UsageError, describe, name_some
from ..names import FSDP_WRAPPED_MODULE, join_names
from .held import unit_of, units_in

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit

__all__ = ["Tree"]


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """A module in the tree.

    Attributes:
        module: The module.
        name: Its name in the unwrapped model.
        unit: The innermost unit around it.
        left_alone: Whether it is below a module that was ignored at wrapping, and in no unit inside of that.
    """

    module: nn.Module
    name: str
    unit: Unit
    left_alone: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Stranger:
    """A parameter that no unit manages and that was not there at wrapping."""

    module: weakref.ref[nn.Module]
    name: str
    fqn: str
    unit: Unit

    @property
    def param(self) -> Any:
        """The parameter; None if it is no longer there."""
        module = self.module()
        return None if module is None else _torch.parameter_table(module).get(self.name)

    @property
    def is_trained(self) -> bool:
        """Whether it is still there and wants gradients."""
        param = self.param
        return param is not None and bool(param.requires_grad)


class Tree:
    """What a root knows of the modules below it (see Note [Changes of the tree]).

    Args:
        root: Of the units of the tree; not kept alive.
        top: The outermost wrapper; not kept alive.
    """

    def __init__(self, root: Root, top: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._top = weakref.ref(top)
        self._changed = False
        self._strangers: tuple[_Stranger, ...] = ()
        self._ignored_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._ignored_params: set[nn.Parameter] = set()
        self._watched: set[int] = set()
        self._self = weakref.ref(self, functools.partial(_forget, self._watched))
        _watch_registrations()
        known = _Known(root.units)
        for place in self._places(root, top):
            if place.module in known.modules:
                self._ignored_params.update(param for _, param in known.others(place.module))
            elif FSDP_WRAPPED_MODULE not in _torch.child_table(place.module):
                self._ignored_modules.add(place.module)

    def mark(self) -> None:
        """Something was registered: have the next forward look.  Collective: none."""
        root = self._root()
        self._changed = True
        if root is not None:
            root.changed = True

    def follow(self, *, before_first_forward: bool = False) -> bool:
        """Look at what was put into the tree; whether the next forward has to look again, marked or not.

        Collective: none; every rank changes its model in the same way.

        Args:
            before_first_forward: Whether the first forward of the model is about to begin.

        Raises:
            UsageError: If ranks would not agree on a parameter, or a wrapper belongs to another model.
        """
        root, top = self._root(), self._top()
        if root is None or top is None:
            return False
        if self._changed:
            self._let_wrappers_join(root, top)
            for unit in root.units:
                for handle in unit.handles:
                    handle.follow_registrations()
            self._strangers = tuple(self._find_strangers(root, top))
        refused = [stranger for stranger in self._strangers if stranger.is_trained]
        if refused and before_first_forward:
            warnings.warn(str(_added(refused)), FsdpWarning, stacklevel=2)
            self._ignored_params.update(stranger.param for stranger in refused)
            self._strangers = tuple(s for s in self._strangers if s not in refused)
            refused = []
        self._changed = bool(refused)  # until it is taken out again, which nothing tells
        if refused:
            raise _added(refused)
        return bool(self._strangers)

    # -- private ---------------------------------------------------------------------------------------------------

    def _places(self, root: Root, top: nn.Module) -> list[_Place]:
        """Every module once, in the order of ``modules()``; from now on registrations in it are noticed."""
        found: dict[nn.Module, _Place] = {}
        todo = [_Place(top, "", root.units[0], left_alone=False)]
        while todo:
            place = todo.pop()
            if place.module in found:
                continue
            found[place.module] = place
            self._watched.add(id(place.module))
            _trees[id(place.module)] = self._self
            for name, child in reversed(_torch.child_table(place.module).items()):
                if child is not None:
                    todo.append(self._below(place, name, child))
        return list(found.values())

    def _below(self, place: _Place, name: str, child: nn.Module) -> _Place:
        own = unit_of(child)
        left_alone = own is None and (place.left_alone or child in self._ignored_modules)
        return _Place(child, join_names(place.name, name), own or place.unit, left_alone)

    def _let_wrappers_join(self, root: Root, top: nn.Module) -> None:
        """Make the units of wrappers that were put into the tree units of its root; give all their present names."""
        names: dict[Unit, str] = {}
        for place in self._places(root, top):
            names.setdefault(place.unit, place.name)
        for unit, name in names.items():
            if unit not in root.units:
                _check_may_join(unit, name, names)
        gone = {unit: unit.name for unit in root.units if unit not in names}
        if any(unit not in root.units or unit.name != name for unit, name in names.items()):
            root.take({**names, **gone})

    def _find_strangers(self, root: Root, top: nn.Module) -> Iterator[_Stranger]:
        known = _Known(root.units)
        for place in self._places(root, top):
            others = [] if place.left_alone else known.others(place.module)
            for name, param in others:
                fqn = join_names(place.name, name)
                if param in known.fqns:
                    raise _tied(fqn, known.fqns[param], place.unit)
                if param not in self._ignored_params and place.unit.world_size > 1:
                    yield _Stranger(weakref.ref(place.module), name, fqn, place.unit)


class _Known:
    """What units manage: their modules, and the names of their parameters."""

    def __init__(self, units: Sequence[Unit]) -> None:
        handles = [handle for unit in units for handle in unit.handles]
        managed = [param for handle in handles for param in handle.params]
        managed += [param for unit in units for param in unit.unclaimed]
        self.modules = {module for unit in units for module in unit.modules}
        self.fqns = {
            managed.param: fqn
            for handle in handles
            for managed, fqn in zip(handle.params, handle.fqns, strict=True)
        }
        self._sites = {(site.module, site.name) for param in managed for site in param.sites}
        self._flats = {handle.flat_param for handle in handles}

    def others(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters that ``module`` itself holds in places that no unit knows of, with their names there."""
        return [
            (name, param)
            for name, param in _torch.parameter_table(module).items()
            if param is not None and (module, name) not in self._sites and param not in self._flats
        ]


_trees: dict[int, weakref.ref[Tree]] = {}  # by the identity of each module in them


def _forget(watched: set[int], tree: weakref.ref[Tree]) -> None:
    for key in watched:
        if _trees.get(key) is tree:
            del _trees[key]


def _registered(module: nn.Module, name: str, value: object) -> None:  # noqa: ARG001 torch's signature
    taken = _torch.taken_by_ddp(module)
    if taken and isinstance(value, nn.Module):
        _check_whole(value, taken)
    found = _trees.get(id(module))
    tree = None if found is None else found()
    if tree is not None:
        tree.mark()


def _check_whole(model: nn.Module, taken: Sequence[nn.Parameter]) -> None:
    """Refuse ``DistributedDataParallel`` around wrappers, before it communicates."""
    managed = {
        param: (unit, fqn)
        for unit in units_in(model)
        if unit.world_size > 1
        for handle in unit.handles
        for param, fqn in zip(handle.exposed, handle.fqns, strict=False)
    }
    found = next((managed[param] for param in taken if param in managed), None)
    if found is not None:
        unit, fqn = found
        raise UsageError(
            describe(
                "DistributedDataParallel was put around a wrapper, whose shards it would overwrite with rank 0's",
                unit=unit.name,
                fqn=fqn,
                remedy="Leave it out: gradients are averaged already. For replicas use ShardingStrategy.HYBRID_SHARD; "
                "to average what is outside the wrapper, wrap the whole model.",
            ),
            unit=unit.name,
            fqn=fqn,
        )


@functools.cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_registered)
    register_module_parameter_registration_hook(_registered)


def _added(strangers: Sequence[_Stranger]) -> UsageError:
    first = strangers[0]
    names = name_some(stranger.fqn for stranger in strangers)
    return UsageError(
        describe(
            f"trainable parameters were added to the model after wrapping, and nobody averages their gradients over "
            f"ranks: {names}",
            unit=first.unit.name,
            fqn=first.fqn,
            remedy="Change the model before wrapping it, wrap a new module with FSDP before it is put in, or freeze "
            "what was added.",
        ),
        fqn=first.fqn,
        unit=first.unit.name,
    )


def _tied(fqn: str, managed: str, unit: Unit) -> UsageError:
    return UsageError(
        describe(
            f"after wrapping, the parameter {managed!r} was registered at a second place, where its unit does not "
            "show it whole",
            unit=unit.name,
            fqn=fqn,
            remedy="Tie or move parameters before wrapping; a module that holds the old one needs the module, not its "
            "parameters.",
        ),
        fqn=fqn,
        unit=unit.name,
    )


def _check_may_join(unit: Unit, name: str, present: dict[Unit, str]) -> None:
    other = unit.root
    if other.away is not None or any(unit not in present for unit in other.units):
        raise UsageError(
            describe(
                f"the wrapper {name!r} was put into the model and is a part of another one, or offloaded",
                unit=unit.name,
                remedy="Put a whole model in, which is where it computes, or wrap a module of its own.",
            ),
            unit=unit.name,
        )
    other.check_idle("putting a wrapper into a model")
