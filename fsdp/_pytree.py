"""Tensors in nested inputs and outputs.

What counts as nested: tuples, lists, sets, mappings, named tuples, dataclasses, packed sequences, mappings that are
dataclasses too (transformers' ``ModelOutput``), and classes registered with ``torch.utils._pytree``.  Any other
object is left alone, whatever attributes it has.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from operator import is_not
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from . import _torch

__all__ = ["iter_tensors", "map_tensors"]

_Fn = Callable[[torch.Tensor], torch.Tensor]

# Exact types, looked up by hash: these functions run in every forward of every unit.
_LEAVES = frozenset({type(None), str, bytes, bool, int, float, complex, torch.dtype, torch.device})
_SEQUENCES = (list, tuple, set, frozenset)
# ``batch_sizes`` is left out: it has to stay an integer tensor on the CPU.
_PACKED_FIELDS = ("data", "sorted_indices", "unsorted_indices")


def iter_tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in ``tree``, in order; one that occurs twice is listed twice.

    Collective: none.

    Example:
        >>> iter_tensors({"x": torch.zeros(1), "rest": (torch.ones(1), "name")})
        [tensor([0.]), tensor([1.])]
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    kind = type(tree)
    children: Iterable[Any]
    if kind is tuple or kind is list:
        children = tree
    elif kind is dict:
        children = tree.values()
    elif kind in _LEAVES:
        return
    else:
        children = _children(tree)
    for child in children:
        if isinstance(child, torch.Tensor):
            found.append(child)
        elif type(child) not in _LEAVES:
            _collect(child, found)


def _children(tree: Any) -> Iterable[Any]:
    """What a container holds; nothing for any other object."""
    if isinstance(tree, PackedSequence):
        return [getattr(tree, name) for name in _PACKED_FIELDS]
    if isinstance(tree, _SEQUENCES):
        return tree
    if isinstance(tree, Mapping):
        return tree.values()
    if _is_dataclass(tree):
        return [getattr(tree, item.name, None) for item in dataclasses.fields(tree)]
    return _torch.registered_children(tree) or ()


def map_tensors(fn: _Fn, tree: Any) -> Any:
    """``tree`` with ``fn`` applied once to every tensor; the very same object where nothing changes.

    Containers around a tensor that changes are copied with their class and attributes; ``tree`` itself is not
    written to.  Collective: none.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": torch.zeros(1), "name": "a"})
        {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple or kind is list:
        mapped = [child if type(child) in _LEAVES else map_tensors(fn, child) for child in tree]
        return kind(mapped) if any(map(is_not, mapped, tree)) else tree
    if kind is dict:
        changes = _changes(fn, tree)
        return {**tree, **changes} if changes else tree
    return _map_other(fn, tree)


def _map_other(fn: _Fn, tree: Any) -> Any:
    if isinstance(tree, PackedSequence):
        changes = _changes(fn, {name: getattr(tree, name) for name in _PACKED_FIELDS})
        return tree._replace(**changes) if changes else tree
    if isinstance(tree, _SEQUENCES):
        return _map_sequence(fn, tree)
    if isinstance(tree, Mapping):
        return _map_mapping(fn, tree)
    if _is_dataclass(tree):
        fields = dataclasses.fields(tree)
        changes = _changes(fn, {item.name: getattr(tree, item.name, None) for item in fields})
        return _with_attributes(copy.copy(tree), changes) if changes else tree
    return _torch.map_registered(lambda child: map_tensors(fn, child), tree)


def _changes(fn: _Fn, items: Mapping[Any, Any]) -> dict[Any, Any]:
    """The new values of those items that change."""
    return {
        key: new
        for key, old in items.items()
        if type(old) not in _LEAVES and (new := map_tensors(fn, old)) is not old
    }


def _map_sequence(fn: _Fn, tree: Any) -> Any:
    """Sets, and subclasses of the sequences (named tuples among them)."""
    items = list(tree)
    mapped = [map_tensors(fn, item) for item in items]
    if not any(map(is_not, mapped, items)):
        return tree
    if isinstance(tree, list):
        copied = copy.copy(tree)
        copied[:] = mapped
        return copied
    make = getattr(type(tree), "_make", type(tree))  # named tuples: whatever their __new__ takes
    return make(mapped)


def _map_mapping(fn: _Fn, tree: Any) -> Any:
    changes = _changes(fn, tree)
    if not changes:
        return tree
    if not isinstance(tree, MutableMapping):
        return type(tree)({**tree, **changes})
    copied: Any = _copy_mapping(tree)
    for key, value in changes.items():
        copied[key] = value
    # Items that are attributes too: of dataclasses, and of classes that keep both themselves.
    attributes = getattr(tree, "__dict__", {})
    same = {key: new for key, new in changes.items() if attributes.get(key) is tree[key]}
    return _with_attributes(copied, same)


def _copy_mapping(tree: Any) -> Any:
    if not isinstance(tree, OrderedDict):
        return copy.copy(tree)
    # copy.copy would call the class without arguments, which a dataclass with required fields refuses.
    copied = type(tree).__new__(type(tree))
    vars(copied).update(vars(tree))
    OrderedDict.update(copied, tree)
    return copied


def _with_attributes(copied: Any, values: Mapping[str, Any]) -> Any:
    for name, value in values.items():
        object.__setattr__(copied, name, value)  # frozen dataclasses too
    return copied


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
