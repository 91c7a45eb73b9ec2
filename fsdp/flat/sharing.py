"""Which unit owns each parameter, tied parameters included.

A parameter may be reachable through several modules (tied weights) or several paths (a shared module).  It has one
owner: the unit that contains every module using it, that is the lowest common ancestor among the units.  So ties
across units need no special case: the owner gathers the parameter before any of its users runs.  A unit that is itself
reached through several others owns its parameters, since every path to them enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from .. import _torch
from ..names import join_names

if TYPE_CHECKING:
    from .tensor_parallel import TensorShard

__all__ = ["ManagedParam", "Site", "Users", "assign_owners"]


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """One place where module code looks a parameter up: ``getattr(module, name)``.

    Attributes:
        module: The module that holds the parameter directly.
        name: Attribute name in ``module``.
        fqn: Dotted name relative to the owning unit's module.
        siblings: Names of all parameters ``module`` held when it was wrapped, in order.
    """

    module: nn.Module
    name: str
    fqn: str
    siblings: tuple[str, ...]


Users = Sequence[tuple[nn.Parameter, Site, str]]
"""Parameters that modules below a wrapper use, the sites, and their names below it."""


@dataclass(eq=False, slots=True)
class ManagedParam:
    """One original parameter that a unit owns, with every site it is used at.

    Attributes:
        param: The user's own ``nn.Parameter`` object; its identity never changes, only what its data points at.
        sites: First the site that gives it its name, then the sites tied to it.
        tensor_shard: How it is cut over a tensor-parallel mesh, if it is; ``param`` is this rank's part then.
    """

    param: nn.Parameter
    sites: list[Site] = field(default_factory=list)
    tensor_shard: TensorShard | None = None

    @property
    def fqn(self) -> str:
        """Dotted name relative to the owning unit's module."""
        return self.sites[0].fqn


def assign_owners(
    root: nn.Module,
    units: Collection[nn.Module],
    *,
    is_ignored: Callable[[nn.Parameter], bool],
    is_boundary: Callable[[nn.Module], bool],
    users: Mapping[nn.Module, Users] | None = None,
) -> dict[nn.Module, list[ManagedParam]]:
    """Give every parameter below ``root`` to the lowest unit that contains all of its users.

    Collective: none.

    Args:
        root: The outermost unit's module.
        units: The modules that become units below ``root`` (``root`` itself always is one).
        is_ignored: Parameters to leave alone.
        is_boundary: Modules not to enter (already wrapped: their parameters have an owner).
        users: For such modules the parameters below them that have none.

    Returns:
        For ``root`` and each of ``units`` its parameters in the order of the module walk; tied parameters once.
    """
    walk = _Walk(units, is_ignored, is_boundary, users or {})
    walk.visit(root, "", (root,))
    owned: dict[nn.Module, list[ManagedParam]] = {unit: [] for unit in (root, *units)}
    for param, found in walk.found.items():
        owner = found.chain[-1]
        start = len(walk.names[owner]) + 1 if walk.names.get(owner) else 0
        sites = [
            Site(module, name, fqn[start:], walk.siblings[module])
            for (module, name), fqn in found.sites.items()
        ]
        owned[owner].append(ManagedParam(param, sites))
    return owned


@dataclass(slots=True)
class _Found:
    """A parameter met during the walk.

    Attributes:
        chain: The units around every one of its sites, outermost first.
        sites: Module and attribute name of each site, with its dotted name.
    """

    chain: tuple[nn.Module, ...]
    sites: dict[tuple[nn.Module, str], str] = field(default_factory=dict)


class _Walk:
    """Visits every path through the module tree and notes where each parameter is and which units are around it."""

    def __init__(
        self,
        units: Collection[nn.Module],
        is_ignored: Callable[[nn.Parameter], bool],
        is_boundary: Callable[[nn.Module], bool],
        users: Mapping[nn.Module, Users],
    ) -> None:
        self.found: dict[nn.Parameter, _Found] = {}
        self.names: dict[nn.Module, str] = {}
        self.siblings: dict[nn.Module, tuple[str, ...]] = {}
        self._units = frozenset(units)
        self._is_ignored = is_ignored
        self._is_boundary = is_boundary
        self._users = users
        self._seen: set[tuple[nn.Module, tuple[nn.Module, ...]]] = set()

    def visit(self, module: nn.Module, prefix: str, chain: tuple[nn.Module, ...]) -> None:
        """Visit ``module``, found under ``prefix`` and below the units ``chain``, and everything below it."""
        if module in self._units:
            chain = (*chain, module)
            self.names.setdefault(module, prefix)
        if (module, chain) in self._seen:
            return
        self._seen.add((module, chain))
        if self._is_boundary(module):
            for param, site, name in self._users.get(module, ()):
                self._note(param, chain, site.module, site.name, join_names(prefix, name))
                self.siblings[site.module] = site.siblings
            return
        self.siblings[module] = tuple(_torch.parameter_table(module))
        for name, param in _torch.parameter_table(module).items():
            if param is not None:
                self._note(param, chain, module, name, join_names(prefix, name))
        for name, child in _torch.child_table(module).items():
            if child is not None:
                self.visit(child, join_names(prefix, name), chain)

    def _note(
        self,
        param: nn.Parameter,
        chain: tuple[nn.Module, ...],
        module: nn.Module,
        name: str,
        fqn: str,
    ) -> None:
        if self._is_ignored(param):
            return
        found = self.found.setdefault(param, _Found(chain))
        found.chain = _in_both(found.chain, chain)
        found.sites.setdefault((module, name), fqn)


def _in_both(left: tuple[nn.Module, ...], right: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The units around both, outermost first; a shared unit counts, though it is reached by different paths."""
    return tuple(unit for unit in left if unit in right)
