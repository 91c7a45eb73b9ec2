"""How wrappers come to be that no user has called the constructor for, and how a tree of them gets its runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from . import _torch
from .init.build import BuildArguments
from .names import clean_tensor_name
from .properties import WrapperProperties
from .runtime.root import Root
from .runtime.unit import Unit

__all__ = ["put_wrappers_in_place", "start_root", "wrap_child"]


def wrap_child(
    cls: type[Any],
    module: nn.Module,
    unit: Unit,
    arguments: BuildArguments,
) -> Any:
    """The wrapper of a unit that the outer constructor has built."""
    wrapper: Any = object.__new__(cls)
    nn.Module.__init__(wrapper)
    wrapper._exec_order_policy = None
    wrapper._adopt(module, unit, arguments)
    wrapper.training = module.training
    return wrapper


def put_wrappers_in_place(root: nn.Module, wrappers: Mapping[nn.Module, nn.Module]) -> None:
    """Let each parent in ``root`` hold the wrappers of its children in their place."""
    for parent in list(root.modules()):
        table = _torch.child_table(parent)
        for name, child in table.items():
            if child is not None and child in wrappers:
                table[name] = wrappers[child]


def start_root(outer: nn.Module) -> None:
    """Build the runtime over every unit below ``outer``, those of wrappers made earlier included."""
    names = {
        child: clean_tensor_name(name)
        for name, child in outer.named_modules()
        if isinstance(child, WrapperProperties)
    }
    Root([wrapper._unit for wrapper in names], list(names.values()), outer)
