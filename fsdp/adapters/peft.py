"""PEFT saves adapters inside units, and loads them on every rank.

It picks the entries of a state dict by the names of modules, from which it takes the wrapper's component away at the
front only: of adapters in inner units it would save none.  When it loads it asks the model's state dict for the keys,
and ranks that ``rank0_only`` leaves without any would load nothing.  Both are silent (and so with torch's wrapper).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from ..names import clean_tensor_name
from .imports import replace_everywhere

__all__ = ["teach_peft", "teach_peft_loading"]

_ASKED = "_get_tuner_state_dict_key_prefixes"  # older versions go by the keys alone


def teach_peft(module: ModuleType, wrapper: Any) -> None:
    """Let PEFT know adapters by the names that state dicts have.  Collective: none."""
    asked = vars(module).get(_ASKED)
    if asked is None:
        return

    @functools.wraps(asked)
    def prefixes_of(model: nn.Module, *args: Any, **kwargs: Any) -> set[str]:
        prefixes: set[str] = asked(model, *args, **kwargs)
        is_wrapped = any(isinstance(child, wrapper) for child in model.modules())
        return {*map(clean_tensor_name, prefixes)} if is_wrapped else prefixes

    replace_everywhere(module, _ASKED, prefixes_of)


def teach_peft_loading(module: ModuleType, wrapper: Any) -> None:
    """Let every rank see the model's keys while adapters are loaded.  Collective: none."""
    asked = module.set_peft_model_state_dict

    @functools.wraps(asked)
    def load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = wrapper.get_state_dict_type(model)
        if not getattr(settings.state_dict_config, "rank0_only", False):
            return asked(model, *args, **kwargs)
        everywhere = replace(settings.state_dict_config, rank0_only=False)
        with wrapper.state_dict_type(
            model, settings.state_dict_type, everywhere, settings.optim_state_dict_config
        ):
            return asked(model, *args, **kwargs)

    replace_everywhere(module, "set_peft_model_state_dict", load)
