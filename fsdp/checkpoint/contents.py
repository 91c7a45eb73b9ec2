"""What goes into a checkpoint, as one flat dict: this rank's parts of tensors, and pickled values.

What every rank holds whole (buffers, ignored parameters, scalars) is the first rank's.
Nothing is gathered: parameters and optimizer state come as slices, cut by the function that makes sharded state dicts.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import ShardedStateDictConfig, StateDictType
from ..errors import ConfigTypeError
from ..names import clean_tensor_name
from ..runtime.held import held_params, units_in
from ..state.elsewhere import Elsewhere, find_elsewhere
from ..state.model import Delivery, delivering
from ..state.optim_elsewhere import scalars_of_all
from ..wrapper import FullyShardedDataParallel
from .staging import Staging

__all__ = [
    "Part",
    "Pickled",
    "Selection",
    "collect",
    "pickled_extra",
    "random_state",
    "set_random_state",
]

SCALARS = "optimizer"


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The box of a tensor that this rank holds.

    Attributes:
        local: The values, on the CPU; empty where this rank has none.
        shape: Of the whole tensor.
        offsets: Where the box begins.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


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
    rank: int,
    selection: Selection,
    staging: Staging,
) -> dict[str, Part | Pickled]:
    """This rank's part of the model, the optimizer and the random generators.

    Collective: every rank of every unit's process group.

    Args:
        model: Wrapped, or holding wrappers, or plain.
        optimizer: Whose state to save.
        rank: This rank among those that save.
        selection: Which names.
        staging: Where tensors are kept until they are written.
    """
    wanted = selection.over(model)
    units = units_in(model)
    elsewhere = find_elsewhere(model, units, ()) if units else None
    own = frozenset() if elsewhere is None else elsewhere.first_here
    contents: dict[str, Part | Pickled] = {}
    for name, value in _model_state(model, wanted, staging).items():
        key = f"model/{name}"
        if isinstance(value, Part):
            contents[key] = value
        elif rank == 0 or name in own:
            is_tensor = isinstance(value, torch.Tensor)
            contents[key] = _part(key, value, staging) if is_tensor else Pickled.of(value)
    if optimizer is not None:
        contents |= _optimizer_state(
            model, optimizer, wanted, staging, elsewhere, is_first=rank == 0
        )
    contents[f"rng/{rank}"] = Pickled.of(random_state())
    staging.finish()
    return contents


def _model_state(
    model: nn.Module, wanted: Callable[[str], bool], staging: Staging
) -> dict[str, Any]:
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    parts: dict[int, Part] = {}

    def keep(key: str, value: torch.Tensor) -> torch.Tensor:
        part = _part(f"model/{key}", value, staging)
        marker = torch.empty(0, device="meta")
        parts[id(marker)] = part
        markers.append(marker)
        return marker

    markers: list[torch.Tensor] = []
    hooks = [wrapper._state_hooks for wrapper in wrappers]  # noqa: SLF001 of this package
    config = ShardedStateDictConfig()
    with (
        FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config),
        delivering(hooks, Delivery(wanted, keep)),
    ):
        state = model.state_dict()
    return {
        clean_tensor_name(name): parts.get(id(value), value)
        for name, value in state.items()
        if wanted(clean_tensor_name(name))
    }


def _optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wanted: Callable[[str], bool],
    staging: Staging,
    elsewhere: Elsewhere | None,
    *,
    is_first: bool,
) -> dict[str, Part | Pickled]:
    saved = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    own = frozenset() if elsewhere is None else elsewhere.first_here
    contents: dict[str, Part | Pickled] = {}
    others: dict[str, dict[str, Any]] = {}
    for fqn, values in saved["state"].items():
        if not wanted(fqn):
            continue
        others[fqn] = {}
        for name, value in values.items():
            key = f"optimizer/{name}/{fqn}"
            is_slices = isinstance(value, torch.Tensor) and _is_distributed(value)
            is_mine = is_first or fqn in own
            if is_slices or (isinstance(value, torch.Tensor) and value.dim() and is_mine):
                contents[key] = _part(key, value, staging)
            elif not isinstance(value, torch.Tensor) or not value.dim():
                others[fqn][name] = value
    if elsewhere is not None:
        scalars = scalars_of_all(saved["state"], elsewhere)
        others |= {fqn: values for fqn, values in scalars.items() if wanted(fqn)}
    if is_first:
        groups = saved["param_groups"]
        contents[SCALARS] = Pickled.of({"state": others, "param_groups": groups})
    return contents


def _is_distributed(value: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _part(key: str, value: torch.Tensor, staging: Staging) -> Part:
    """What this rank has of ``value``, kept by ``staging``."""
    from torch.distributed.tensor import DTensor, Shard

    shape = tuple(value.shape)
    offsets, lengths = [0] * len(shape), list(shape)
    local = value
    if isinstance(value, DTensor):
        local = value.to_local()
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Shard):  # of what the axes before have left to this rank
                length = lengths[placement.dim]
                per_rank = -(-length // value.device_mesh.size(axis))
                start = min(value.device_mesh.get_local_rank(axis) * per_rank, length)
                offsets[placement.dim] += start
                lengths[placement.dim] = min(per_rank, length - start)
    return Part(staging.keep(key, local.detach()), shape, tuple(offsets))


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
