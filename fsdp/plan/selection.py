"""Which submodules become units: the planner that asks the policy.

Everything goes by identity: a module that is reached by two paths becomes one unit, and a parameter that is tied is
counted once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from ..errors import ConfigError, ConfigTypeError, FsdpWarning
from .policies import (
    ModuleWrapPolicy,
    _function_of,
    _place,
    _Policy,
    _Question,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)

__all__ = ["Selection", "is_never_called", "numel_of", "select_units"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def select_units(
    root: nn.Module,
    policy: Any,
    *,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    is_wrapped: Callable[[nn.Module], bool],
) -> dict[nn.Module, dict[str, Any]]:
    """The modules below ``root`` that become units, inner ones first, each with the arguments that differ.

    Collective: none.

    Raises:
        ConfigError: If a module is wrapped already, a policy answers with something else than a boolean, or a
            container that is never called is chosen.
        ConfigTypeError: If ``policy`` is no policy.
    """
    for name, module in root.named_modules():
        if is_wrapped(module):
            raise ConfigError(
                f"Expected {name} to NOT be FullyShardedDataParallel if using an `auto_wrap_policy`: "
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in {type(root).__name__}. Leave it to the policy, or pass no policy."
            )
    policy = _as_policy(policy)
    if isinstance(policy, _Policy) or not callable(policy):
        picked = policy._run_policy(root, ignored_modules, {})
        chosen = {
            module: picked[module]
            for module in _post_order(root)
            if module in picked and module is not root and module not in ignored_modules
        }
    else:
        selection = Selection(policy, root, ignored_modules, ignored_params)
        selection.visit_children_of(root)
        chosen = {module: {} for module in selection.modules}
    for module in chosen:
        _check_is_called(module, root)
    return _with_uncast_classes(root, chosen, ignored_modules, root_kwargs)


def _as_policy(policy: Any) -> _Policy | Callable[..., bool]:
    if isinstance(policy, set | frozenset | list | tuple):
        return ModuleWrapPolicy(policy)
    if isinstance(policy, _Policy) or (
        not callable(policy) and callable(getattr(policy, "_run_policy", None))
    ):
        return cast("_Policy", policy)
    if isinstance(policy, type):
        raise ConfigTypeError(
            f"auto_wrap_policy is the class {policy.__name__}: expected a policy or a set of module classes, such as "
            f"{{{policy.__name__}}}."
        )
    if callable(policy):
        return cast("Callable[..., bool]", policy)
    raise ConfigTypeError(
        f"auto_wrap_policy is a {type(policy).__name__}: expected a policy, a function or a set of module classes."
    )


def _post_order(root: nn.Module) -> list[nn.Module]:
    """Every module below ``root``, children before parents, each once, ``root`` last."""
    ordered: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                visit(child)
            ordered.append(module)

    visit(root)
    return ordered


def is_never_called(module: nn.Module) -> bool:
    """Whether ``module`` is a container without a forward: hooks on it would never run."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def _check_is_called(module: nn.Module, root: nn.Module) -> None:
    if is_never_called(module):
        raise ConfigError(
            f"auto_wrap_policy chose {_place(root, module)}, whose forward is never called, so nothing would gather "
            "its parameters: choose the modules in it, or the module that holds it."
        )


@dataclass
class Selection:
    """What a policy function chooses, asked about children before their parents.

    Attributes:
        policy: The function.
        root: The top of the tree.
        ignored_modules: Modules not to ask about.
        ignored_params: Parameters that do not count.
        modules: The chosen modules, inner ones first.
        params: The parameters in them.
    """

    policy: Callable[..., Any]
    root: nn.Module
    ignored_modules: set[nn.Module]
    ignored_params: set[nn.Parameter]
    modules: list[nn.Module] = field(default_factory=list)
    params: set[nn.Parameter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ask = _Question(self.policy, self.root)
        self._seen: set[nn.Module] = set()
        # These two choose by nothing that a user could have meant a container by.
        self._passes_over = _function_of(self.policy) in (
            always_wrap_policy,
            size_based_auto_wrap_policy,
        )

    def visit_children_of(self, module: nn.Module) -> bool:
        """Ask about what is below ``module``; whether the policy wants ``module`` considered at all."""
        self._seen.add(module)
        if not self._ask(module, True, numel_of(self._params_of(module))):
            return False
        for child in module.children():
            if child not in self.ignored_modules and child not in self._seen:
                self.visit(child)
        return True

    def visit(self, module: nn.Module) -> None:
        """Ask about everything below ``module`` and then about itself."""
        if not self.visit_children_of(module):
            return
        params = self._params_of(module)
        if not self._ask(module, False, numel_of(params - self.params)):
            return
        if is_never_called(module) and self._passes_over:
            return
        self.modules.append(module)
        self.params |= params

    def _params_of(self, module: nn.Module) -> set[nn.Parameter]:
        return {param for param in module.parameters() if param not in self.ignored_params}


def numel_of(params: Iterable[nn.Parameter]) -> int:
    """Elements of all of ``params``.  Collective: none."""
    return sum(param.numel() for param in params)


def _with_uncast_classes(
    root: nn.Module,
    chosen: dict[nn.Module, dict[str, Any]],
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Make units of their own, computing in full precision, of the classes mixed precision leaves alone.

    A precision that the policy itself gives such a module wins.
    """
    precision = root_kwargs.get("mixed_precision")
    if precision is None or (precision.param_dtype is None and precision.buffer_dtype is None):
        return chosen
    classes = tuple(precision._module_classes_to_ignore)
    uncast = [
        module
        for module in _post_order(root)
        if module is not root and module not in ignored_modules and isinstance(module, classes)
    ]
    if not uncast:
        return chosen
    warnings.warn(
        "Both mixed precision and an `auto_wrap_policy` were given for a model with submodules of type "
        f"{sorted({type(module).__name__ for module in uncast})}. These modules will be wrapped as separate units "
        "with mixed precision disabled.",
        FsdpWarning,
        stacklevel=5,  # where the user wraps: below are the constructor, plan_overrides and select_units
    )
    every = {
        **chosen,
        **{module: {"mixed_precision": None, **chosen.get(module, {})} for module in uncast},
    }
    return {module: every[module] for module in _post_order(root) if module in every}
