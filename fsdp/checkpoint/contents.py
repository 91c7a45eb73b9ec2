"""What goes into a checkpoint, as one flat dict: this rank's parts of tensors, and pickled values.

What every rank holds whole (buffers, ignored parameters, scalars) is the first rank's.
Nothing is gathered, moved or copied: parameters and optimizer state are what this rank's shards hold, where they lie.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import ShardedStateDictConfig, StateDictType
from ..errors import CheckpointError, ConfigTypeError, describe
from ..flat.handle import FlatParamHandle
from ..flat.tensor_parallel import is_distributed
from ..names import clean_tensor_name
from ..runtime.held import held_params, units_in
from ..state.elsewhere import find_elsewhere
from ..state.model import standing_in
from ..state.optim_in_place import StateInPlace, optim_state_in_place
from ..wrapper import FullyShardedDataParallel
from .parts import Part
from .ranks import Ranks
from .staging import Staging

__all__ = [
    "Pickled",
    "Selection",
    "collect",
    "pickled_extra",
    "random_state",
    "set_random_state",
]

SCALARS = "optimizer"


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value as bytes, taken when the save began."""

    data: bytes

    @staticmethod
    def of(value: Any) -> Pickled:
        """Pickle ``value`` as ``torch.save`` does."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return Pickled(buffer.getvalue())


@dataclass(frozen=True, slots=True)
class Selection:
    """Which names of the model are saved.

    Attributes:
        trainable_only: Only parameters that require gradients, and no buffers.
        filter: Only names for which this is true.
    """

    trainable_only: bool = False
    filter: Callable[[str], bool] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether anything may be left out."""
        return self.trainable_only or self.filter is not None

    def over(self, model: nn.Module) -> Callable[[str], bool]:
        """Whether a name of ``model`` is saved.  Collective: none."""
        names = {
            name
            for held in held_params(model, units_in(model))
            if held.key.requires_grad
            for name in (held.fqn, *held.aliases)
        }

        def wanted(name: str) -> bool:
            chosen = self.filter is None or bool(self.filter(name))
            return chosen and (not self.trainable_only or name in names)

        return wanted


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    selection: Selection,
    staging: Staging,
) -> dict[str, Part | Pickled]:
    """This rank's part of the model, the optimizer and the random generators.

    Collective: every rank of every unit's process group; small messages only.

    Args:
        model: Wrapped, or holding wrappers, or plain.
        optimizer: Whose state to save.
        ranks: Those that save.
        selection: Which names.
        staging: Where tensors are kept until they are written.

    Raises:
        CheckpointError: On every rank, if any could not get its part; of the model before the optimizer is looked at.
    """
    wanted = selection.over(model)
    units = units_in(model)
    elsewhere = find_elsewhere(model, units, ()) if units else None
    own = frozenset() if elsewhere is None else elsewhere.first_here

    def is_mine(name: str) -> bool:
        """Whether this rank writes what ranks have alike."""
        return ranks.rank == 0 or name in own

    def rest() -> dict[str, Part | Pickled]:
        found: dict[str, Part | Pickled] = {f"rng/{ranks.rank}": Pickled.of(random_state())}
        if optimizer is None:
            return found
        state = optim_state_in_place(model, units, optimizer, elsewhere)
        if ranks.rank == 0:
            others = {fqn: values for fqn, values in state.others.items() if wanted(fqn)}
            found[SCALARS] = Pickled.of({"state": others, "param_groups": state.groups})
        return found | _optimizer_state(state, wanted, is_mine)

    contents = ranks.attempt("checkpoint.save", lambda: _model_state(model, wanted, is_mine))
    return ranks.attempt("checkpoint.save", lambda: _staged(contents | rest(), staging))


def _staged(contents: Mapping[str, Part | Pickled], staging: Staging) -> dict[str, Part | Pickled]:
    """What of ``contents`` this rank has, kept by ``staging``."""
    staged = {
        key: value.kept(partial(staging.keep, key)) if isinstance(value, Part) else value
        for key, value in contents.items()
        if isinstance(value, Pickled) or value.boxes
    }
    staging.finish()
    return staged


def _model_state(
    model: nn.Module, wanted: Callable[[str], bool], is_mine: Callable[[str], bool]
) -> dict[str, Part | Pickled]:
    """What this rank writes of parameters, buffers and extra state, under the keys of a sharded state dict."""
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    managed: dict[torch.Tensor, tuple[FlatParamHandle, int]] = {}

    def stand_in(handle: FlatParamHandle, index: int) -> torch.Tensor:
        marker = torch.empty(0, device="meta")
        managed[marker] = (handle, index)
        return marker

    hooks = [wrapper._state_hooks for wrapper in wrappers]  # noqa: SLF001 of this package
    config = ShardedStateDictConfig()
    with (
        FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config),
        standing_in(hooks, stand_in),
    ):
        state = model.state_dict()
    contents: dict[str, Part | Pickled] = {}
    for full_name, value in state.items():
        name = clean_tensor_name(full_name)
        if not wanted(name):
            continue
        if isinstance(value, torch.Tensor) and value in managed:
            contents[f"model/{name}"] = _shard_of(*managed[value])
            continue
        _check_alike(name, value)
        if is_mine(name):
            is_tensor = isinstance(value, torch.Tensor)
            contents[f"model/{name}"] = Part.of_tensor(value) if is_tensor else Pickled.of(value)
    return contents


def _check_alike(name: str, value: Any) -> None:
    """See that every rank has the same of what no unit manages.

    Raises:
        CheckpointError: If it is a DTensor that is cut over ranks; on each of them.
    """
    if not is_distributed(value) or value.device_mesh.size() == 1:
        return
    if not all(placement.is_replicate() for placement in value.placements):
        raise CheckpointError(
            describe(
                f"a DTensor that no wrapper manages is cut over ranks, {value.placements}",
                fqn=name,
                remedy="Wrap the module that holds it, or save it with torch.distributed.checkpoint.",
            ),
            fqn=name,
        )


def _shard_of(handle: FlatParamHandle, index: int) -> Part:
    """This rank's piece of a parameter."""
    span = handle.pieces[index].in_shard
    return Part.of_piece(handle, index, handle.shard[span.start : span.stop])


def _optimizer_state(
    state: StateInPlace, wanted: Callable[[str], bool], is_mine: Callable[[str], bool]
) -> dict[str, Part | Pickled]:
    """The tensors that this rank writes of an optimizer's state."""
    mine = {place: value for place, value in state.copies.items() if is_mine(place[0])}
    parts = {
        place: Part.of_piece(*piece) for place, piece in state.pieces.items() if wanted(place[0])
    }
    parts |= {
        place: Part.of_tensor(value)
        for place, value in (state.wholes | mine).items()
        if wanted(place[0])
    }
    return {f"optimizer/{name}/{fqn}": part for (fqn, name), part in parts.items()}


# -- extra -------------------------------------------------------------------------------------------------------------


def pickled_extra(extra: object, rank: int) -> dict[str, Part | Pickled]:
    """What the caller wants saved, on the first rank; what has a ``state_dict`` method by its state.

    Collective: none.

    Raises:
        ConfigTypeError: If it is no mapping of names.
    """
    if extra is None or rank != 0:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigTypeError("extra is not a mapping of names to values.")
    return {f"extra/{name}": Pickled.of(_state_of(value)) for name, value in extra.items()}


def _state_of(value: Any) -> Any:
    method = getattr(value, "state_dict", None)
    return method() if callable(method) else value


# -- random numbers ----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of this process's generators: torch's (CPU, current CUDA device), Python's, and NumPy's if loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, [int(key) for key in keys], *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_state` took, as far as this process has the generators."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
