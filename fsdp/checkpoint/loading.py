"""``load``: every rank reads the bytes of its own pieces, whatever wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..errors import CheckpointError, name_some
from ..names import clean_tensor_name
from ..runtime.held import Held, held_params, settle_assigned, units_in
from ..state.elsewhere import Elsewhere, find_elsewhere
from ..state.loading import RECEIVED
from ..state.model import keys_in_order
from ..state.optim_elsewhere import without_elsewhere
from ..state.optim_load import plan_load
from ..state.optim_names import in_canonical_names
from ..state.optim_view import view_of
from .contents import SCALARS, set_random_state
from .folder import find
from .ranks import Ranks
from .saving import settle
from .source import Source

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["Loaded", "load", "read_extra"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load` found.

    Attributes:
        path: The checkpoint's folder.
        world_size: Ranks that saved it.
        extra: The values that were saved as ``extra``; of objects with a state, the state.
        missing_keys: Names of the model that the checkpoint has not.
        unexpected_keys: Names of the checkpoint that the model has not.
        random_state: Whether this rank's random generators were put back; false if that many ranks did not save.
    """

    path: Path
    world_size: int
    extra: dict[str, Any]
    missing_keys: list[str]
    unexpected_keys: list[str]
    random_state: bool


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    random_state: bool = True,
    weights_only: bool = True,
    process_group: ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint of :func:`save`, bitwise, at any world size, wrapping, strategy and exposure.

    Every rank reads the bytes of its own pieces, straight into its shards, and verifies their checksums.  Names and
    shapes are checked, on every rank, before anything is changed.

    Collective: every rank of the model's process group, or of ``process_group``; small messages only.

    Args:
        path: A checkpoint, or a folder of checkpoints, of which the newest good one is taken.
        model: A wrapper, a module that contains some, or a plain module.
        optimizer: Its state is replaced, if the checkpoint has one.
        extra: Objects with a ``load_state_dict`` method, by the names under which they were saved.
        strict: Whether missing and unexpected names are an error.  What a filter left out is not missing.
        random_state: Whether to put the rank's random generators back.
        weights_only: Refuse pickles of anything but plain values and tensors.
        process_group: Ranks that take part.

    Raises:
        CheckpointError: On every rank: no complete checkpoint, names or shapes that do not fit (nothing is changed
            then), a missing or damaged file, which it names (parameters may then be of both; the optimizer is not
            changed).

    Example::

        loaded = checkpoint.load("runs/gpt", model, optimizer, {"schedule": schedule})
        step = loaded.extra["step"]
    """
    settle()
    ranks = Ranks.of(model, process_group)
    ranks.enter("checkpoint.load")
    folder = ranks.from_first(lambda: find(path))

    units = units_in(model)
    elsewhere = find_elsewhere(model, units, ()) if units else None
    others = frozenset() if elsewhere is None else elsewhere.others

    def open_and_check() -> tuple[Source, _Names, _OptimizerPlan]:
        source = Source(folder, without=others)
        names = _check_names(source, model, strict=strict)
        plan = _OptimizerPlan.of(source, model, optimizer, elsewhere, weights_only=weights_only)
        return source, names, plan

    source, names, plan = ranks.attempt("checkpoint.load", open_and_check)
    with source, torch.no_grad():
        optimizer_state, extras, generators, state = ranks.attempt(
            "checkpoint.load",
            lambda: (
                plan.read(),
                _values(source, "extra/", weights_only=weights_only),
                _random_state(source, ranks.rank),
                _read_model(source, model),
            ),
        )
        model.load_state_dict(state, strict=False)
        if optimizer is not None and optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        for name, target in (extra or {}).items():
            if name in extras and callable(getattr(target, "load_state_dict", None)):
                target.load_state_dict(extras[name])
        restored = random_state and generators is not None
        if restored:
            set_random_state(generators)
    size = source.manifest.world_size
    return Loaded(folder, size, extras, names.missing, names.unexpected, restored)


def read_extra(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """What was saved as ``extra``, without a model.  Collective: none.

    Args:
        path: A checkpoint, or a folder of checkpoints, of which the newest good one is taken.
        weights_only: Refuse pickles of anything but plain values and tensors.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    with Source(find(path)) as source:
        return _values(source, "extra/", weights_only=weights_only)


# -- names and shapes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    missing: list[str]
    unexpected: list[str]


def _saved_names(source: Source) -> list[str]:
    keys = (*source.manifest.tensors, *source.manifest.objects)
    return [key.removeprefix("model/") for key in keys if key.startswith("model/")]


def _check_names(source: Source, model: nn.Module, *, strict: bool) -> _Names:
    """Compare names and shapes of the model with the checkpoint's.

    Raises:
        CheckpointError: If a shape differs, or, if ``strict``, names do.
    """
    saved = set(_saved_names(source))
    missing, wrong = [], []
    for names, shape in _wanted(model):
        present = [name for name in names if name in saved]
        if not present and not source.manifest.partial:
            missing.append(names[0])
        for name in present:
            entry = source.manifest.tensors.get(f"model/{name}")
            if entry is None or entry.shape != shape:
                found = entry.shape if entry is not None else "no tensor"
                wrong.append(f"{name!r} is {found} in the checkpoint and {shape} in the model")
    known = set(keys_in_order(model))
    unexpected = [name for name in _saved_names(source) if name not in known]
    remedy = "" if wrong else " Pass strict=False to load the rest."
    if strict and missing:
        wrong.append(f"{len(missing)} names are missing in the checkpoint ({name_some(missing)})")
    if strict and unexpected:
        wrong.append(f"{len(unexpected)} names are unexpected ({name_some(unexpected)})")
    if wrong:
        raise CheckpointError(
            f"{source.folder} does not fit the model: {'; '.join(wrong)}.{remedy}"
        )
    return _Names(missing, unexpected)


def _wanted(model: nn.Module) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Every parameter and persistent buffer of the model: its names and its shape."""
    for held in held_params(model, units_in(model)):
        yield (held.fqn, *held.aliases), held.shape
    for path, module in model.named_modules():
        for name in _torch.persistent_buffers(module):
            buffer = _torch.buffer_table(module)[name]
            if buffer is not None:
                prefix = clean_tensor_name(path)
                yield (f"{prefix}.{name}" if prefix else name,), tuple(buffer.shape)


# -- the model ---------------------------------------------------------------------------------------------------------


def _read_model(source: Source, model: nn.Module) -> dict[str, Any]:
    """Read this rank's pieces into its shards; the values of what no unit manages are returned."""
    state: dict[str, Any] = {}
    done: set[str] = set()
    units = units_in(model)
    settle_assigned(units)
    for held in held_params(model, units):
        if held.handle is None:
            continue
        present = [
            name for name in (held.fqn, *held.aliases) if f"model/{name}" in source.manifest.tensors
        ]
        done.update((held.fqn, *held.aliases))
        if present:
            _read_piece(source, f"model/{present[0]}", held)
        state |= dict.fromkeys((held.fqn, *held.aliases) if present else (), RECEIVED)
    for name in _saved_names(source):
        key = f"model/{name}"
        if name not in done:
            state[name] = source.whole(key) if key in source.manifest.tensors else source.value(key)
    return state


def _read_piece(source: Source, key: str, held: Held) -> None:
    handle = held.handle
    assert handle is not None
    piece = handle.pieces[held.index]
    if held.tensor_shard is not None:
        value = held.piece_of(source.whole(key))
        handle.shard[piece.in_shard.start : piece.in_shard.stop].copy_(value)
    elif piece.in_slot.numel:
        value = source.piece(key, handle.layout.slots[held.index], piece.in_slot)
        handle.shard[piece.in_shard.start : piece.in_shard.stop].copy_(value)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _OptimizerPlan:
    """What the optimizer takes from the checkpoint; nothing if ``plan`` is None."""

    plan: Any
    parts: Any

    @staticmethod
    def of(
        source: Source,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        elsewhere: Elsewhere | None,
        *,
        weights_only: bool,
    ) -> _OptimizerPlan:
        """Check the saved state against the optimizer; tensors are not read yet.

        Raises:
            CheckpointError: If the checkpoint has no optimizer state, or it does not fit.
        """
        if optimizer is None:
            return _OptimizerPlan(None, {})
        if SCALARS not in source.manifest.objects:
            raise CheckpointError(f"{source.folder} was saved without an optimizer: pass none.")
        held = held_params(model, units_in(model))
        view = view_of(model, held, optimizer)
        scalars = source.value(SCALARS, weights_only=weights_only)
        if elsewhere is not None:
            scalars = without_elsewhere(scalars, elsewhere)
        saved = _saved_state(source, held, scalars)
        named = in_canonical_names(held, view, saved)
        return _OptimizerPlan(plan_load(held, view, named), _Parts(source, view.wholes))

    def read(self) -> dict[str, Any] | None:
        """This rank's state, as ``optimizer.load_state_dict`` takes it."""
        return None if self.plan is None else self.plan.cut(self.parts)


def _saved_state(source: Source, held: list[Held], saved: dict[str, Any]) -> dict[str, Any]:
    """The canonical form, with tensors of the parameters' shapes on the meta device.

    Not those of one element: one of shape ``[1]`` may be a scalar of the optimizer, to be compared with others.
    """
    shapes = {name: item.shape for item in held for name in (item.fqn, *item.aliases)}
    for key, entry in source.manifest.tensors.items():
        if key.startswith("optimizer/"):
            _, name, fqn = key.split("/", 2)
            is_cut = shapes.get(fqn) == entry.shape and entry.numel > 1
            value = source.meta(key) if is_cut else source.whole(key)
            saved["state"].setdefault(fqn, {})[name] = value
    return saved


class _Parts(Mapping[Any, torch.Tensor]):
    """This rank's part of each state tensor, read when it is asked for."""

    def __init__(self, source: Source, wholes: frozenset[str]) -> None:
        self._source = source
        self._wholes = wholes

    def __getitem__(self, place: tuple[Held, str]) -> torch.Tensor:
        held, name = place
        key = next(
            f"optimizer/{name}/{fqn}"
            for fqn in (held.fqn, *held.aliases)
            if f"optimizer/{name}/{fqn}" in self._source.manifest.tensors
        )
        if held.handle is None or held.fqn in self._wholes:
            return self._source.whole(key).to(held.key.device)
        if held.tensor_shard is not None:
            return held.piece_of(self._source.whole(key)).to(held.key.device)
        piece = held.handle.pieces[held.index]
        slot = held.handle.layout.slots[held.index]
        return self._source.piece(key, slot, piece.in_slot).to(held.key.device)

    def get(self, place: Any, default: Any = None) -> Any:
        """The part, or ``default`` where the value came with the scalars."""
        try:
            return self[place]
        except StopIteration:
            return default

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


# -- extra -------------------------------------------------------------------------------------------------------------


def _random_state(source: Source, rank: int) -> Any:
    """What this rank's generators were, if so many ranks saved; the first rank verifies those of the others."""
    if rank == 0:
        for key in source.manifest.objects:
            source.verified_bytes(key)
    key = f"rng/{rank}"
    return source.value(key) if key in source.manifest.objects else None


def _values(source: Source, prefix: str, *, weights_only: bool) -> dict[str, Any]:
    return {
        key.removeprefix(prefix): source.value(key, weights_only=weights_only)
        for key in source.manifest.objects
        if key.startswith(prefix)
    }
