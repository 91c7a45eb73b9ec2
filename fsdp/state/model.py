"""State dicts of the three types, saved and loaded through ``nn.Module``'s own walk.

Note [State hooks]
    Every module that holds a managed parameter gets a hook before and after it saves and one before it loads.  So
    ``state_dict()`` of the wrapper, of the wrapped module, of any submodule and of a plain module around them all
    give whole tensors under clean names, and a shard can not be saved by accident.  Saving gathers a unit at a time
    (collective); loading takes this rank's part out of each whole tensor (not collective).
    What no unit manages (ignored parameters and modules) is copied, moved and left out like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..comm.topology import Axes
from ..config import FullStateDictConfig, StateDictSettings, StateDictType
from ..errors import CheckpointError, TrainingStateError, UsageError, describe
from ..flat.handle import FlatParamHandle
from ..names import clean_tensor_name, flat_param_name, join_names
from ..runtime import precision
from ..runtime.full_params import summon_unit
from ..runtime.held import settle_assigned, unit_of, units_in
from ..runtime.unit import Unit
from .elsewhere import completed, find_elsewhere
from .loading import RECEIVED, agree_on_slices, check_loadable, local_misfit, misfit
from .sharded import (
    axes_mesh,
    flat_from_slices,
    local_part,
    local_shard_tensor,
    slice_shards,
    whole_tensor,
)
from .tensor_parallel import along_data, over_tensor_axis, refuse_tensor_parallel, tensor_rank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["StandIn", "StateHooks", "keys_in_order", "standing_in"]

StandIn = Callable[[FlatParamHandle, int], torch.Tensor]
"""What a state dict holds in the place of a parameter, given its handle and its index there."""


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
        stand_in: What sharded ones hold instead of slices, for whom they are but a walk; nothing is moved then.
        left_alone: The modules inside the unit that belong to none.
    """

    def __init__(self, unit: Unit, axes: Axes) -> None:
        self._unit = unit
        self._axes = axes
        self._depth = 0
        self._summon = ExitStack()
        self._slices: dict[tuple[FlatParamHandle, int], torch.Tensor] = {}
        self._loading_local = False
        self.settings = StateDictSettings()
        self.stand_in: StandIn | None = None
        self._entries: dict[nn.Module, list[_Entry]] = {module: [] for module in unit.modules}
        for handle in unit.handles:
            for index, managed in enumerate(handle.params):
                for site in managed.sites:
                    entry = _Entry(handle, index, site.name)
                    self._entries.setdefault(site.module, []).append(entry)
        for module, entries in self._entries.items():
            if entries or module is unit.module or _holds_tensors(module):
                module.register_state_dict_pre_hook(self._before_save)
                # torch marks public hooks with an attribute, which a bound method does not take.
                module.register_state_dict_post_hook(partial(self._after_save))
                module.register_load_state_dict_pre_hook(self._before_load)
        self.left_alone = _modules_left_alone(unit)
        for module in self.left_alone:
            if _holds_tensors(module):
                module.register_state_dict_post_hook(partial(self._after_save_unmanaged))
        unit.module.register_load_state_dict_post_hook(self._after_load)

    @property
    def hooked(self) -> list[nn.Module]:
        """Every module that may carry hooks of this object or its unit, users of tied parameters included."""
        return [*self._entries, *self.left_alone]

    @property
    def _type(self) -> StateDictType:
        """The kind of state dict that is wanted."""
        return self.settings.state_dict_type

    def close(self) -> None:
        """The unit is saved: let its whole parameters go."""
        self._depth = 0
        self._unit.root.open_saves.remove(self.close)
        self._slices = {}
        self._summon.close()

    # -- save ------------------------------------------------------------------------------------------------------

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        unit, root = self._unit, self._unit.root
        root.check_idle("state_dict")
        if self._type is StateDictType.LOCAL_STATE_DICT:
            self._depth = 0
            refuse_tensor_parallel([unit], "LOCAL_STATE_DICT", "Save a SHARDED_STATE_DICT.")
            self._depth = 1
        if unit.summoned and self._type is not StateDictType.FULL_STATE_DICT:
            self._depth = 0
            raise TrainingStateError(
                describe(
                    f"{self._type} was asked for inside summon_full_params, whose changes the shards do not have yet",
                    unit=unit.name,
                    remedy="Save after the context, or ask for FULL_STATE_DICT.",
                ),
                unit=unit.name,
            )
        if (
            not root.open_saves
            and not unit.summoned
            and self._type is not StateDictType.LOCAL_STATE_DICT
        ):
            kind = "" if self._type is StateDictType.FULL_STATE_DICT else f" of {self._type.name}"
            unit.gate.enter(f"state_dict{kind}")
        root.open_saves.append(self.close)
        if self._type is StateDictType.FULL_STATE_DICT:
            self._summon.enter_context(
                summon_unit(
                    unit, writeback=False, rank0_only=False, offload_to_cpu=False, with_grads=False
                )
            )
        else:
            unit.follow_user_changes()
            if self._type is StateDictType.SHARDED_STATE_DICT:
                unit.see_recast()
        if self._type is StateDictType.SHARDED_STATE_DICT and self.stand_in is None:
            self._slices = self._cut_into_slices()

    def _cut_into_slices(self) -> dict[tuple[FlatParamHandle, int], torch.Tensor]:
        with torch.no_grad():
            return {
                (handle, index): self._over_tensor_axis(handle, index, value)
                for handle in self._unit.handles
                for index, value in enumerate(
                    slice_shards(
                        handle,
                        handle.shard,
                        self._unit.shard,
                        axes_mesh(self._axes, handle.device),
                    )
                )
            }

    @staticmethod
    def _over_tensor_axis(handle: FlatParamHandle, index: int, value: DTensor) -> DTensor:
        shard = handle.params[index].tensor_shard
        return value if shard is None else over_tensor_axis(value, shard)

    def _after_save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        managed = self._names_of_others(module)
        for name in self._shown_flat_params(module):
            state_dict.pop(prefix + name, None)
        for entry in self._entries.get(module, ()):
            managed.add(entry.name)
            self._save_entry(entry, state_dict, prefix + entry.name)
        self._save_unmanaged(module, state_dict, prefix, managed)
        if module is self._unit.module and self._type is StateDictType.LOCAL_STATE_DICT:
            self._save_local(state_dict, prefix)
        is_outermost = self._unit.root.open_saves[:1] == [self.close]
        if module is self._unit.module and is_outermost:
            self._complete(state_dict, prefix)
        # At the end alone: outer units look at what they have tied in here, and the first rank wants experts.
        if module is self._unit.module and is_outermost and not self._is_kept_here():
            for key in _below(state_dict, prefix):
                del state_dict[key]
        self._depth -= 1
        if self._depth == 0:
            self.close()

    def _complete(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add what other ranks hold, experts, to a whole state dict; see that each name means one parameter."""
        if self._type is StateDictType.LOCAL_STATE_DICT:
            return
        module = self._unit.module
        everybody_keeps = self._type is StateDictType.FULL_STATE_DICT and not self._is_rank0_only
        try:
            elsewhere = find_elsewhere(
                module, units_in(module), keys_in_order(module), may_clash=everybody_keeps
            )
        except CheckpointError:
            self._unit.root.close_saves()
            raise
        if elsewhere is None or self._type is StateDictType.SHARDED_STATE_DICT:
            return
        config = self.settings.state_dict_config
        to_all = not self._is_rank0_only
        names = [name for name in elsewhere.order if name in elsewhere.here]
        mine = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        found = completed(mine, elsewhere.tree, to_all=to_all)
        values = {key[len(prefix) :]: state_dict.pop(key) for key in _below(state_dict, prefix)}
        values |= {
            name: value.cpu() if config.offload_to_cpu else value for name, value in found.items()
        }
        for name, value in elsewhere.in_order(values).items():
            state_dict[prefix + name] = value

    def _after_save_unmanaged(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        self._save_unmanaged(module, state_dict, prefix, self._names_of_others(module))

    def _save_entry(self, entry: _Entry, state_dict: dict[str, Any], key: str) -> None:
        if self._type is StateDictType.FULL_STATE_DICT:
            self._check_whole(entry, state_dict.get(key), key)
            self._make_whole(entry, state_dict, key)
            self._keep(state_dict, key)
        elif self._type is StateDictType.LOCAL_STATE_DICT:
            state_dict.pop(key, None)
        elif self.stand_in is not None:
            state_dict[key] = self.stand_in(entry.handle, entry.index)
        else:
            state_dict[key] = self._offloaded(self._slices[entry.handle, entry.index])

    def _save_local(self, state_dict: dict[str, Any], prefix: str) -> None:
        holders = self._axes.shard or self._axes.replicate
        assert holders is not None
        for index, handle in enumerate(self._unit.handles):
            is_cut = self._axes.shard is not None
            mesh = axes_mesh(
                Axes(holders if is_cut else None, None if is_cut else holders, holders),
                handle.device,
            )
            tensor = local_shard_tensor(handle.shard, mesh)
            state_dict[prefix + flat_param_name(index)] = self._offloaded(tensor)

    def _save_unmanaged(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, managed: set[str]
    ) -> None:
        """Copy the unit's buffers, in their own dtype; leave parameters and buffers that are ignored as they are."""
        is_ours = module in self._entries
        for name in _torch.buffer_table(module):
            key = prefix + name
            if key in state_dict:
                state_dict[key] = precision.whole_buffer(
                    state_dict[key], self._unit.buffer_masters, (module, name)
                )
                self._keep(state_dict, key, copy=is_ours)
        for name in _torch.parameter_table(module):
            if name not in managed and prefix + name in state_dict:
                self._keep(state_dict, prefix + name, copy=False)

    def names_in(self, module: nn.Module) -> set[str]:
        """What the unit manages of ``module``.  Collective: none."""
        return {entry.name for entry in self._entries.get(module, ())}

    def _names_of_others(self, module: nn.Module) -> set[str]:
        """What another unit manages of a module inside this one: modules may be registered in several places."""
        owners = _torch.owners_of_save_hooks(module)
        others = (it for it in owners if isinstance(it, StateHooks) and it is not self)
        return set().union(*(other.names_in(module) for other in others))

    def _make_whole(self, entry: _Entry, state_dict: dict[str, Any], key: str) -> None:
        """Gather a tensor-parallel parameter over its own ranks too, where one of them keeps it."""
        shard = entry.handle.params[entry.index].tensor_shard
        if shard is not None and self._is_kept_along_data():
            local = shard.local_of(state_dict[key].detach())
            assert local is not None
            state_dict[key] = shard.whole(local)

    def _check_whole(self, entry: _Entry, value: Any, key: str) -> None:
        """See that nothing but the whole parameter is saved, whatever was done to the module.

        Raises:
            UsageError: If it is not, as on the other ranks inside ``summon_full_params(rank0_only=True)``.
        """
        shape = entry.handle.whole_shape(entry.index)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            fqn = entry.handle.fqns[entry.index]
            self._unit.root.close_saves()
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            raise UsageError(
                describe(
                    f"state_dict found {f'a tensor of shape {found}' if found is not None else 'nothing'} under "
                    f"{key!r}: expected the whole parameter of shape {shape}",
                    fqn=fqn,
                    remedy="Inside summon_full_params(rank0_only=True) only rank 0 has it: save outside the context.",
                ),
                fqn=fqn,
            )

    def _is_kept_here(self) -> bool:
        if not self._is_rank0_only:
            return True
        return self._is_kept_along_data() and not tensor_rank(self._unit.root.units)

    def _is_kept_along_data(self) -> bool:
        """Whether this rank keeps the result, or another one of its tensor-parallel ranks."""
        unit = self._unit
        return not self._is_rank0_only or max(unit.shard.rank, unit.replicate.rank) == 0

    @property
    def _is_rank0_only(self) -> bool:
        config = self.settings.state_dict_config
        return isinstance(config, FullStateDictConfig) and config.rank0_only

    def _keep(self, state_dict: dict[str, Any], key: str, *, copy: bool = True) -> None:
        """Replace the view of gathered memory under ``key`` by a copy where it is wanted, or drop it.

        Without ``copy`` memory that is not gathered stays as it is, unless it is to be offloaded.
        """
        if not self._is_kept_here():
            state_dict.pop(key, None)
        elif key in state_dict:
            value = state_dict[key].detach()
            if self.settings.state_dict_config.offload_to_cpu:
                value = value.to("cpu", copy=True)
            elif copy:
                value = value.clone()
            state_dict[key] = value

    def _offloaded(self, value: torch.Tensor) -> torch.Tensor:
        return value.cpu() if self.settings.state_dict_config.offload_to_cpu else value

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
        self._begin_load(module, state_dict, prefix, error_msgs)
        for name in _torch.buffer_table(module):
            master = self._unit.buffer_masters.get((module, name))
            value = state_dict.get(prefix + name)
            if master is not None and value is not None and value.shape == master.shape:
                master.copy_(value.detach())
        for entry in self._entries[module]:
            key = prefix + entry.name
            if self._loading_local and entry.handle.orig_mode:
                state_dict[key] = entry.handle.params[entry.index].param
            elif not self._loading_local:
                self._load_entry(entry, state_dict, key, missing_keys, error_msgs)
        for name, flat_param in self._shown_flat_params(module).items():
            state_dict[prefix + name] = flat_param  # which nn.Module then copies onto itself

    def _begin_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
    ) -> None:
        """What comes before the first module of the unit that is loaded."""
        is_first = module is self._unit.module
        if is_first and not prefix:
            check_loadable(module, state_dict)  # a load that began here and not at the wrapper
        if is_first or not prefix:
            settle_assigned([self._unit])
        if is_first:
            sites = {where: [entry.name for entry in own] for where, own in self._entries.items()}
            agree_on_slices(self._unit, sites, state_dict, prefix)
            self._loading_local = self._load_local(state_dict, prefix, error_msgs)

    def _shown_flat_params(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The flat parameters that ``module`` shows, by name: state dicts know nothing of them."""
        if module is not self._unit.module:
            return {}
        flat_params = {handle.flat_param for handle in self._unit.handles}
        table = _torch.parameter_table(module)
        return {name: param for name, param in table.items() if param in flat_params}

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
            problem = local_misfit(value, handle)
            if problem:
                error_msgs.append(f"size mismatch for {prefix}{flat_param_name(index)}: {problem}")
            else:
                with torch.no_grad():
                    handle.shard.copy_(local_part(value).detach())
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
        problem = "" if value is RECEIVED else misfit(value, handle.whole_shape(index))
        if problem:
            error_msgs.append(f"size mismatch for {key}: {problem}")
        elif value is not RECEIVED:
            self._load_value(entry, value)
        if handle.orig_mode:
            state_dict[key] = handle.params[index].param  # nn.Module then copies it onto itself

    @torch.no_grad()
    def _load_value(self, entry: _Entry, value: torch.Tensor) -> None:
        """Take this rank's part of a whole tensor, or of slices that all ranks hold."""
        from torch.distributed.tensor import DTensor

        handle, index = entry.handle, entry.index
        shard = handle.params[index].tensor_shard
        if shard is not None and isinstance(value, DTensor):
            mesh = axes_mesh(self._axes, handle.device)
            value = along_data(value, shard, handle.layout.slots[index], mesh)
        if isinstance(value, DTensor):
            mesh = axes_mesh(self._axes, handle.device)
            piece = flat_from_slices(handle, index, value, self._unit.shard, mesh)
            if piece is not None:
                span = handle.pieces[index].in_shard
                handle.shard[span.start : span.stop].copy_(piece)
                return
            if shard is not None:
                value = shard.whole(value.full_tensor())
        handle.load_whole(index, whole_tensor(value))


def keys_in_order(model: nn.Module) -> list[str]:
    """The keys that the unwrapped model's state dict may have, in its order.  Collective: none."""
    siblings = {
        site.module: site.siblings
        for unit in units_in(model)
        for handle in unit.handles
        for managed in handle.params
        for site in managed.sites
    }
    keys: dict[str, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = clean_tensor_name(path)
        names = (
            *siblings.get(module, ()),
            *_torch.parameter_table(module),
            *_torch.buffer_table(module),
            "_extra_state",
        )
        keys.update(dict.fromkeys(join_names(prefix, name) for name in names))
    return list(keys)


def _below(state_dict: dict[str, Any], prefix: str) -> list[str]:
    return [key for key in state_dict if key.startswith(prefix)]


def _holds_tensors(module: nn.Module) -> bool:
    return bool(_torch.buffer_table(module)) or bool(_torch.parameter_table(module))


def _modules_left_alone(unit: Unit) -> list[nn.Module]:
    """The modules inside ``unit`` that belong to no unit: the ignored ones."""
    known = set(unit.modules)
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found and unit_of(child) is None:
                if child not in known:
                    found[child] = None
                visit(child)

    visit(unit.module)
    return list(found)


@contextmanager
def standing_in(hooks: Iterable[StateHooks], stand_in: StandIn) -> Iterator[None]:
    """Within the context, sharded state dicts of these units hold what ``stand_in`` gives.  Collective: none."""
    changed = list(hooks)
    for item in changed:
        item.stand_in = stand_in
    try:
        yield
    finally:
        for item in changed:
            item.stand_in = None
