"""``torch.distributed.fsdp`` answers with this package, for programs that can not be edited.

accelerate, transformers, PEFT, Lightning and others import ``FullyShardedDataParallel`` and its configuration from
``torch.distributed.fsdp`` by name.  :func:`install` makes these names resolve to ours::

    import fsdp.compat.torch_fsdp

    fsdp.compat.torch_fsdp.install()  # before or after the other packages are imported

Torch's own modules are not changed.  A *front* stands before each in ``sys.modules``: it has our names, and passes on
every other one, ``fully_shard`` and the rest of FSDP2 among them.  Torch's wrapper goes on working for whoever holds
it.  Names that modules have already imported (``from torch.distributed.fsdp import ...``) are rebound there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["install", "installed", "is_installed", "uninstall"]

_TORCH, _OURS = "torch.distributed.fsdp", "fsdp"
_SUBMODULES = (
    "_common_utils",
    "_flat_param",
    "_init_utils",
    "_runtime_utils",
    "_traversal_utils",
    "api",
    "fully_sharded_data_parallel",
    "sharded_grad_scaler",
    "wrap",
)
# Private names of policies that PEFT and torch's activation checkpointing import.
_POLICY_NAMES = (
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_or_policy",
    "_recursive_wrap",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
)
_ZERO_HOOKS = ("hook_with_zero_step", "hook_with_zero_step_interleaved")
_Pairs = dict[str, tuple[str, tuple[str, ...] | None]]
# Torch's module -> ours and the names to take from it; None for all that it exports.
_PAIRS: _Pairs = {
    _TORCH: (_OURS, None),
    **{f"{_TORCH}.{name}": (f"{_OURS}.{name}", None) for name in _SUBMODULES},
    f"{_TORCH}.wrap": (f"{_OURS}.wrap", _POLICY_NAMES),
}
_ZERO_PAIRS: _Pairs = {
    "torch.distributed.optim": (_OURS, ("ZeroRedundancyOptimizer",)),
    "torch.distributed.optim.zero_redundancy_optimizer": (_OURS, ("ZeroRedundancyOptimizer",)),
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": (_OURS, _ZERO_HOOKS),
}


class _Front(ModuleType):
    """Stands before a module of torch: our names first, then everything that module has."""

    def __init__(self, behind: ModuleType, names: dict[str, Any]) -> None:
        super().__init__(behind.__name__, behind.__doc__)
        kept = ("__package__", "__path__", "__spec__", "__loader__", "__file__", "__all__")
        held = {name: vars(behind)[name] for name in kept if name in vars(behind)}
        vars(self).update(held, **names)
        self.behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(self.behind)})


@dataclass
class _Installation:
    """What was there before, to put it back.

    Attributes:
        modules: Entries of ``sys.modules``; None where there was none.
        attributes: Module, name and former value of each attribute that was set.
        zero: Whether :class:`ZeroRedundancyOptimizer` was taken in as well.
    """

    modules: dict[str, ModuleType | None] = field(default_factory=dict)
    attributes: list[tuple[ModuleType, str, Any]] = field(default_factory=list)
    zero: bool = False

    def replace_module(self, path: str, module: ModuleType) -> None:
        self.modules.setdefault(path, sys.modules.get(path))
        sys.modules[path] = module
        parent, _, leaf = path.rpartition(".")
        if parent in sys.modules:
            self.set_attribute(sys.modules[parent], leaf, module)

    def set_attribute(self, module: ModuleType, name: str, value: Any) -> None:
        self.attributes.append((module, name, vars(module).get(name, _ABSENT)))
        setattr(module, name, value)

    def undo(self) -> None:
        for module, name, value in reversed(self.attributes):
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                setattr(module, name, value)
        for path, former in self.modules.items():
            if former is None:
                sys.modules.pop(path, None)
            else:
                sys.modules[path] = former


_ABSENT = object()
_current: list[_Installation] = []


def install(*, zero: bool = False) -> None:
    """Let ``torch.distributed.fsdp`` and its submodules answer with this package's names.

    Calling it again changes nothing, but catches up with modules that were imported meanwhile.  Collective: none;
    every rank calls it.

    Args:
        zero: Whether ``torch.distributed.optim.ZeroRedundancyOptimizer`` and its communication hooks are ours, too.

    Example:
        >>> install()
        >>> from torch.distributed.fsdp import FullyShardedDataParallel
        >>> FullyShardedDataParallel.__module__
        'fsdp.wrapper'
        >>> uninstall()
    """
    if not _current:
        _current.append(_Installation())
    state = _current[0]
    state.zero = state.zero or zero
    pairs = {**_PAIRS, **(_ZERO_PAIRS if state.zero else {})}
    exchanged: dict[int, tuple[Any, Any]] = {}
    for path in pairs:
        _behind(path)  # all of torch's modules first: they import each other
    for path, (ours, names) in pairs.items():
        behind = _behind(path)
        taken = _names_of(importlib.import_module(ours), names)
        if not isinstance(sys.modules.get(path), _Front):
            state.replace_module(path, _Front(behind, taken))
        for name, value in taken.items():
            former = vars(behind).get(name, value)
            if former is not value and not isinstance(former, str):
                exchanged[id(former)] = (former, value)
    _rebind(exchanged, state)


def uninstall() -> None:
    """Put everything back as it was before :func:`install`.  Collective: none."""
    while _current:
        _current.pop().undo()


def is_installed() -> bool:
    """Whether torch's names are ours at present.  Collective: none."""
    return bool(_current)


@contextmanager
def installed(*, zero: bool = False) -> Iterator[None]:
    """:func:`install` within the context.  Collective: none.

    Example:
        >>> with installed():
        ...     from torch.distributed.fsdp import ShardingStrategy
        >>> ShardingStrategy.__module__
        'fsdp.config'
    """
    had = is_installed()
    install(zero=zero)
    try:
        yield
    finally:
        if not had:
            uninstall()


def _behind(path: str) -> ModuleType:
    """Torch's module, also where a front stands before it."""
    module = importlib.import_module(path)
    return module.behind if isinstance(module, _Front) else module


def _names_of(module: ModuleType, names: tuple[str, ...] | None) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names or module.__all__}


def _rebind(exchanged: dict[int, tuple[Any, Any]], state: _Installation) -> None:
    """Give modules that have imported torch's objects by name ours."""
    for path, module in list(sys.modules.items()):
        if _is_left_alone(path):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            pair = exchanged.get(id(value))
            if pair is not None and pair[0] is value:
                state.set_attribute(module, name, pair[1])


def _is_left_alone(path: str) -> bool:
    """Modules that go on with torch's own objects: torch's wrappers, and what knows both."""
    return path.startswith((_TORCH, _OURS + ".")) or path in (_OURS, _CHECKPOINT)


_CHECKPOINT = "torch.distributed.checkpoint.state_dict"  # see fsdp/adapters/checkpoint.py
