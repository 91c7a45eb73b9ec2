"""Whose parameters a unit's modules use besides its own: those that are tied to others, of a unit around it.

The unit around shows its leaves until the last of its gradients has come.  A reentrant checkpoint is run again after
that where the parameter is used outside of it, too, since its gradients come in backwards of their own.  So a unit that
computes in a backward asks for what it borrows; what arrives then is reduced a second time, and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["find_lenders"]


def find_lenders(units: Sequence[Unit]) -> None:
    """Tell each of a tree's units which others own parameters of modules inside it.  Collective: none."""
    owners: dict[nn.Module, set[Unit]] = {}
    for unit in units:
        for handle in unit.handles:
            for managed in handle.params:
                for site in managed.sites:
                    owners.setdefault(site.module, set()).add(unit)
    for unit in units:
        inside = set(unit.module.modules())
        found = {owner for module in inside for owner in owners.get(module, ())}
        around = [owner for owner in found if owner.module not in inside]
        unit.lenders = tuple(sorted(around, key=lambda owner: owner.index))
