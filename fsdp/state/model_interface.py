"""The state-dict methods of ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import is_tensor_like

from ..config import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from ..names import COMPILED_MODULE, FSDP_PREFIX, clean_tensor_name
from ..runtime.held import held_params, units_in
from ..runtime.unit import Unit
from .elsewhere import find_elsewhere
from .loading import agree, problem_of, receive_from_first
from .model import StateHooks, keys_in_order
from .types import common_settings, settings_for

if TYPE_CHECKING:
    from ..init.build import BuildArguments

__all__ = ["ModelStateInterface", "clean_incompatible_keys"]


class ModelStateInterface(nn.Module):
    """What every wrapper inherits: saving and loading under the names of the unwrapped model."""

    _unit: Unit
    _state_hooks: StateHooks
    _arguments: BuildArguments
    _fsdp_wrapped_module: nn.Module

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Whole parameters and buffers, copied, under the names they have in the unwrapped model.

        Collective: every rank of every unit's process group.
        """
        if args:
            destination, prefix, keep_vars = (*args, prefix, keep_vars)[:3]
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        try:
            saved: dict[str, Any] = self._fsdp_wrapped_module.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        except BaseException:
            self._unit.root.close_saves()
            raise
        for hook in self._state_dict_hooks.values():
            saved = hook(self, saved, prefix, {}) or saved
        for key in [key for key in saved if f".{COMPILED_MODULE}." in f".{key}"]:
            # Renamed in place, in the order of the walk.
            for later in list(saved)[list(saved).index(key) :]:
                saved[later.replace(f"{COMPILED_MODULE}.", "")] = saved.pop(later)
            break
        if self._state_dict_type is StateDictType.SHARDED_STATE_DICT:
            for key in (prefix + name for name in keys_in_order(self)):
                if key in saved:
                    saved[key] = saved.pop(key)
        return saved

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Within the context, state dicts of every wrapper in ``module`` are of the given type.

        Always put back, also after an exception.  Collective: none; every rank sets the same.

        Args:
            module: A wrapper, or any module that contains some.
            state_dict_type: Whole, local or sharded.
            state_dict_config: How model state dicts are delivered.
            optim_state_dict_config: How optimizer state dicts are delivered.

        Raises:
            UsageError: If a config belongs to another type, or the wrappers' settings differ.
        """
        before = ModelStateInterface.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in _wrappers_in(module):
                wrapper._state_hooks.settings = before  # noqa: SLF001 its own

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of state dicts of every wrapper in ``module``; see :meth:`state_dict_type`.

        Collective: none; every rank sets the same.

        Returns:
            The settings before.
        """
        before = ModelStateInterface.get_state_dict_type(module)
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in _wrappers_in(module):
            wrapper._state_hooks.settings = settings  # noqa: SLF001 its own
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The type of state dicts and how they are delivered.  Collective: none.

        Raises:
            UsageError: If the wrappers' settings differ.
        """
        return common_settings([wrapper._state_hooks.settings for wrapper in _wrappers_in(module)])  # noqa: SLF001 its own

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._state_hooks.settings.state_dict_type

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        broadcast_from_rank0: bool = False,
    ) -> Any:
        """Load whole, local or sharded tensors; every rank takes its part.

        Collective: every rank of the process group, which agree that everything fits before anything is changed.
        Whole tensors move nothing; slices (DTensors) move the elements that lie on other ranks.

        Args:
            state_dict: As :meth:`state_dict` of this or of the unwrapped model gives it, the same on every rank.
            strict: Whether missing and unexpected keys are an error; of a tied parameter one name is enough.
            assign: Accepted for its name; values are always copied into the shards.
            broadcast_from_rank0: Take the values from the first rank's dict, a unit at a time; what the other ranks
                pass is not looked at.

        Returns:
            A named tuple of ``missing_keys`` and ``unexpected_keys``, under clean names.

        Raises:
            CheckpointError: On every rank, if a tensor has the wrong shape on any (nothing is changed then), or, if
                ``strict``, keys are missing or unexpected on any.
            ShardMismatchError: If ranks have slices (DTensors) of different parameters.
            TrainingStateError: During forward or backward.

        Example::

            state = torch.load("model.pt", mmap=True) if model.rank == 0 else {}
            model.load_state_dict(state, broadcast_from_rank0=True)
        """
        self._unit.root.check_idle("load_state_dict")
        axes = self._arguments.axes
        metadata = getattr(state_dict, "_metadata", None)
        state_dict = _with_tensors(state_dict)
        if broadcast_from_rank0:
            state_dict = receive_from_first(self, axes, state_dict)
        else:
            call = "load_state_dict" if strict else "load_state_dict(strict=False)"
            agree(axes, call, problem_of(self, state_dict))
        with_metadata = OrderedDict(_under_actual_names(self, state_dict))
        if metadata is not None:
            with_metadata._metadata = _metadata_for(self, metadata)  # type: ignore[attr-defined]  # noqa: SLF001 its own
        result = super().load_state_dict(with_metadata, strict=False, assign=False)
        self._forgive_tied(result.missing_keys, state_dict)
        units = units_in(self)
        elsewhere = find_elsewhere(self, units, keys_in_order(self), may_clash=True)
        if elsewhere is not None:
            others = elsewhere.others
            result.unexpected_keys[:] = [key for key in result.unexpected_keys if key not in others]
        if strict:
            problem = _strict_problem(self, result.missing_keys, result.unexpected_keys)
            agree(axes, "the end of load_state_dict", problem)
        return result

    def _forgive_tied(self, missing_keys: list[str], state_dict: Mapping[str, Any]) -> None:
        """A name of a tied parameter is not missing if another of its names was given."""
        if missing_keys:
            for held in held_params(self, units_in(self)):
                names = {held.fqn, *held.aliases}
                if len(names) > 1 and not names.isdisjoint(state_dict):
                    missing_keys[:] = [key for key in missing_keys if key not in names]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The wrapper itself holds nothing to save."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """The wrapper itself holds nothing to load; its child finds the keys under its own name."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            rest = key[len(prefix) :]
            if not rest.startswith(FSDP_PREFIX):
                state_dict[prefix + FSDP_PREFIX + rest] = state_dict.pop(key)


def clean_incompatible_keys(module: nn.Module, incompatible: Any) -> None:  # noqa: ARG001 torch's signature
    """A hook that gives missing and unexpected keys the names of the unwrapped model."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = dict.fromkeys(clean_tensor_name(key) for key in keys)


def _with_tensors(state_dict: Any) -> Any:
    """``state_dict`` with tensors in place of what becomes one when it is used, as Lightning's lazy tensors do."""
    items = state_dict.items() if isinstance(state_dict, Mapping) else ()  # torch refuses others
    late = {
        key: torch.clone(value)
        for key, value in items
        if not isinstance(value, torch.Tensor) and is_tensor_like(value)
    }
    return {**state_dict, **late} if late else state_dict


def _under_actual_names(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state_dict`` under the names that compiled submodules have in the tree."""
    prefixes = {
        clean_tensor_name(name): name.replace(FSDP_PREFIX, "")
        for name, _ in wrapper.named_modules()
        if f".{COMPILED_MODULE}." in f".{name}."
    }
    if not prefixes:
        return state_dict
    return {
        f"{prefixes[owner]}.{name}" if (owner := key.rpartition(".")[0]) in prefixes else key: value
        for key, value in state_dict.items()
        for name in [key.rpartition(".")[2]]
    }


def _metadata_for(wrapper: nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Module versions of a state dict, found under the names the wrapped tree has."""
    found = OrderedDict(metadata)
    for name, _ in wrapper.named_modules():
        clean = clean_tensor_name(name)
        if clean in metadata:
            found[name] = metadata[clean]
    return found


def _strict_problem(module: nn.Module, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if not (missing or unexpected):
        return ""
    lines = []
    if unexpected:
        lines.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}. ")
    if missing:
        lines.append(f"Missing key(s) in state_dict: {_quoted(missing)}. ")
    listed = "\n\t".join(lines)
    return f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _wrappers_in(module: nn.Module) -> list[ModelStateInterface]:
    return [child for child in module.modules() if isinstance(child, ModelStateInterface)]
