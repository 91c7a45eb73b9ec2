"""Whether the ranks have built the same units, seen before they communicate for the first time or in another dtype.

Another number of elements, dtype, strategy or frozen parameter on one rank would have messages of other lengths or
meanings meet, and the ranks would train on what happens to be in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comm.entry import EntryGate
from ..errors import ShardMismatchError

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Likeness"]


class Likeness:
    """Which groups' ranks have seen that they built the same, for one root."""

    def __init__(self) -> None:
        self._seen: set[EntryGate] = set()
        self._found: ShardMismatchError | None = None

    def check(self) -> None:
        """Raise again what :meth:`see` has found, if anything: such ranks cannot train together.  Collective: none."""
        if self._found is not None:
            raise self._found.with_traceback(None)

    def see(self, unit: Unit, units: Sequence[Unit], sequence: str) -> None:
        """Compare, once a group, those of ``units`` that are over the groups of ``unit``.

        Collective: every rank of its groups.

        Raises:
            ShardMismatchError: Naming the first unit that differs, as each rank has it.
        """
        new = [gate for gate in unit.gates if gate not in self._seen]
        self._seen.update(new)
        for gate in new:
            compared = [other for other in units if gate in other.gates]
            for other in compared:
                other.seen_alike()
            self._compare(gate, sequence, "the first forward", compared)

    def see_recast(self, unit: Unit, sequence: str) -> None:
        """Compare ``unit``, which this rank's user has given another dtype.

        Collective: every rank of its groups, whose users must have done the same.

        Raises:
            ShardMismatchError: If they have given it different dtypes, or some have not.
        """
        dtypes = ", ".join(str(handle.dtype) for handle in unit.handles)
        change = f"the change of unit {unit.name or '<root>'!r} to {dtypes}"
        for gate in unit.gates:
            self._compare(gate, f"{sequence}.{unit.index}", change, [unit])

    def _compare(
        self, gate: EntryGate, sequence: str, occasion: str, units: Sequence[Unit]
    ) -> None:
        try:
            gate.see_alike(sequence, occasion, [_description(unit) for unit in units])
        except ShardMismatchError as error:
            self._found = error
            raise


def _description(unit: Unit) -> str:
    config = unit.config
    parts = [
        f"{handle.layout.padded_numel} {'trained' if handle.requires_grad else 'frozen'} elements of {handle.dtype}, "
        f"computed in {handle.compute_dtype}, reduced in {unit.averaging.reduce_dtypes[handle]}"
        for handle in unit.handles
    ]
    return (
        f"unit {unit.name or '<root>'!r} with {config.strategy.name}, use_orig_params={config.orig_mode} and "
        f"{'; '.join(parts) or 'no parameters'}"
    )
