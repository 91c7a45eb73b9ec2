"""Full state dicts, saved and loaded through ``nn.Module``'s own walk.

Note [State hooks]
    Every module that holds a managed parameter gets a hook before and after it saves and one before it loads.  So
    ``state_dict()`` of the wrapper, of the wrapped module, of any submodule and of a plain module around them all
    give whole tensors under clean names, and a shard can not be saved by accident.  Saving gathers a unit at a time
    (collective); loading takes this rank's part out of each whole tensor (not collective).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..config import FullStateDictConfig, StateDictSettings, StateDictType
from ..errors import CheckpointError, describe, name_some
from ..flat.handle import FlatParamHandle
from ..names import flat_param_name
from ..runtime import precision
from ..runtime.full_params import summon_unit
from ..runtime.unit import Unit
from .sharded import local_part, local_shard_tensor, row_shards, whole_tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["StateHooks", "check_loadable"]


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """One managed parameter at one site of a module."""

    handle: FlatParamHandle
    index: int
    name: str


class StateHooks:
    """The saving and loading hooks of one unit (see Note [State hooks]).

    Attributes:
        settings: What kind of state dict is wanted.
    """

    def __init__(self, unit: Unit, group: ProcessGroup | None) -> None:
        self._unit = unit
        self._group = group
        self._depth = 0
        self._summon = ExitStack()
        self._rows: dict[tuple[FlatParamHandle, int], torch.Tensor] = {}
        self._loading_local = False
        self.settings = StateDictSettings()
        self._entries: dict[nn.Module, list[_Entry]] = {module: [] for module in unit.modules}
        for handle in unit.handles:
            for index, managed in enumerate(handle.params):
                for site in managed.sites:
                    entry = _Entry(handle, index, site.name)
                    self._entries.setdefault(site.module, []).append(entry)
        for module, entries in self._entries.items():
            if entries or module is unit.module or _torch.buffer_table(module):
                module.register_state_dict_pre_hook(self._before_save)
                # torch marks public hooks with an attribute, which a bound method does not take.
                module.register_state_dict_post_hook(partial(self._after_save))
                module.register_load_state_dict_pre_hook(self._before_load)
        unit.module.register_load_state_dict_post_hook(self._after_load)

    @property
    def _type(self) -> StateDictType:
        """The kind of state dict; whole tensors where nothing is sharded."""
        wanted = self.settings.state_dict_type
        return wanted if self._unit.shard.size > 1 else StateDictType.FULL_STATE_DICT

    def close(self) -> None:
        """The unit is saved: let its whole parameters go."""
        self._depth = 0
        self._unit.root.open_saves.remove(self.close)
        self._rows = {}
        self._summon.close()

    # -- save ------------------------------------------------------------------------------------------------------

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        wanted = self._type
        root = self._unit.root
        root.check_idle("state_dict")
        if (
            not root.open_saves
            and not self._unit.summoned
            and wanted is not StateDictType.LOCAL_STATE_DICT
        ):
            self._unit.gate.enter("state_dict")
        root.open_saves.append(self.close)
        if self._type is StateDictType.FULL_STATE_DICT:
            self._summon.enter_context(
                summon_unit(
                    self._unit,
                    writeback=False,
                    rank0_only=False,
                    offload_to_cpu=False,
                    with_grads=False,
                )
            )
        elif self._type is StateDictType.SHARDED_STATE_DICT:
            self._rows = self._shard_by_rows()

    def _shard_by_rows(self) -> dict[tuple[FlatParamHandle, int], torch.Tensor]:
        assert self._group is not None
        self._unit.follow_user_changes()
        return {
            (handle, index): rows
            for handle in self._unit.handles
            for index, rows in enumerate(row_shards(handle, handle.shard, self._group))
        }

    def _after_save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for entry in self._entries.get(module, ()):
            self._save_entry(entry, state_dict, prefix + entry.name)
        for name in list(_torch.buffer_table(module)):
            if prefix + name in state_dict:
                state_dict[prefix + name] = precision.restore_dtype(
                    state_dict[prefix + name], self._unit.buffer_dtypes, (module, name)
                )
                self._keep(state_dict, prefix + name)
        if module is self._unit.module and self._type is StateDictType.LOCAL_STATE_DICT:
            assert self._group is not None
            for index, handle in enumerate(self._unit.handles):
                key = prefix + flat_param_name(index)
                state_dict[key] = local_shard_tensor(handle.shard, self._group)
        self._depth -= 1
        if self._depth == 0:
            self.close()

    def _save_entry(self, entry: _Entry, state_dict: dict[str, Any], key: str) -> None:
        if self._type is StateDictType.FULL_STATE_DICT:
            self._keep(state_dict, key)
        elif self._type is StateDictType.LOCAL_STATE_DICT:
            state_dict.pop(key, None)
        else:
            rows = self._rows[entry.handle, entry.index]
            offload = self.settings.state_dict_config.offload_to_cpu
            state_dict[key] = rows.cpu() if offload else rows

    def _keep(self, state_dict: dict[str, Any], key: str) -> None:
        """Replace the view of gathered memory under ``key`` by a copy where it is wanted, or drop it."""
        config = self.settings.state_dict_config
        rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        if rank0_only and max(self._unit.shard.rank, self._unit.replicate.rank) != 0:
            state_dict.pop(key, None)
        elif key in state_dict:
            value = state_dict[key].detach()
            state_dict[key] = value.to("cpu", copy=True) if config.offload_to_cpu else value.clone()

    # -- load ------------------------------------------------------------------------------------------------------

    def _before_load(  # noqa: PLR0913 the signature torch calls
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._unit.summoned:
            return
        self._unit.root.recover()
        if module is self._unit.module:
            self._loading_local = self._load_local(state_dict, prefix, error_msgs)
        for entry in self._entries[module]:
            key = prefix + entry.name
            if self._loading_local and entry.handle.orig_mode:
                state_dict[key] = entry.handle.params[entry.index].param
            elif not self._loading_local:
                self._load_entry(entry, state_dict, key, missing_keys, error_msgs)

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._loading_local = False

    def _load_local(self, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]) -> bool:
        """Load flat shards, if that is what the dict holds; whether it did."""
        found = False
        for index, handle in enumerate(self._unit.handles):
            value = state_dict.pop(prefix + flat_param_name(index), None)
            if value is None:
                continue
            found = True
            shard = local_part(value)
            if shard.shape == handle.shard.shape:
                handle.shard.copy_(shard.detach())
            else:
                error_msgs.append(
                    f"size mismatch for {prefix}{flat_param_name(index)}: the checkpoint holds a shard of "
                    f"{tuple(shard.shape)}, this rank's is {tuple(handle.shard.shape)}; local state dicts load only "
                    "at the same world size and wrapping."
                )
        return found

    def _load_entry(
        self,
        entry: _Entry,
        state_dict: dict[str, Any],
        key: str,
        missing_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        handle, index = entry.handle, entry.index
        if key not in state_dict:
            if not handle.orig_mode:
                missing_keys.append(key)
            return
        value = state_dict.pop(key)
        problem = _misfit(value, handle.layout.slots[index].shape)
        if problem:
            error_msgs.append(f"size mismatch for {key}: {problem}")
        else:
            with torch.no_grad():
                handle.load_whole(index, whole_tensor(value))
        if handle.orig_mode:
            state_dict[key] = handle.params[index].param  # nn.Module then copies it onto itself


def _misfit(value: Any, shape: tuple[int, ...]) -> str:
    if not isinstance(value, torch.Tensor):
        return f"the checkpoint holds a {type(value).__name__}, not a tensor."
    if tuple(value.shape) == shape or (not shape and value.shape == (1,)):
        return ""
    return (
        f"copying a param with shape {value.shape} from checkpoint, the shape in current model is "
        f"{torch.Size(shape)}."
    )


def check_loadable(units: Iterable[Unit], state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise before anything is changed if a tensor has the wrong shape or tied names have different values.

    Collective: none; every rank holds the same dict and comes to the same result.

    Raises:
        CheckpointError: Naming every parameter that does not fit, with both shapes.
    """
    problems = []
    for unit in units:
        for handle in unit.handles:
            for managed, slot in zip(handle.params, handle.layout.slots, strict=True):
                names = [unit_key(prefix, unit, site.fqn) for site in managed.sites]
                present = [name for name in names if name in state_dict]
                for name in present:
                    problem = _misfit(state_dict[name], slot.shape)
                    if problem:
                        problems.append(f"size mismatch for {name}: {problem}")
                if not problems and len(present) > 1:
                    problems.extend(_tie_conflict(present, state_dict))
    if problems:
        listed = "\n\t".join(problems)
        raise CheckpointError(f"Error(s) in loading state_dict:\n\t{listed}")


def unit_key(prefix: str, unit: Unit, fqn: str) -> str:
    """State-dict key of the parameter ``fqn`` of ``unit``.  Collective: none."""
    return ".".join(part for part in (prefix.rstrip("."), unit.name, fqn) if part)


def _tie_conflict(names: list[str], state_dict: Mapping[str, Any]) -> list[str]:
    first = state_dict[names[0]]
    for name in names[1:]:
        other = state_dict[name]
        if other is not first and type(other) is torch.Tensor and not torch.equal(other, first):
            return [
                describe(
                    f"{name_some(names)} are one tied parameter but have different values",
                    remedy="Keep one of the names, or make the values equal.",
                )
            ]
    return []
