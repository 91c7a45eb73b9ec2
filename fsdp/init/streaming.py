"""Pretrained values straight into shards: every rank reads the bytes of its own pieces and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .. import _torch
from ..errors import CheckpointError, UsageError, describe, name_some
from ..flat.layout import Slot, Span
from ..names import clean_tensor_name, join_names
from ..runtime.held import Held, held_params, settle_assigned, units_in
from ..runtime.unit import Unit
from .safetensors import SafetensorsFile, open_all

__all__ = ["LoadedNames", "load_safetensors"]


@dataclass(frozen=True, slots=True)
class LoadedNames:
    """What did not match.

    Attributes:
        missing_keys: Names of the model that the files have not.
        unexpected_keys: Names of the files that the model has not.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> LoadedNames:
    """Read pretrained values into a wrapped model.

    The model may have been built on the meta device: wrapping materialises one unit at a time and keeps this rank's
    shard, and this reads this rank's bytes into it.  No rank ever has the whole model; host memory grows by less than
    the largest unit.  Values are cast to the parameters' dtypes.  A tied parameter may be under any of its names.

    Collective: every rank of every unit's process group, which agree that everything fits; no values are sent.

    Args:
        model: A wrapper, or a module that contains some.
        path: A ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with one of these.
        strict: Whether missing and unexpected names are an error.
        rename: Turns a name of the model into that of the files.

    Raises:
        UsageError: If parameters are on the meta device still: wrap first.
        CheckpointError: On every rank: a missing or malformed file, other names (if ``strict``) or shapes; nothing is
            changed then.

    Example::

        with torch.device("meta"):
            model = GPT(config)
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        fsdp.init.load_safetensors(model, "pretrained/model.safetensors.index.json")
    """
    units = units_in(model)
    rename = rename or str
    held = held_params(model, units)
    if any(item.handle is None and item.key.is_meta for item in held):
        raise UsageError("the model has parameters on the meta device: wrap it before loading.")
    problem, files, names = "", {}, LoadedNames([], [])
    buffers = _buffers(model)
    try:
        files = open_all(Path(path))
        names = _check(files, held, buffers, rename, strict=strict)
    except CheckpointError as error:
        problem = str(error)
    _agree(units, problem)
    settle_assigned(units)
    for item in held:
        present = [rename(name) for name in (item.fqn, *item.aliases) if rename(name) in files]
        if present:
            _read_param(files[present[0]], present[0], item)
    for name, buffer in buffers.items():
        key = rename(name)
        if key in files:
            entry = files[key].entries[key]
            buffer.copy_(files[key].read(key, Span(0, entry.numel)).view(entry.shape))
    for file in set(files.values()):
        file.release()
    return names


def _read_param(file: SafetensorsFile, key: str, item: Held) -> None:
    entry = file.entries[key]
    if item.handle is None:
        item.key.copy_(file.read(key, Span(0, entry.numel)).view(entry.shape))
    else:
        slot, piece = item.handle.layout.slots[item.index], item.handle.pieces[item.index]
        target = item.handle.shard[piece.in_shard.start : piece.in_shard.stop]
        if piece.in_slot.numel:
            target.copy_(_piece(file, key, slot, piece.in_slot))
    file.release()


def _piece(file: SafetensorsFile, key: str, slot: Slot, span: Span) -> torch.Tensor:
    """Elements ``span`` in the memory order of ``slot``; only they are read if that is the order in the file."""
    if torch.empty(slot.shape, device="meta").stride() == slot.stride:
        return file.read(key, span)
    whole = file.read(key, Span(0, slot.span.numel)).view(slot.shape)
    ordered = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype).copy_(whole)
    return ordered.as_strided((span.numel,), (1,), span.start)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        join_names(clean_tensor_name(path), name): buffer
        for path, module in model.named_modules()
        for name in _torch.persistent_buffers(module)
        if (buffer := _torch.buffer_table(module)[name]) is not None
    }


def _check(
    files: Mapping[str, SafetensorsFile],
    held: Sequence[Held],
    buffers: Mapping[str, torch.Tensor],
    rename: Callable[[str], str],
    *,
    strict: bool,
) -> LoadedNames:
    """Compare names and shapes before anything is read.

    Raises:
        CheckpointError: If a shape differs, a tied parameter has two values, or, if ``strict``, names differ.
    """
    wanted = [((item.fqn, *item.aliases), item.shape) for item in held]
    wanted += [((name,), tuple(buffer.shape)) for name, buffer in buffers.items()]
    missing, wrong, known = [], [], set()
    for names, shape in wanted:
        keys = [rename(name) for name in names]
        known.update(keys)
        present = [key for key in keys if key in files]
        if not present:
            missing.append(names[0])
        for key in present:
            found = files[key].entries[key].shape
            if found != shape:
                wrong.append(f"{key!r} is {found} in {files[key].path} and {shape} in the model")
        if not wrong and len(present) > 1 and not _are_equal(files, present):
            wrong.append(f"{name_some(present)} are one tied parameter but have different values")
    unexpected = [key for key in files if key not in known]
    if strict and missing:
        wrong.append(f"missing: {name_some(missing)}")
    if strict and unexpected:
        wrong.append(f"unexpected: {name_some(unexpected)}")
    if wrong:
        raise CheckpointError(
            describe(
                f"the safetensors files do not fit the model: {'; '.join(wrong)}",
                remedy="Pass strict=False to load the names that match, or rename= to translate names.",
            )
        )
    return LoadedNames(missing, unexpected)


_COMPARED_AT_ONCE = 1 << 20  # elements


def _are_equal(files: Mapping[str, SafetensorsFile], keys: Sequence[str]) -> bool:
    """Whether tensors of one shape have the same values; a little at a time."""
    first, *others = keys
    numel = files[first].entries[first].numel
    for start in range(0, numel, _COMPARED_AT_ONCE):
        span = Span(start, min(start + _COMPARED_AT_ONCE, numel))
        value = files[first].read(first, span)
        for other in others:
            if not torch.equal(value, files[other].read(other, span)):
                return False
    return True


def _agree(units: Sequence[Unit], problem: str) -> None:
    """Raise on every rank of the outermost unit's two axes if any has a ``problem``.

    Raises:
        CheckpointError: Saying what it is.
    """
    if units:
        for gate in units[0].gates:
            problem = gate.agree("load_safetensors", problem)
    if problem:
        raise CheckpointError(problem)
