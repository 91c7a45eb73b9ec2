"""Where the flat parameters of a unit are registered: on the wrapped module, as the reference's are.

So ``model.module.parameters()`` is all there is to train, as ``model.parameters()`` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .. import _torch
from ..names import flat_param_name
from .handle import FlatParamHandle

__all__ = ["show_flat_params"]


def show_flat_params(
    handles: Sequence[FlatParamHandle], module: nn.Module, wrapper: nn.Module
) -> None:
    """Register the flat parameters of ``handles`` on ``module``; on its ``wrapper`` if their names are taken there.

    Collective: none.
    """
    shown = {flat_param_name(index): handle for index, handle in enumerate(handles)}
    flat_params = {handle.flat_param for handle in handles}
    table = _torch.parameter_table(module)
    taken = {
        name for name, param in table.items() if param is not None and param not in flat_params
    }
    taken.update(vars(module), _torch.buffer_table(module), _torch.child_table(module))
    taken.update(name for name in shown if hasattr(type(module), name))
    if not taken.isdisjoint(shown):
        table = _torch.parameter_table(wrapper)
    for name, handle in shown.items():
        handle.register_flat_param(table, name)
