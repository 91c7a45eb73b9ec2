"""Which submodules become units: policies, and the planner that asks them.

A policy is either a :class:`ModuleWrapPolicy`, :class:`CustomPolicy`, a set of module classes, or a function
``policy(module, recurse, nonwrapped_numel) -> bool``: asked with ``recurse=True`` whether to consider ``module`` and
what is below it at all, then, after its children, with ``recurse=False`` whether to wrap it, given the elements of
its parameters that no unit below it owns.  The last argument may also be called ``unwrapped_params``.

Everything goes by identity: a module that is reached by two paths becomes one unit, and a parameter that is tied is
counted once.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
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


# -- planning ----------------------------------------------------------------------------------------------------------


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
        selection = _Selection(policy, root, ignored_modules, ignored_params)
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
class _Selection:
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
        if not self._ask(module, True, _numel(self._params_of(module))):
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
        if not self._ask(module, False, _numel(params - self.params)):
            return
        if is_never_called(module) and self._passes_over:
            return
        self.modules.append(module)
        self.params |= params

    def _params_of(self, module: nn.Module) -> set[nn.Parameter]:
        return {param for param in module.parameters() if param not in self.ignored_params}


def _numel(params: Iterable[nn.Parameter]) -> int:
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
    selection = _Selection(auto_wrap_policy, module, ignored_modules, ignored_params)
    (selection.visit_children_of if only_wrap_children else selection.visit)(module)
    numel = _numel(selection.params)  # before wrapping, which may shard them
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
