"""accelerate loads a sharded optimizer state also into an optimizer that has not stepped yet.

It lets torch.distributed.checkpoint fill the dict that the optimizer gives, in which nothing is before the first step;
so resuming would begin with a fresh optimizer, silently (as it does with torch's wrapper).  The state is made first,
as torch.distributed.checkpoint's own functions make it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from .. import _torch
from .imports import replace_everywhere

__all__ = ["teach_accelerate"]


def teach_accelerate(module: ModuleType, wrapper: Any) -> None:
    """Let ``load_fsdp_optimizer`` have state to fill.  Collective: none."""
    asked = module.load_fsdp_optimizer

    @functools.wraps(asked)
    def load(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_sharded = fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT"
        if is_sharded and any(isinstance(child, wrapper) for child in model.modules()):
            _torch.make_optimizer_state(getattr(optimizer, "optimizer", optimizer))
        return asked(fsdp_plugin, accelerator, optimizer, model, *args, **kwargs)

    replace_everywhere(module, "load_fsdp_optimizer", load)
