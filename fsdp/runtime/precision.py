"""Casting: inputs on the way into a unit, outputs on the way out, modules with a rule of their own, buffers.

Parameters are not cast here: a unit's gather brings each of its handles into that handle's compute dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from .._pytree import iter_tensors, map_tensors
from ..config import MixedPrecision
from ..names import clean_tensor_name

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["DtypeRules", "RuleCasts", "cast_buffers", "cast_inputs", "cast_output", "whole_buffer"]


@dataclass(frozen=True, slots=True)
class DtypeRules:
    """``MixedPrecision.rules`` applied to one model.

    Attributes:
        dtypes: Dtype of every module that a rule holds for.
        boundaries: The modules among them around which tensors are cast: those in no other one of the same dtype.  And
            units that are spared, whose parameters no rule is about.
    """

    dtypes: Mapping[nn.Module, torch.dtype] = field(default_factory=dict)
    boundaries: Mapping[nn.Module, torch.dtype] = field(default_factory=dict)

    def within(self, modules: Collection[nn.Module]) -> DtypeRules:
        """The part of them that holds for ``modules``."""
        return DtypeRules(
            {m: self.dtypes[m] for m in modules if m in self.dtypes},
            {m: self.boundaries[m] for m in modules if m in self.boundaries},
        )

    def copied(self, memo: Mapping[int, Any]) -> DtypeRules:
        """The same for the copies of those modules that ``memo`` knows from a deepcopy."""
        return DtypeRules(
            {memo[id(m)]: dtype for m, dtype in self.dtypes.items() if id(m) in memo},
            {memo[id(m)]: dtype for m, dtype in self.boundaries.items() if id(m) in memo},
        )

    @classmethod
    def of(
        cls, root: nn.Module, policies: Mapping[nn.Module, MixedPrecision], unit: nn.Module
    ) -> DtypeRules:
        """The rules that ``unit``'s policy has for ``root``, whose names its patterns mean.  Collective: none.

        Batch norms follow the dtype of their statistics, with which torch can compute in no other; the module ``unit``
        itself does not: that one was given its policy for itself.  Where it was given none because the root's spares
        its class, what goes into it is cast to the dtype it has, as in the reference.
        """
        policy = policies[unit]
        if not policy.rules and policy.param_dtype is None:
            is_spared = unit is not root and _spares(policies[root], unit)
            dtype = _dtype_of(unit) if is_spared else None
            return cls() if dtype is None else cls(boundaries={unit: dtype})
        dtypes: dict[nn.Module, torch.dtype] = {}
        boundaries: dict[nn.Module, torch.dtype] = {}

        def visit(module: nn.Module, name: str, around: torch.dtype | None) -> None:
            if module in dtypes:
                return
            dtype = _matching_rule(policy, name, module) or around
            if dtype is None and module is not unit:
                dtype = _dtype_of_statistics(policy, module)
            if dtype is not None:
                dtypes[module] = dtype
                if dtype is not around:
                    boundaries[module] = dtype
            for child_name, child in module.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name, dtype)

        visit(root, "", None)
        return cls(dtypes, boundaries)


def _matching_rule(policy: MixedPrecision, name: str, module: nn.Module) -> torch.dtype | None:
    for key, dtype in (policy.rules or {}).items():
        matches = (
            fnmatchcase(clean_tensor_name(name), key)
            if isinstance(key, str)
            else isinstance(module, key)
        )
        if matches:
            return dtype
    return None


def _spares(policy: MixedPrecision, module: nn.Module) -> bool:
    classes = policy._module_classes_to_ignore  # noqa: SLF001 the reference's name
    return policy.param_dtype is not None and isinstance(module, classes)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    tensors = (*module.parameters(), *module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def _dtype_of_statistics(policy: MixedPrecision, module: nn.Module) -> torch.dtype | None:
    if not _spares(policy, module):
        return None
    statistics: torch.Tensor | None = getattr(module, "running_mean", None)
    if statistics is None or statistics.dtype is policy.param_dtype:
        return None
    return statistics.dtype


class RuleCasts:
    """Hooks of one unit that cast what goes into a module with a rule, and back what comes out.

    Args:
        unit: Whose modules they are.
        boundaries: The modules and their dtypes.
    """

    def __init__(self, unit: Unit, boundaries: Mapping[nn.Module, torch.dtype]) -> None:
        self._unit = unit
        self._boundaries = dict(boundaries)
        self._entered: list[torch.dtype | None] = []
        for module, dtype in self._boundaries.items():
            module.register_forward_pre_hook(partial(self._before, dtype), with_kwargs=True)
            module.register_forward_hook(partial(self._after), always_call=True)

    def copied(self, unit: Unit, memo: Mapping[int, Any]) -> RuleCasts:
        """The same for ``unit``, over copied modules, which ``memo`` knows from a deepcopy."""
        return RuleCasts(
            unit, {memo[id(module)]: dtype for module, dtype in self._boundaries.items()}
        )

    @_torch.never_compiled
    def _before(
        self, dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = [t.dtype for t in iter_tensors((args, kwargs)) if t.is_floating_point()]
        self._entered.append(given[0] if given else None)
        if self._unit.in_full_precision:
            return None
        convert = partial(_to_dtype, dtype)
        return map_tensors(convert, args), map_tensors(convert, kwargs)

    @_torch.never_compiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._entered:
            return None  # the forward failed before our own pre-forward hook ran
        dtype = self._entered.pop()
        return None if dtype is None else map_tensors(partial(_to_dtype, dtype), output)


def _to_dtype(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def cast_inputs(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, entering: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Move the inputs of the outermost unit to its device and cast floating ones to the compute dtype.

    The cast is differentiable, so gradients reach whatever produced the input.  Integer and boolean tensors keep
    their dtype.  Returns None where nothing changes.
    """
    policy = unit.config.mixed_precision
    wanted = policy.cast_root_forward_inputs if entering else policy.cast_forward_inputs
    dtype = policy.param_dtype if wanted and not unit.in_full_precision else None
    if dtype is None and not entering:
        return None
    device = unit.config.device

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        to_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.dtype == to_dtype and tensor.device == device:
            return tensor
        return tensor.to(device, to_dtype)

    return map_tensors(convert, args), map_tensors(convert, kwargs)


def cast_output(unit: Unit, output: Any) -> Any:
    """The floating tensors of the outermost unit's ``output`` in ``output_dtype``; None where nothing changes."""
    dtype = unit.config.mixed_precision.output_dtype
    return None if dtype is None else map_tensors(partial(_to_dtype, dtype), output)


def cast_buffers(unit: Unit) -> None:
    """Cast the unit's own floating-point buffers to ``buffer_dtype``, or to that of their module's rule.

    The originals are kept beside, for state dicts.
    """
    if unit.config.mixed_precision.buffer_dtype is None:
        return
    for module, name, buffer in unit.own_buffers():
        dtype = unit.dtype_rules.dtypes.get(module, unit.config.mixed_precision.buffer_dtype)
        if buffer.is_floating_point() and buffer.dtype != dtype:
            unit.buffer_masters[module, name] = buffer
            _torch.buffer_table(module)[name] = buffer.to(dtype)


def whole_buffer(
    saved: torch.Tensor,
    masters: Mapping[tuple[nn.Module, str], torch.Tensor],
    key: tuple[nn.Module, str],
) -> torch.Tensor:
    """``saved`` as it was before :func:`cast_buffers`: every bit of it, unless the model has written to it since."""
    master = masters.get(key)
    if master is None:
        return saved
    rounded = master.to(saved.device, saved.dtype)
    untouched = rounded.shape == saved.shape and torch.equal(rounded, saved)
    return master if untouched else saved.to(master.dtype)
