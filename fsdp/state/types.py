"""What kind of state dict is wanted: the setting, its checks, and how it is put back."""

from __future__ import annotations

from dataclasses import replace

from ..config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_ours,
)
from ..errors import ConfigError, UsageError

__all__ = ["common_settings", "settings_for"]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_for(
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """The settings for one type, with defaults where no config is given.  Collective: none.

    Raises:
        ConfigError: If ``state_dict_type`` is no :class:`StateDictType`.
        UsageError: If a config belongs to another type.
    """
    state_dict_type = as_ours(state_dict_type, StateDictType)
    if not isinstance(state_dict_type, StateDictType):
        raise ConfigError(f"state_dict_type is {state_dict_type!r}: expected a StateDictType.")
    wanted, wanted_optim = _CONFIGS[state_dict_type]
    kinds = [kind for pair in _CONFIGS.values() for kind in pair]
    config = wanted() if state_dict_config is None else as_ours(state_dict_config, *kinds)
    optim_config = (
        wanted_optim()
        if optim_state_dict_config is None
        else as_ours(optim_state_dict_config, *kinds)
    )
    for given, kind in ((config, wanted), (optim_config, wanted_optim)):
        if type(given) is not kind:
            raise UsageError(
                f"Expected state_dict_config of type {kind.__name__} for {state_dict_type} but got "
                f"{type(given).__name__}."
            )
    return StateDictSettings(state_dict_type, config, optim_config)


def common_settings(all_settings: list[StateDictSettings]) -> StateDictSettings:
    """The one setting that all wrappers of a model have.  Collective: none.

    Raises:
        UsageError: If they differ.
    """
    if not all_settings:
        return StateDictSettings()
    first = all_settings[0]
    for other in all_settings[1:]:
        if other != first:
            raise UsageError(
                "All FSDP modules should have the same state_dict settings: found "
                f"{first.state_dict_type} and {other.state_dict_type}, or different configs."
            )
    return replace(first)
