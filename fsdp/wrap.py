"""Which submodules become units: policies, and the planner that asks them.

A policy is either a :class:`ModuleWrapPolicy`, :class:`CustomPolicy`, a set of module classes, or a function
``policy(module, recurse, nonwrapped_numel) -> bool``: asked with ``recurse=True`` whether to look below ``module``,
with ``recurse=False`` whether to wrap it, given the number of its parameters that are not wrapped yet.  The last
argument may also be called ``unwrapped_params``.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn

from . import _torch
from .errors import ConfigError, ConfigTypeError, FsdpWarning, UnsupportedError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "ParamExecOrderWrapPolicy",
    "TracingConfig",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "select_units",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


# -- policies as functions ---------------------------------------------------------------------------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every submodule.  Collective: none."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int = 0,
    lambda_fn: Callable[[nn.Module], bool] | None = None,
    *,
    unwrapped_params: int = 0,
) -> bool:
    """Wrap every submodule for which ``lambda_fn`` is true; bind ``lambda_fn`` with ``functools.partial``.

    Collective: none.

    Example:
        >>> policy = functools.partial(
        ...     lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)
        ... )
    """
    if lambda_fn is None:
        raise ConfigError(
            "lambda_auto_wrap_policy needs lambda_fn: bind it with functools.partial."
        )
    return True if recurse else lambda_fn(module)


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int = 0,
    module_classes: Iterable[type[nn.Module]] = (),
    *,
    unwrapped_params: int = 0,
) -> bool:
    """Wrap every submodule that is an instance of one of ``module_classes``."""
    return True if recurse else isinstance(module, tuple(module_classes))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int = 0,
    transformer_layer_cls: Iterable[type[nn.Module]] = (),
    *,
    unwrapped_params: int = 0,
) -> bool:
    """Wrap every submodule that is an instance of ``transformer_layer_cls``; bind it with ``functools.partial``.

    Collective: none.
    """
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int | None = None,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    *,
    unwrapped_params: int | None = None,
) -> bool:
    """Wrap a submodule as soon as ``min_num_params`` of its parameters are not wrapped yet.

    Collective: none.

    Args:
        module: The submodule asked about.
        recurse: Whether the question is to look below it, or to wrap it.
        nonwrapped_numel: Its parameters (elements) that no unit below it owns.
        min_num_params: Least number of elements worth a unit.
        force_leaf_modules: Classes not to look into; ``nn.MultiheadAttention`` by default.
        exclude_wrap_modules: Classes not to wrap; containers that are never called by default.
        unwrapped_params: Older name of ``nonwrapped_numel``.
    """
    numel = nonwrapped_numel if nonwrapped_numel is not None else unwrapped_params
    if numel is None:
        raise ConfigError("size_based_auto_wrap_policy needs nonwrapped_numel.")
    leaves = force_leaf_modules
    if leaves is None:
        leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    excluded = exclude_wrap_modules
    if excluded is None:
        excluded = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    large = numel >= min_num_params
    if recurse:
        return large and not isinstance(module, tuple(leaves))
    return large and not isinstance(module, tuple(excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int = 0,
    policies: Sequence[Callable[..., bool]] = (),
    *,
    unwrapped_params: int = 0,
) -> bool:
    """Whether any of ``policies`` says so."""
    return any(_ask(policy, module, recurse, nonwrapped_numel) for policy in policies)


# -- policies as objects -----------------------------------------------------------------------------------------------


class _Policy:
    """A policy that sees the whole tree at once."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap, the root among them if the policy chooses it, each with its keyword arguments."""
        raise NotImplementedError


class ModuleWrapPolicy(_Policy):
    """Wrap every submodule that is an instance of one of ``module_classes``.

    Collective: none.

    Example:
        >>> policy = ModuleWrapPolicy({TransformerBlock})
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = set(module_classes)
        for item in classes:
            if not isinstance(item, type):
                raise ConfigTypeError(
                    f"ModuleWrapPolicy takes module classes but got {item!r}, a {type(item).__name__}."
                )
        self._module_classes = classes

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """The same policy as a function, for ``_or_policy`` and older callers.  Collective: none."""
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __repr__(self) -> str:
        names = sorted(item.__name__ for item in self._module_classes)
        return f"ModuleWrapPolicy({{{', '.join(names)}}})"


class CustomPolicy(_Policy):
    """Wrap every submodule for which ``lambda_fn`` returns True or a dict of constructor arguments of its own.

    Collective: none.

    Example:
        >>> CustomPolicy(
        ...     lambda m: (
        ...         {"sharding_strategy": SHARD_GRAD_OP}
        ...         if m is model.head
        ...         else isinstance(m, Block)
        ...     )
        ... )
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        chosen: dict[nn.Module, dict[str, Any]] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, dict | bool):
                raise ConfigError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer!r} for a {type(module).__name__}."
                )
            if answer is True or (isinstance(answer, dict) and answer):
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


@dataclass(frozen=True)
class TracingConfig:
    """How :class:`ParamExecOrderWrapPolicy` may trace the model; accepted for its name, the order is recorded.

    Attributes:
        tracer: An fx tracer.
        concrete_args: Arguments to trace with.
    """

    tracer: Any = None
    concrete_args: dict[str, Any] | None = None


@dataclass(frozen=True)
class ParamExecOrderWrapPolicy:
    """Wrap as ``init_policy`` says and gather units in the order the last iteration ran them.

    No tracing is needed: every forward records its order, and the next one follows it.

    Attributes:
        init_policy: Which submodules become units.
        tracing_config: Accepted for its name.
    """

    init_policy: Callable[..., bool] | _Policy = always_wrap_policy
    tracing_config: TracingConfig | None = None


# -- asking ------------------------------------------------------------------------------------------------------------


def _ask(policy: Callable[..., Any], module: nn.Module, recurse: bool, numel: int) -> bool:
    """What a policy function answers, under whichever name it takes the number of parameters.

    Raises:
        ConfigError: If the answer is no boolean.
    """
    keyword = _numel_keyword(policy)
    by_name: dict[str, Any] = {} if keyword is None else {keyword: numel}
    answer = policy(module, recurse, *(() if by_name else (numel,)), **by_name)
    if isinstance(answer, bool) or type(answer).__name__ == "bool":
        return bool(answer)
    name = getattr(policy, "__name__", None) or getattr(
        getattr(policy, "func", None), "__name__", repr(policy)
    )
    raise ConfigError(
        f"auto_wrap_policy {name!r} returned {answer!r} (a {type(answer).__name__}) for a "
        f"{type(module).__name__}: expected True or False."
    )


def _numel_keyword(policy: Callable[..., Any]) -> str | None:
    """The name under which ``policy`` takes the number of parameters; None for by position."""
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return None
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    for name in ("nonwrapped_numel", "unwrapped_params"):
        if name in parameters:
            return name
    return "nonwrapped_numel" if takes_any else None


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
                f"Expected {name} to NOT be FullyShardedDataParallel if using an `auto_wrap_policy`. "
                "Wrap it by the policy, or pass no policy."
            )
    policy = _as_policy(policy)
    if isinstance(policy, _Policy):
        picked = policy._run_policy(root, ignored_modules, {})
        picked.pop(root, None)
        chosen = {module: picked[module] for module in _post_order(root) if module in picked}
    else:
        selected = _select(root, policy, ignored_modules, ignored_params)
        chosen = {module: {} for module in selected}
    containers = [module for module in chosen if type(module) in _NEVER_CALLED]
    if containers and not isinstance(policy, _Policy) and policy is always_wrap_policy:
        for module in containers:
            del chosen[module]
    elif containers:
        raise ConfigError(
            f"auto_wrap_policy chose a {type(containers[0]).__name__}, whose forward is never called: choose the "
            "modules in it."
        )
    return _with_uncast_classes(root, chosen, ignored_modules, root_kwargs)


def _as_policy(policy: Any) -> _Policy | Callable[..., bool]:
    if isinstance(policy, set | frozenset | list | tuple):
        return ModuleWrapPolicy(policy)
    if isinstance(policy, _Policy):
        return policy
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


def _select(
    root: nn.Module,
    policy: Callable[..., bool],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> list[nn.Module]:
    """Ask a policy function about every module below ``root``, children before parents."""
    chosen: list[nn.Module] = []
    wrapped: dict[nn.Module, int] = {}

    def numel_of(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param not in ignored_params)

    def visit(module: nn.Module, *, is_root: bool) -> int:
        """Elements below ``module`` that units own afterwards."""
        if module in wrapped:
            return wrapped[module]
        total = numel_of(module)
        below = 0
        if _ask(policy, module, True, total):
            for child in module.children():
                if child not in ignored_modules:
                    below += visit(child, is_root=False)
            if not is_root and _ask(policy, module, False, total - below):
                chosen.append(module)
                below = total
        elif not is_root and _ask(policy, module, False, total):
            chosen.append(module)
            below = total
        wrapped[module] = below
        return below

    visit(root, is_root=True)
    return chosen


def _with_uncast_classes(
    root: nn.Module,
    chosen: dict[nn.Module, dict[str, Any]],
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Make units of their own, computing in full precision, of the classes mixed precision leaves alone."""
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
        f"{sorted({type(module).__name__ for module in uncast})}: these are wrapped as units of their own and "
        "compute in full precision.",
        FsdpWarning,
        stacklevel=4,
    )
    every = {
        **chosen,
        **{module: {**chosen.get(module, {}), "mixed_precision": None} for module in uncast},
    }
    return {module: every[module] for module in _post_order(root) if module in every}


# -- manual wrapping ---------------------------------------------------------------------------------------------------


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
    """
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
    units = _select(module, auto_wrap_policy, ignored_modules, ignored_params)
    done: dict[nn.Module, nn.Module] = {}
    for unit in units:
        _replace_children(unit, done)
        done[unit] = _wrap(unit, wrapper_cls, **kwargs)
    _replace_children(module, done)
    total = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    rest = total - sum(_outermost_numel(module, set(done.values()), ignored_params))
    if not only_wrap_children and _ask(auto_wrap_policy, module, False, rest):
        return _wrap(module, wrapper_cls, **kwargs), total
    return module, total - rest


def _replace_children(root: nn.Module, done: dict[nn.Module, nn.Module]) -> None:
    finished = set(done.values())

    def visit(module: nn.Module) -> None:
        table = _torch.child_table(module)
        for name, child in table.items():
            if child is None or child in finished:
                continue
            visit(child)
            table[name] = done.get(child, child)

    visit(root)


def _outermost_numel(
    module: nn.Module, wrapped: set[nn.Module], ignored_params: set[nn.Parameter]
) -> list[int]:
    if module in wrapped:
        return [sum(param.numel() for param in module.parameters() if param not in ignored_params)]
    return [
        numel
        for child in module.children()
        for numel in _outermost_numel(child, wrapped, ignored_params)
    ]


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Wrap instances of ``module_classes``, for mixed precision's classes in older code."""
    return True if recurse else isinstance(module, tuple(module_classes))
