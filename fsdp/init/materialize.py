"""Meta tensors get memory and values, one module at a time; uninitialised values never get through.

Note [Sentinel]
    ``reset_parameters`` of a module may forget a tensor (a rotary table kept as a non-persistent buffer, say), and
    nobody would notice: fresh memory often looks plausible.  So every tensor is filled with a sentinel first (NaN for
    floating point, the lowest value for integers) and looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .. import _torch
from ..errors import ConfigError, describe, name_some
from ..names import join_names

__all__ = ["materialize_unit"]


@torch.no_grad()
def materialize_unit(
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    *,
    allow_uninitialized: bool = False,
) -> None:
    """Materialise the meta parameters and buffers that each of ``modules`` holds directly.

    Tied parameters stay one object and keep attributes; tensors that are not on the meta device keep their values.

    Collective: none.

    Args:
        modules: Name and module, without the modules of other units.
        device: Where the tensors go.
        param_init_fn: Called with one module at a time; ``reset_parameters`` if None.
        allow_uninitialized: Whether values may be left undefined, because a broadcast follows.

    Raises:
        ConfigError: If ``param_init_fn`` is not callable, or tensors would stay uninitialised; names them.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(f"Expected {param_init_fn!r} (param_init_fn) to be callable.")
    forgotten: list[str] = []
    for name, module in modules:
        forgotten += _materialize_module(name, module, device, param_init_fn)
    if forgotten and not allow_uninitialized:
        raise ConfigError(
            describe(
                f"meta tensors were left uninitialised: {name_some(forgotten)}",
                remedy="Pass param_init_fn, or give the module a reset_parameters() that writes them, or build the "
                "model off the meta device on rank 0 and pass sync_module_states=True.",
            )
        )


def _materialize_module(
    name: str,
    module: nn.Module,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> list[str]:
    """Materialise one module; returns the names of tensors that initialisation did not write."""
    tables = (_torch.parameter_table(module), _torch.buffer_table(module))
    meta = [
        (table, key)
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]
    if not meta:
        return []
    kept = {
        key: tensor.detach().clone()
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and not tensor.is_meta
    }
    if param_init_fn is None:
        for table, key in meta:
            table[key] = _filled(table[key], device)
        # Some of torch's own modules (MultiheadAttention) have only the underscored name.
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if reset is not None:
            reset()
    else:
        # The function may call to_empty() itself, so it gets the module as it is.
        param_init_fn(module)
        for table, key in meta:
            if table[key].is_meta:
                table[key] = _filled(table[key], device)
    for table in tables:
        for key, tensor in table.items():
            if key in kept and tensor is not None:
                tensor.copy_(kept[key])
    return [join_names(name, key) for table, key in meta if _is_sentinel(table[key])]


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like ``tensor`` in real memory, filled with the sentinel; the same object for parameters."""
    empty = torch.empty_like(tensor, device=device)
    empty.fill_(_sentinel(tensor.dtype))
    if not isinstance(tensor, nn.Parameter):
        return empty
    return _torch.materialize_parameter(tensor, empty)


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _is_sentinel(tensor: torch.Tensor) -> bool:
    """Whether the tensor is still filled with the sentinel everywhere (bool tensors can not tell)."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all())
    return bool((tensor == _sentinel(tensor.dtype)).all())
