"""Wrapping by hand, and the policies under their public names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

from torch import nn

from . import _torch
from .errors import ConfigError, ConfigTypeError, UnsupportedError
from .plan.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    ParamExecOrderWrapPolicy,
    TracingConfig,
    _module_wrap_policy,
    _or_policy,
    _Policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from .plan.selection import Selection, numel_of, select_units

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "ParamExecOrderWrapPolicy",
    "TracingConfig",
    "_Policy",
    "_module_wrap_policy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "select_units",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class _ConfigAutoWrap:
    """What :func:`enable_wrap` sets for :func:`wrap`, within its context only."""

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Callable[..., nn.Module] | None] = None
    kwargs: ClassVar[dict[str, Any]] = {}


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Within the context :func:`wrap` wraps with ``wrapper_cls(module, **wrapper_kwargs)``.

    Collective: none.

    Raises:
        UnsupportedError: If contexts are nested.
        ConfigTypeError: If ``wrapper_cls`` can not be called.

    Example:
        >>> with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        ...     layer = wrap(nn.Linear(8, 8))
    """
    if not callable(wrapper_cls):
        raise ConfigTypeError(f"wrapper_cls is {wrapper_cls!r}: expected a wrapper class.")
    if _ConfigAutoWrap.in_autowrap_context:
        raise UnsupportedError(
            "You are already within an autowrap context and nesting is not supported."
        )
    _ConfigAutoWrap.in_autowrap_context = True
    _ConfigAutoWrap.wrapper_cls = wrapper_cls
    _ConfigAutoWrap.kwargs = wrapper_kwargs
    try:
        yield
    finally:
        _ConfigAutoWrap.in_autowrap_context = False
        _ConfigAutoWrap.wrapper_cls = None
        _ConfigAutoWrap.kwargs = {}


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module``, wrapped if within :func:`enable_wrap`; ``wrap_overrides`` win over the context's arguments.

    Collective: as the wrapper's constructor.
    """
    if not _ConfigAutoWrap.in_autowrap_context:
        return module
    assert _ConfigAutoWrap.wrapper_cls is not None
    return _wrap(
        module, _ConfigAutoWrap.wrapper_cls, **{**_ConfigAutoWrap.kwargs, **wrap_overrides}
    )


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """``wrapper_cls(module, **kwargs)``, with what a policy left for this module in ``_wrap_overrides``."""
    overrides = vars(module).get("_wrap_overrides", {})
    return wrapper_cls(module, **{**kwargs, **overrides})


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap submodules with any wrapper class; returns the module (wrapped or not) and the wrapped elements."""
    ignored_modules = ignored_modules or set()
    ignored_params = ignored_params or set()
    if isinstance(wrapper_cls, type):
        for name, child in module.named_modules():
            if child not in ignored_modules and isinstance(child, wrapper_cls):
                raise ConfigError(
                    f"Child module {name} is already wrapped by {wrapper_cls.__name__}."
                )
    selection = Selection(auto_wrap_policy, module, ignored_modules, ignored_params)
    (selection.visit_children_of if only_wrap_children else selection.visit)(module)
    numel = numel_of(selection.params)  # before wrapping, which may shard them
    done: dict[nn.Module, nn.Module] = {}
    for unit in selection.modules:
        _replace_children(unit, done)
        done[unit] = _wrap(unit, wrapper_cls, **kwargs)
    if module not in done:
        _replace_children(module, done)
    return done.get(module, module), numel


def _replace_children(root: nn.Module, done: dict[nn.Module, nn.Module]) -> None:
    """Put the wrappers ``done`` in the places of their modules, wherever below ``root``."""
    for module in [root, *_unwrapped_below(root, set(done.values()))]:
        table = _torch.child_table(module)
        for name, child in table.items():
            if child is not None:
                table[name] = done.get(child, child)


def _unwrapped_below(root: nn.Module, wrappers: set[nn.Module]) -> list[nn.Module]:
    """Modules below ``root`` that are neither wrappers nor inside one."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in wrappers and child not in found:
                found[child] = None
                visit(child)

    visit(root)
    return list(found)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Wrap instances of ``module_classes``, for mixed precision's classes in older code."""
    return True if recurse else isinstance(module, tuple(module_classes))
