"""transformers' ``Trainer`` decays the parameters it means to.

It compares names that it puts together from ``named_children()``, so with the wrapper's own child in them, to those of
``named_parameters()``, which are clean in our wrapper.  None would be equal, and no parameter decayed.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from ..names import clean_tensor_name
from .imports import replace_everywhere

__all__ = ["teach_transformers"]


def teach_transformers(module: ModuleType, wrapper: Any) -> None:
    """Let ``get_parameter_names`` give clean names for our wrapper.  Collective: none."""
    asked = module.get_parameter_names

    @functools.wraps(asked)
    def names_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
        names: list[str] = asked(model, *args, **kwargs)
        return [*map(clean_tensor_name, names)] if isinstance(model, wrapper) else names

    replace_everywhere(module, "get_parameter_names", names_of)
