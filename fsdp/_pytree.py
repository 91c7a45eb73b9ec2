"""Tensors in nested inputs and outputs: tuples, lists, sets, mappings, named tuples, dataclasses, packed sequences."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from . import _torch

__all__ = ["iter_tensors", "map_tensors"]

_PLAIN = (type(None), str, bytes, int, float)


def iter_tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in ``tree``, in order.  Collective: none."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif not isinstance(tree, _PLAIN):
        for child in _children(tree):
            _collect(child, found)


def _children(tree: Any) -> Iterable[Any]:
    """What a container holds; nothing for any other object."""
    if isinstance(tree, PackedSequence):
        return (tree.data,)
    if isinstance(tree, list | tuple | set | frozenset):
        return tree
    if isinstance(tree, Mapping):
        return tree.values()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, item.name, None) for item in dataclasses.fields(tree)]
    return _torch.registered_children(tree) or ()


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to every tensor; the very same object where nothing changes.

    Collective: none.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": torch.zeros(1), "name": "a"})
        {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, _PLAIN):
        return tree
    if isinstance(tree, PackedSequence):
        mapped = fn(tree.data)
        return tree if mapped is tree.data else tree._replace(data=mapped)
    if isinstance(tree, list | tuple | set | frozenset):
        return _map_sequence(fn, tree)
    if isinstance(tree, Mapping):
        return _map_mapping(fn, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    return _torch.map_registered(lambda child: map_tensors(fn, child), tree)


def _map_sequence(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    items = list(tree)
    mapped = [map_tensors(fn, item) for item in items]
    if all(new is old for new, old in zip(mapped, items, strict=True)):
        return tree
    if isinstance(tree, tuple) and type(tree) is not tuple:
        return type(tree)(*mapped) if "_fields" in dir(type(tree)) else type(tree)(mapped)
    return type(tree)(mapped)


def _map_mapping(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    mapped = {key: map_tensors(fn, item) for key, item in tree.items()}
    if all(mapped[key] is item for key, item in tree.items()):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(
            fn, tree
        )  # a dict that is a dataclass too (transformers' ModelOutput)
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, mapped)
    return type(tree)(mapped)


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    changes = {}
    for item in dataclasses.fields(tree):
        old = getattr(tree, item.name, None)
        new = map_tensors(fn, old)
        if new is not old:
            changes[item.name] = new
    if not changes:
        return tree
    copied = copy.copy(tree)
    for name, value in changes.items():
        object.__setattr__(copied, name, value)
        if isinstance(copied, dict):
            copied[name] = value
    return copied
