"""Modules whose parameters somebody else looks after."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedError, describe
from ..names import clean_tensor_name, join_names
from .ignored import Ignored

__all__ = ["check_foreign"]

_TORCH_WRAPPER = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def check_foreign(module: nn.Module, ignored: Ignored) -> None:
    """Refuse scripted modules, whose parameters nobody can exchange, and those that torch's wrapper has sharded.

    Collective: none.

    Raises:
        UnsupportedError: If such a module holds a parameter that is not ignored; it names the parameter.
    """
    for name, child in module.named_modules():
        kind = type(child)
        if isinstance(child, torch.jit.ScriptModule):
            what = (
                "is scripted or traced, so that its parameters can not be exchanged for whole ones"
            )
            remedy = "Wrap the module it was made from, or leave it out with ignored_modules."
        elif (kind.__module__, kind.__name__) == _TORCH_WRAPPER:
            what = "is wrapped with torch's FullyShardedDataParallel already"
            remedy = "Leave torch's wrapper away, or import fsdp.compat.torch_fsdp.install first."
        else:
            continue
        for inner, param in child.named_parameters():
            if param not in ignored.params:
                fqn = clean_tensor_name(join_names(name, inner))
                raise UnsupportedError(
                    describe(f"module {name!r} {what}", fqn=fqn, remedy=remedy), fqn=fqn
                )
