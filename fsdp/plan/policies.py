"""Policies: what chooses the submodules that become units, and how it is asked.

A policy is either a :class:`ModuleWrapPolicy`, :class:`CustomPolicy`, a set of module classes, or a function
``policy(module, recurse, nonwrapped_numel) -> bool``: asked with ``recurse=True`` whether to consider ``module`` and
what is below it at all, then, after its children, with ``recurse=False`` whether to wrap it, given the elements of
its parameters that no unit below it owns.  The last argument may also be called ``unwrapped_params``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..errors import ConfigError, ConfigTypeError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "ParamExecOrderWrapPolicy",
    "TracingConfig",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

_NUMEL_NAMES = ("nonwrapped_numel", "unwrapped_params")


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

    Raises:
        ConfigError: If ``lambda_fn`` is missing.

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
    classes = _class_tuple("module_classes", module_classes)
    return True if recurse else isinstance(module, classes)


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

    Raises:
        ConfigTypeError: If ``transformer_layer_cls`` holds something else than classes.

    Example:
        >>> policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    """
    classes = _class_tuple("transformer_layer_cls", transformer_layer_cls)
    return True if recurse else isinstance(module, classes)


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
        force_leaf_modules: Classes neither to wrap nor to look into, so that they stay with the module above;
            ``nn.MultiheadAttention`` by default, which uses its children's parameters without calling them.
        exclude_wrap_modules: Classes not to wrap; containers that are never called by default.
        unwrapped_params: Older name of ``nonwrapped_numel``.

    Raises:
        ConfigError: If neither count is given.

    Example:
        >>> policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
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
    return any(_Question(policy, module)(module, recurse, nonwrapped_numel) for policy in policies)


def _class_tuple(name: str, classes: Iterable[type]) -> tuple[type, ...]:
    """``classes`` as ``isinstance`` takes them; one class counts as a set of one."""
    found = (classes,) if isinstance(classes, type) else tuple(classes)
    for item in found:
        if not isinstance(item, type):
            raise ConfigTypeError(
                f"{name} takes module classes but got {item!r}, a {type(item).__name__}."
            )
    return found


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

    Raises:
        ConfigTypeError: If ``module_classes`` holds something else than classes.

    Example:
        >>> policy = ModuleWrapPolicy({TransformerBlock})
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(_class_tuple("ModuleWrapPolicy", module_classes))

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

    An empty dict counts as False.  Collective: none.

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
            if not isinstance(answer, dict) and not _is_bool(answer):
                raise ConfigError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer!r} for {_place(root_module, module)}."
                )
            if answer:
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


class _Question:
    """A policy function, called the way its signature wants, with checked answers.

    Args:
        policy: The function.
        root: Where it is asked, for the names in messages.

    Raises:
        ConfigTypeError: If ``policy`` can not be called with the three arguments of a policy.
    """

    def __init__(self, policy: Callable[..., Any], root: nn.Module) -> None:
        self._policy = policy
        self._name = _policy_name(policy)
        self._by_name = _arguments_by_name(policy, self._name)
        self._root = root

    def __call__(self, module: nn.Module, recurse: bool, numel: int) -> bool:
        """What the policy answers.

        Raises:
            ConfigError: If that is no boolean.
        """
        args, kwargs = _arguments((module, recurse, numel), self._by_name)
        answer = self._policy(*args, **kwargs)
        if _is_bool(answer):
            return bool(answer)
        raise ConfigError(
            f"auto_wrap_policy {self._name!r} returned {answer!r} (a {type(answer).__name__}) for "
            f"{_place(self._root, module)}: expected True or False."
        )


def _arguments_by_name(policy: Any, name: str) -> tuple[str, ...]:
    """Names of the last arguments of ``policy``: as many as its signature takes by name, the others by position."""
    if not callable(policy):
        raise ConfigTypeError(f"auto_wrap_policy holds {policy!r}: expected a function.")
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):  # builtins without a signature
        return ()
    counts = [item for item in _NUMEL_NAMES if item in signature.parameters] or _NUMEL_NAMES[:1]
    choices = [
        names
        for count in counts
        for names in (("module", "recurse", count), ("recurse", count), (count,))
    ]
    for by_name in (*choices, ()):
        args, kwargs = _arguments((None, False, 0), by_name)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return by_name
    raise ConfigTypeError(
        f"auto_wrap_policy {name!r} takes {signature}: expected (module, recurse, nonwrapped_numel). "
        "Bind further arguments with functools.partial."
    )


def _arguments(
    values: tuple[Any, ...], by_name: tuple[str, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The three arguments of a policy, the last ones under the names given."""
    first = len(values) - len(by_name)
    return values[:first], dict(zip(by_name, values[first:], strict=True))


def _is_bool(answer: object) -> bool:
    """Python's booleans and numpy's, which are no subclass."""
    return isinstance(answer, bool) or type(answer).__name__ in ("bool", "bool_")


def _function_of(policy: Any) -> Any:
    """What ``functools.partial`` was put around."""
    while isinstance(policy, partial):
        policy = policy.func
    return policy


def _policy_name(policy: Any) -> str:
    return getattr(_function_of(policy), "__name__", None) or repr(policy)


def _place(root: nn.Module, module: nn.Module) -> str:
    """``module`` in words: its name below ``root``, if it is not ``root`` itself, and its class."""
    kind = f"a {type(module).__name__}"
    name = next((name for name, child in root.named_modules() if child is module), "")
    return f"{name!r} ({kind})" if name else kind
