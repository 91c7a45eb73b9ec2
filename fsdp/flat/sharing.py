"""Which unit owns each parameter, tied parameters included.

A parameter may be reachable through several modules (tied weights) or several paths (a shared module).  It has one
owner: the unit that contains every module using it, that is the lowest common ancestor among the units.  So ties
across units need no special case: the owner gathers the parameter before any of its users runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import nn

from .. import _torch

__all__ = ["ManagedParam", "Site", "assign_owners", "join_names"]


def join_names(prefix: str, name: str) -> str:
    """Dotted concatenation that leaves out empty parts."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


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


@dataclass(eq=False, slots=True)
class ManagedParam:
    """One original parameter that a unit owns, with every site it is used at.

    Attributes:
        param: The user's own ``nn.Parameter`` object; its identity never changes, only what its data points at.
        sites: First the site that gives it its name, then the sites tied to it.
    """

    param: nn.Parameter
    sites: list[Site] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        """Dotted name relative to the owning unit's module."""
        return self.sites[0].fqn


@dataclass(slots=True)
class _Found:
    """A parameter met during the walk: where, and below which units each time."""

    param: nn.Parameter
    sites: list[tuple[nn.Module, str, str]]
    chain: tuple[nn.Module, ...]


def assign_owners(
    root: nn.Module,
    units: Collection[nn.Module],
    *,
    is_ignored: Callable[[nn.Parameter], bool],
    is_boundary: Callable[[nn.Module], bool],
) -> dict[nn.Module, list[ManagedParam]]:
    """Give every parameter below ``root`` to the lowest unit that contains all of its users.

    Collective: none.

    Args:
        root: The outermost unit's module.
        units: The modules that become units below ``root`` (``root`` itself always is one).
        is_ignored: Parameters to leave alone.
        is_boundary: Modules not to enter (already wrapped: their parameters have an owner).

    Returns:
        For ``root`` and each of ``units`` its parameters in the order of the module walk; tied parameters once.
    """
    found: dict[nn.Parameter, _Found] = {}
    names: dict[nn.Module, str] = {root: ""}
    seen: set[tuple[nn.Module, tuple[nn.Module, ...]]] = set()

    def visit(module: nn.Module, prefix: str, chain: tuple[nn.Module, ...]) -> None:
        if module in units:
            chain = (*chain, module)
            names.setdefault(module, prefix)
        if is_boundary(module) or (module, chain) in seen:
            return
        seen.add((module, chain))
        for name, param in _torch.parameter_table(module).items():
            if param is None or is_ignored(param):
                continue
            entry = found.setdefault(param, _Found(param, [], chain))
            entry.chain = _common_prefix(entry.chain, chain)
            site = (module, name, join_names(prefix, name))
            if all(module is not other or name != taken for other, taken, _ in entry.sites):
                entry.sites.append(site)
        for name, child in module.named_children():
            visit(child, join_names(prefix, name), chain)
        _visit_repeated_children(module, prefix, chain)

    def _visit_repeated_children(
        module: nn.Module, prefix: str, chain: tuple[nn.Module, ...]
    ) -> None:
        """Names of a child that ``named_children`` has already given once: a module registered twice."""
        first: dict[nn.Module, str] = {}
        for name, child in _torch.child_table(module).items():
            if child is not None and first.setdefault(child, name) != name:
                visit(child, join_names(prefix, name), chain)

    visit(root, "", (root,))
    owned: dict[nn.Module, list[ManagedParam]] = {unit: [] for unit in (root, *units)}
    for entry in found.values():
        owner = entry.chain[-1]
        start = len(names[owner]) + 1 if names[owner] else 0
        sites = [
            Site(module, name, fqn[start:], tuple(_torch.parameter_table(module)))
            for module, name, fqn in entry.sites
        ]
        owned[owner].append(ManagedParam(entry.param, sites))
    return owned


def _common_prefix(
    left: tuple[nn.Module, ...], right: tuple[nn.Module, ...]
) -> tuple[nn.Module, ...]:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a is not b:
            break
        length += 1
    return left[:length]
