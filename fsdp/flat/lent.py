"""Tensors that ``torch.func.functional_call`` lends a module for one call, in the place of its parameters.

To the module they look like parameters that the user has assigned, and torch tells nobody.  A unit that took them over
would lose its own.
"""

from __future__ import annotations

import inspect

__all__ = ["inside_functional_call"]

_LENDER = "torch.nn.utils.stateless"


def inside_functional_call() -> bool:
    """Whether ``functional_call`` is among the callers; looked at only where parameters have changed.

    Collective: none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _LENDER:
            return True
        frame = frame.f_back
    return False
