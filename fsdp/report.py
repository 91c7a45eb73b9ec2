"""What wrapping did, to read: units, bytes, order of gathers, dtypes; and a warning where it hardly was meant so."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .errors import FsdpWarning, describe
from .flat.handle import FlatParamHandle
from .plan.selection import is_never_called
from .runtime.root import Root
from .runtime.unit import Unit

__all__ = [
    "DtypeLine",
    "Explanation",
    "PrecisionReport",
    "UnitLine",
    "explain",
    "precision_report",
    "warn_of_wrapping",
]

_MOST = 0.5  # of all elements in one unit, from where the rest is hardly worth wrapping
_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class UnitLine:
    """One unit of an :class:`Explanation`.

    Attributes:
        name: FQN in the unwrapped model, ``"<root>"`` for the outermost.
        kind: Class of its module.
        strategy: How it is sharded.
        parameters: How many parameters it owns.
        numel: Their elements.
        trainable: The elements that are trained.
        sharded_bytes: What of them rests on this rank.
        gathered_bytes: What is gathered when it runs, 0 where nothing is.
        why: The reason of ``auto_wrap_policy="auto"``, empty where another policy chose.
    """

    name: str
    kind: str
    strategy: str
    parameters: int
    numel: int
    trainable: int
    sharded_bytes: int
    gathered_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :meth:`FullyShardedDataParallel.explain` returns; prints as a table.

    Attributes:
        units: Every unit, the outermost first.
        gathers: Names of the units in the order of their gathers in a forward; the backward's is the reverse.
        recorded: Whether that order was seen, in the last complete forward, or is that of the module tree.
        ranks: Over how many ranks the outermost unit is sharded, and how many replicas there are.
    """

    units: tuple[UnitLine, ...]
    gathers: tuple[str, ...]
    recorded: bool
    ranks: tuple[int, int]

    def __str__(self) -> str:
        numel = sum(unit.numel for unit in self.units)
        head = (
            f"{len(self.units)} units, {numel:,} elements, "
            f"{_bytes(sum(unit.sharded_bytes for unit in self.units))} on this rank; "
            f"{self.ranks[0]} shards x {self.ranks[1]} replicas"
        )
        rows: list[tuple[str, ...]] = [
            ("unit", "module", "strategy", "params", "elements", "share", "shard", "gathered")
        ]
        rows += [
            (
                unit.name,
                unit.kind,
                unit.strategy,
                str(unit.parameters),
                f"{unit.numel:,}",
                f"{unit.numel / numel:.0%}" if numel else "",
                _bytes(unit.sharded_bytes),
                _bytes(unit.gathered_bytes),
            )
            for unit in self.units
        ]
        if any(unit.why for unit in self.units):
            whys = ["why", *(unit.why for unit in self.units)]
            rows = [(*row, why) for row, why in zip(rows, whys, strict=True)]
        how = "as last run" if self.recorded else "as the module tree has it; nothing has run yet"
        order = " -> ".join(self.gathers) or "nothing is gathered"
        return "\n".join([head, *_table(rows), f"gathers ({how}): {order}"])


@dataclass(frozen=True, slots=True)
class DtypeLine:
    """Parameters of one unit that are treated alike.

    Attributes:
        unit: Name of the unit.
        fqns: Names of the parameters.
        numel: Their elements.
        trainable: Whether they are trained.
        stored: Dtype of the shard, which the optimizer steps.
        computed: Dtype of what is gathered and computed with.
        reduced: Dtype gradients are summed in; None for frozen parameters.
        gradient: Dtype of ``.grad``, likewise.
    """

    unit: str
    fqns: tuple[str, ...]
    numel: int
    trainable: bool
    stored: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype | None
    gradient: torch.dtype | None


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """What :meth:`FullyShardedDataParallel.precision_report` returns; prints as a table.

    Attributes:
        lines: Parameters, a line for each unit and treatment.
        buffers: For each dtype of floating-point buffers the names of those that have it.
    """

    lines: tuple[DtypeLine, ...]
    buffers: dict[torch.dtype, tuple[str, ...]]

    def __str__(self) -> str:
        rows = [("unit", "params", "elements", "stored", "computed", "reduced", "gradient")]
        rows += [
            (
                line.unit,
                str(len(line.fqns)),
                f"{line.numel:,}",
                _dtype(line.stored),
                _dtype(line.computed),
                _dtype(line.reduced),
                _dtype(line.gradient) if line.trainable else "frozen",
            )
            for line in self.lines
        ]
        low = sum(ln.numel for ln in self.lines if ln.trainable and ln.stored.itemsize < 4)
        trained = sum(line.numel for line in self.lines if line.trainable)
        tail = [f"{low:,} of {trained:,} trainable elements are updated in less than float32"]
        tail += [
            f"buffers in {_dtype(dtype)}: {', '.join(names)}"
            for dtype, names in self.buffers.items()
        ]
        return "\n".join([*_table(rows), *tail])


def explain(root: Root, reasons: Mapping[str, str]) -> Explanation:
    """Describe the units of ``root``; ``reasons`` why some of them are units, by name.  Collective: none."""
    order = root.order.last_forward or root.order.forward
    shown = order or range(len(root.units))
    first = root.units[0]
    return Explanation(
        units=tuple(_unit_line(unit, reasons.get(unit.name, "")) for unit in root.units),
        gathers=tuple(_name(root.units[i]) for i in shown if root.units[i].unsharded_bytes),
        recorded=bool(order),
        ranks=(first.shard.size, first.replicate.size),
    )


def precision_report(root: Root) -> PrecisionReport:
    """Describe the dtypes of ``root``'s parameters and buffers.  Collective: none."""
    buffers: dict[torch.dtype, list[str]] = {}
    for unit in root.units:
        prefixes = {module: name for name, module in unit.module.named_modules()}
        for module, name, buffer in unit.own_buffers():
            if buffer.is_floating_point():
                path = ".".join(part for part in (unit.name, prefixes[module], name) if part)
                buffers.setdefault(buffer.dtype, []).append(path)
    return PrecisionReport(
        lines=tuple(_dtype_line(unit, handle) for unit in root.units for handle in unit.handles),
        buffers={dtype: tuple(names) for dtype, names in buffers.items()},
    )


def _unit_line(unit: Unit, why: str = "") -> UnitLine:
    numel = [(h, sum(slot.span.numel for slot in h.layout.slots)) for h in unit.handles]
    return UnitLine(
        name=_name(unit),
        kind=type(unit.module).__name__,
        strategy=unit.config.strategy.name,
        parameters=sum(len(handle.params) for handle in unit.handles),
        numel=sum(count for _, count in numel),
        trainable=sum(count for handle, count in numel if handle.requires_grad),
        sharded_bytes=sum(h.shard.numel() * h.shard.element_size() for h in unit.handles),
        gathered_bytes=unit.unsharded_bytes,
        why=why,
    )


def _dtype_line(unit: Unit, handle: FlatParamHandle) -> DtypeLine:
    trainable = handle.requires_grad
    return DtypeLine(
        unit=_name(unit),
        fqns=tuple(handle.fqns),
        numel=sum(slot.span.numel for slot in handle.layout.slots),
        trainable=trainable,
        stored=handle.dtype,
        computed=handle.compute_dtype,
        reduced=unit.averaging.reduce_dtypes[handle] if trainable else None,
        gradient=unit.averaging.grad_dtype(handle) if trainable else None,
    )


def warn_of_wrapping(root: Root) -> None:
    """Warn where a policy was given and one unit holds most of the model all the same.

    Collective: none; the first rank alone warns, and only where anything is shared among ranks.
    """
    first = root.units[0]
    if first.shard.size == 1 or first.shard.rank or first.replicate.rank:
        return
    numel = {unit: _unit_line(unit).numel for unit in root.units}
    total = sum(numel.values())
    largest = max(numel, key=lambda unit: numel[unit])
    if numel[largest] <= _MOST * total:
        return
    share = f"{numel[largest] / total:.0%}" if total else "0%"
    problem = f"auto_wrap_policy left {share} of all {total:,} elements in one unit, which is gathered at once"
    if all(unit is first or not count for unit, count in numel.items()):
        problem = f"auto_wrap_policy wrapped nothing: all {total:,} elements are gathered at once"
    found = _candidates(largest)
    listed = ", ".join(found) if found else "none that repeats or is smaller"
    warnings.warn(
        describe(
            problem,
            unit=largest.name,
            remedy=f"Candidates for wrapping in it: {listed}.  explain() shows all units.",
        ),
        FsdpWarning,
        stacklevel=3,  # where the user wraps
    )


def _candidates(unit: Unit) -> list[str]:
    """Classes of modules in ``unit`` that hold much of it, the ones with most elements first."""
    own: dict[nn.Module, int] = {}
    for handle in unit.handles:
        for managed, slot in zip(handle.params, handle.layout.slots, strict=True):
            module = managed.sites[0].module
            own[module] = own.get(module, 0) + slot.span.numel
    total = sum(own.values())
    by_class: dict[str, list[int]] = {}
    for module in unit.modules:
        held = sum(own.get(inner, 0) for inner in module.modules())
        if module is not unit.module and 0 < held < total and not is_never_called(module):
            by_class.setdefault(type(module).__name__, []).append(held)
    ranked = sorted(by_class.items(), key=lambda item: (-sum(item[1]), len(item[1])))
    return [
        f"{name} ({len(counts)} x {max(counts):,} elements)"
        for name, counts in ranked[:_CANDIDATES]
    ]


def _name(unit: Unit) -> str:
    return unit.name or "<root>"


def _dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    size = float(count)
    for suffix in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} GiB"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Rows with columns of equal width, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()
