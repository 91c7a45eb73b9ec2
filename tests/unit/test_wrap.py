"""Which submodules become units: how policies are asked, what they may answer, and what the planner makes of it."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp.config import MixedPrecision
from fsdp.errors import ConfigError, ConfigTypeError, FsdpWarning, UnsupportedError
from fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    ParamExecOrderWrapPolicy,
    TracingConfig,
    _or_policy,
    _Policy,
    _recursive_wrap,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    select_units,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class Wrapper(nn.Module):
    """Stands for the real wrapper."""

    def __init__(self, module, **kwargs):
        super().__init__()
        self.inner = module
        self.kwargs = kwargs


def linear(numel=6):
    """A linear layer with so many parameters."""
    return nn.Linear(numel, 1, bias=False)


def model():
    return nn.Sequential(linear(5), linear(4), nn.Sequential(linear(3), linear(2)))


def plan(root, policy, ignored=(), ignored_params=(), mixed_precision=None, wrapped=()):
    return select_units(
        root,
        policy,
        ignored_modules={module for top in ignored for module in top.modules()},
        ignored_params={param for top in ignored for param in top.parameters()}
        | set(ignored_params),
        root_kwargs={"mixed_precision": mixed_precision},
        is_wrapped=lambda module: module in wrapped,
    )


def names(root, units):
    """Names of ``units`` in order; the first name of a module that has several."""
    by_module = {module: name for name, module in reversed(list(root.named_modules()))}
    return [by_module[module] for module in units]


def wraps(policy, root=None, **kwargs):
    root = model() if root is None else root
    return names(root, plan(root, policy, **kwargs))


def size(minimum, **kwargs):
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum, **kwargs)


# -- how policies are asked ----------------------------------------------------------------------------------------


def new_name(module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel == 3


def old_name(module, recurse, unwrapped_params):
    return recurse or unwrapped_params == 3


def other_name(m, r, n):
    return r or n == 3


def by_position_only(module, recurse, nonwrapped_numel, /):
    return recurse or nonwrapped_numel == 3


def any_position(*args):
    _, recurse, numel = args
    return recurse or numel == 3


def by_name_only(*, recurse, nonwrapped_numel, module):
    return recurse or nonwrapped_numel == 3


def in_another_order(nonwrapped_numel, recurse, module):
    return recurse or nonwrapped_numel == 3


def any_name(module, recurse, **kwargs):
    (numel,) = (kwargs.pop("nonwrapped_numel"),)
    return recurse or (numel == 3 and not kwargs)


def only_names(**kwargs):
    return kwargs["recurse"] or kwargs["nonwrapped_numel"] == 3


def old_name_with_default(module, recurse, unwrapped_params=0, **kwargs):
    assert not kwargs
    return recurse or unwrapped_params == 3


def last_by_name(m, /, recurse, *, nonwrapped_numel):
    return recurse or nonwrapped_numel == 3


def bound_before(wanted, module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel == wanted


class Callable:
    def __call__(self, module, recurse, nonwrapped_numel):
        return recurse or nonwrapped_numel == 3


@pytest.mark.parametrize(
    "policy",
    [
        new_name,
        old_name,
        other_name,
        by_position_only,
        any_position,
        by_name_only,
        in_another_order,
        any_name,
        only_names,
        old_name_with_default,
        last_by_name,
        functools.partial(bound_before, 3),
        Callable(),
        lambda module, recurse, nonwrapped_numel=0, extra=None: new_name(
            module, recurse, nonwrapped_numel
        ),
    ],
    ids=lambda policy: getattr(policy, "__name__", type(policy).__name__),
)
def test_a_policy_is_called_the_way_its_signature_wants(policy):
    assert wraps(policy) == ["2.0"]


def test_how_to_call_a_policy_is_found_out_once():
    class Counting:
        looked = 0

        def __call__(self, module, recurse, nonwrapped_numel):
            return True

        @property
        def __signature__(self):
            type(self).looked += 1
            return None

    wraps(Counting())

    assert Counting.looked == 1


@pytest.mark.parametrize("policy", [lambda module: True, lambda m, r, n, more: True, bound_before])
def test_a_policy_that_can_not_be_called_is_a_type_error_that_shows_its_signature(policy):
    with pytest.raises(ConfigTypeError, match=r"takes \(.*\): expected \(module, recurse"):
        plan(model(), policy)


@pytest.mark.parametrize(
    ("policy", "words"),
    [(3, "int"), ("auto", "str"), (nn.Linear, "class Linear"), (ModuleWrapPolicy, "the class")],
)
def test_something_that_is_no_policy_is_a_type_error(policy, words):
    with pytest.raises(ConfigTypeError, match=words) as caught:
        plan(model(), policy)

    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("answer", [None, 1, 0, "yes", [], {}, torch.tensor(True)], ids=str)
def test_an_answer_that_is_no_boolean_is_an_error_that_names_policy_module_and_answer(answer):
    def undecided(module, recurse, nonwrapped_numel):
        return recurse or answer

    with pytest.raises(ConfigError, match="'undecided'") as caught:
        plan(model(), undecided)

    assert "'0' (a Linear)" in str(caught.value)
    assert repr(answer) in str(caught.value)


@pytest.mark.parametrize(
    "policy",
    [
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: None),
        functools.partial(_or_policy, policies=[lambda module, recurse, n: None]),
        lambda module, recurse, nonwrapped_numel: None,
    ],
    ids=["lambda_fn", "or", "recurse"],
)
def test_no_answer_is_refused_wherever_it_comes_from(policy):
    with pytest.raises(ConfigError, match="returned None"):
        plan(model(), policy)


class bool_:  # what numpy calls its boolean
    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value


def test_booleans_of_numpy_are_booleans():
    assert wraps(lambda module, recurse, n: bool_(recurse or n == 3)) == ["2.0"]
    root = model()
    assert wraps(CustomPolicy(lambda module: bool_(module is root[1])), root) == ["1"]


def test_a_policy_is_asked_about_children_first_and_about_the_root_only_whether_to_look_below():
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((names(root, [module])[0], recurse, nonwrapped_numel))
        return recurse or nonwrapped_numel == 3

    root = model()
    plan(root, policy)

    assert asked == [
        ("", True, 14),
        ("0", True, 5),
        ("0", False, 5),
        ("1", True, 4),
        ("1", False, 4),
        ("2", True, 5),
        ("2.0", True, 3),
        ("2.0", False, 3),
        ("2.1", True, 2),
        ("2.1", False, 2),
        ("2", False, 2),  # its other 3 are in a unit by now
    ]


def test_a_module_that_is_not_to_be_considered_is_neither_wrapped_nor_looked_into():
    def policy(module, recurse, nonwrapped_numel):
        return not (recurse and module is root[2])

    root = model()

    assert wraps(policy, root) == ["0", "1"]


# -- the policies --------------------------------------------------------------------------------------------------


def test_always_wrap_takes_everything_that_is_called():
    root = nn.Sequential(nn.ModuleList([linear()]), nn.ModuleDict({"a": linear()}), model())

    assert wraps(always_wrap_policy, root) == [
        "0.0",
        "1.a",
        *("2.0", "2.1", "2.2.0", "2.2.1", "2.2", "2"),
    ]


@pytest.mark.parametrize(
    ("minimum", "expected"),
    [
        (0, ["0", "1", "2.0", "2.1", "2"]),
        (3, ["0", "1", "2.0"]),
        (4, ["0", "1", "2"]),
        (5, ["0", "2"]),
        (6, []),
        (100, []),
    ],
)
def test_size_wraps_whatever_has_enough_parameters_left(minimum, expected):
    assert wraps(size(minimum)) == expected


def test_size_neither_wraps_nor_opens_attention_and_leaves_it_to_the_module_above():
    root = nn.Sequential(linear(100), nn.Sequential(nn.MultiheadAttention(100, 1)))

    assert wraps(size(40), root) == ["0", "1"]
    assert wraps(size(40, force_leaf_modules=set()), root) == ["0", "1.0.out_proj", "1.0"]


def test_size_passes_over_containers_but_looks_into_them():
    root = nn.Sequential(
        nn.ModuleList([linear(9), linear(2)]),
        nn.ModuleDict({"a": linear(9)}),
        nn.ParameterList([torch.zeros(9)]),
        nn.ParameterDict({"a": torch.zeros(9)}),
    )

    assert wraps(size(5), root) == ["0.0", "1.a"]
    assert wraps(size(5, exclude_wrap_modules={nn.Linear}), root) == []


def test_size_has_its_default_sets_as_attributes():
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES


def test_size_takes_the_count_under_both_names():
    ask = functools.partial(size_based_auto_wrap_policy, linear(), False, min_num_params=5)

    assert ask(nonwrapped_numel=5)
    assert ask(unwrapped_params=5)
    assert not ask(nonwrapped_numel=4)
    with pytest.raises(ConfigError, match="nonwrapped_numel"):
        ask()


CLASSES = [
    ModuleWrapPolicy({nn.Linear}),
    ModuleWrapPolicy([nn.Linear]),
    {nn.Linear},
    frozenset({nn.Linear}),
    [nn.Linear],
    functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
    functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=nn.Linear),
    functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)),
    functools.partial(_wrap_module_cls_individually, module_classes=[nn.Linear]),
    functools.partial(_or_policy, policies=[size(10**6), ModuleWrapPolicy({nn.Linear})]),
    CustomPolicy(lambda module: isinstance(module, nn.Linear)),
    ParamExecOrderWrapPolicy(ModuleWrapPolicy({nn.Linear})).init_policy,
]


@pytest.mark.parametrize("policy", CLASSES, ids=range(len(CLASSES)))
def test_every_way_to_say_a_class_wraps_its_instances(policy):
    class Sub(nn.Linear):
        pass

    root = nn.Sequential(model(), Sub(1, 1), nn.ReLU())

    assert wraps(policy, root) == ["0.0", "0.1", "0.2.0", "0.2.1", "1"]


@pytest.mark.parametrize("classes", [{"Linear"}, "Linear", [linear()], [None]], ids=str)
def test_a_class_given_by_name_or_as_an_instance_is_a_type_error(classes):
    with pytest.raises(ConfigTypeError, match="takes module classes but got"):
        ModuleWrapPolicy(classes)
    with pytest.raises(ConfigTypeError, match="transformer_layer_cls takes module classes"):
        plan(
            model(), functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        )


def test_a_lambda_policy_without_its_lambda_says_so():
    with pytest.raises(ConfigError, match=r"functools\.partial"):
        plan(model(), lambda_auto_wrap_policy)


def test_or_wraps_what_any_policy_wraps_and_looks_where_any_policy_looks():
    def never(*args, **kwargs):
        return False

    root = model()
    policy = functools.partial(_or_policy, policies=[never, size(5), ModuleWrapPolicy({nn.Linear})])

    assert wraps(policy, root) == ["0", "1", "2.0", "2.1"]
    assert wraps(functools.partial(_or_policy, policies=[never]), root) == []


def test_a_custom_policy_gives_some_units_arguments_of_their_own():
    root = model()
    given = {"sharding_strategy": "x", "cpu_offload": "y"}
    answers = {root[0]: given, root[1]: {}, root[2]: True}

    units = plan(root, CustomPolicy(lambda module: answers.get(module, False)))

    assert units == {root[0]: given, root[2]: {}}
    assert units[root[0]] is not given


@pytest.mark.parametrize("answer", [None, 1, "x", []], ids=str)
def test_a_custom_policy_has_to_answer_with_a_boolean_or_a_dict(answer):
    with pytest.raises(ConfigError, match="should return False/True or a kwarg dict") as caught:
        plan(model(), CustomPolicy(lambda module: answer))

    assert repr(answer) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_policy_of_ones_own_sees_the_root_and_what_is_ignored_and_may_not_choose_either():
    root = model()

    class Everything(_Policy):
        def _run_policy(self, root_module, ignored_modules, root_kwargs):
            assert root_module is root
            assert ignored_modules == {root[1]}
            return {module: dict(root_kwargs) for module in root.modules()}

    assert wraps(Everything(), root, ignored=[root[1]]) == ["0", "2.0", "2.1", "2"]
    with pytest.raises(NotImplementedError):
        plan(root, _Policy())


def test_the_order_policy_wraps_everything_unless_told_otherwise():
    assert ParamExecOrderWrapPolicy().init_policy is always_wrap_policy
    assert ParamExecOrderWrapPolicy().tracing_config is None
    assert TracingConfig().concrete_args is None


# -- the planner ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [always_wrap_policy, {nn.Linear, nn.Sequential}])
def test_units_come_inner_first_and_never_hold_the_root(policy):
    assert wraps(policy) == ["0", "1", "2.0", "2.1", "2"]


@pytest.mark.parametrize("policy", [always_wrap_policy, {nn.Linear, nn.Sequential}])
def test_ignored_modules_are_neither_chosen_nor_counted(policy):
    root = model()

    assert wraps(policy, root, ignored=[root[1], root[2]]) == ["0"]
    asked = []
    plan(root, lambda m, r, n: asked.append((m, n)) or True, ignored=[root[2]])
    assert (root, 9) in asked
    assert all(module not in (root[2], root[2][0]) for module, _ in asked)


def test_ignored_parameters_do_not_count():
    root = model()

    assert wraps(size(5), root, ignored_params=[root[0].weight]) == ["2"]


def test_a_module_reached_by_two_paths_is_one_unit_and_counted_once():
    shared = linear(4)
    root = nn.Sequential(nn.Sequential(shared, linear(3)), nn.Sequential(shared, linear(2)))

    units = plan(root, always_wrap_policy)
    asked = {}
    plan(
        root,
        lambda module, recurse, n: asked.update({(module, recurse): n}) or module is not root[0],
    )

    assert list(units).count(shared) == 1
    assert asked[root, True] == 9
    units = plan(root, lambda m, r, n: asked.update({(m, r): n}) or r or m is shared)
    assert list(units) == [shared]
    assert asked[root[0], False] == 3
    assert asked[root[1], False] == 2


def test_a_tied_parameter_is_counted_once():
    first, second = linear(4), linear(4)
    second.weight = first.weight
    root = nn.Sequential(nn.Sequential(first, second, linear(1)))
    asked = {}

    plan(root, lambda m, r, n: asked.update({(m, r): n}) or r or m is first or m is second)

    assert asked[root, True] == 5
    assert asked[root[0], False] == 1


class Listed(nn.ModuleList):
    """No forward of its own."""


class Called(nn.ModuleList):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([linear()]),
        nn.ModuleDict({"a": linear()}),
        nn.ParameterList([torch.zeros(1)]),
        nn.ParameterDict({"a": torch.zeros(1)}),
        Listed([linear()]),
    ],
    ids=lambda container: type(container).__name__,
)
@pytest.mark.parametrize("as_function", [False, True])
def test_choosing_a_container_that_is_never_called_is_an_error_that_names_it(
    container, as_function
):
    root = nn.Sequential(nn.Sequential(container))
    policy = CustomPolicy(lambda module: module is container)
    if as_function:
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m is container)

    with pytest.raises(ConfigError, match=rf"'0\.0' \(a {type(container).__name__}\)"):
        plan(root, policy)


def test_a_container_with_a_forward_may_be_chosen():
    assert wraps({Called}, nn.Sequential(Called([linear()]))) == ["0"]
    assert wraps(always_wrap_policy, nn.Sequential(Called([linear()]))) == ["0.0", "0"]


@pytest.mark.parametrize("policy", [always_wrap_policy, {nn.Linear}], ids=["function", "object"])
def test_a_module_that_is_wrapped_already_is_an_error_that_names_it(policy):
    root = model()

    with pytest.raises(
        ConfigError, match="to NOT be FullyShardedDataParallel if using an `auto_wrap_policy`"
    ) as caught:
        plan(root, policy, wrapped={root[2][1]})

    assert "requires modules to not already have FSDP applied but found 2.1 in" in str(caught.value)


def norms():
    return nn.Sequential(linear(5), nn.BatchNorm1d(1), nn.Sequential(nn.SyncBatchNorm(1)))


def test_batch_norms_become_units_in_full_precision_and_one_warning_says_so():
    root = norms()

    with pytest.warns(FsdpWarning, match=r"\['BatchNorm1d', 'SyncBatchNorm'\]") as caught:
        units = plan(root, {nn.Linear}, mixed_precision=BF16)

    assert len(caught) == 1
    assert names(root, units) == ["0", "1", "2.0"]
    assert list(units.values()) == [{}, {"mixed_precision": None}, {"mixed_precision": None}]


@pytest.mark.parametrize(
    "precision",
    [
        None,
        MixedPrecision(),
        MixedPrecision(reduce_dtype=torch.bfloat16),
        MixedPrecision(torch.bfloat16, _module_classes_to_ignore=()),
    ],
    ids=str,
)
def test_batch_norms_are_ordinary_where_nothing_would_be_cast(precision):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wraps({nn.Linear}, norms(), mixed_precision=precision) == ["0"]


def test_ignored_batch_norms_and_a_batch_norm_at_the_top_become_no_units():
    root = norms()

    assert wraps({nn.Linear}, root, mixed_precision=BF16, ignored=[root[1], root[2]]) == ["0"]
    assert wraps({nn.Linear}, root[1], mixed_precision=BF16) == []


def test_a_precision_that_the_policy_gives_wins():
    root = norms()
    policy = CustomPolicy(lambda m: {"mixed_precision": BF16} if m is root[1] else False)

    with pytest.warns(FsdpWarning):
        units = plan(root, policy, mixed_precision=BF16)

    assert units[root[1]] == {"mixed_precision": BF16}
    assert units[root[2][0]] == {"mixed_precision": None}


trees = st.recursive(
    st.builds(linear, st.integers(1, 9)),
    lambda inner: st.lists(inner, max_size=3).map(lambda kids: nn.Sequential(*kids)),
    max_leaves=8,
)


@given(trees, st.integers(0, 20))
def test_the_size_policy_never_leaves_a_module_with_enough_parameters_of_its_own(tree, minimum):
    root = nn.Sequential(tree)

    units = plan(root, size(minimum))

    def owned(module):
        inner = {p for unit in units if unit is not module for p in below(unit, module)}
        return sum(param.numel() for param in module.parameters() if param not in inner)

    def below(unit, module):
        return unit.parameters() if any(unit is child for child in module.modules()) else ()

    order = list(units)
    for module in root.modules():
        if module is not root:
            assert (module in units) == (owned(module) >= minimum)
        inner = [order.index(child) for child in module.modules() if child in units]
        assert module not in units or order.index(module) == max(inner)


# -- wrapping by hand ----------------------------------------------------------------------------------------------


def test_wrap_does_nothing_outside_its_context_and_after_it():
    module = linear()
    assert wrap(module, anything=1) is module
    with enable_wrap(wrapper_cls=Wrapper):
        pass
    assert wrap(module) is module


def test_wrap_passes_the_arguments_of_the_context_and_its_own_win():
    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped = wrap(linear(), b=3, c=4)

    assert isinstance(wrapped, Wrapper)
    assert wrapped.kwargs == {"a": 1, "b": 3, "c": 4}


def test_the_context_ends_when_an_exception_leaves_it():
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapper):
        raise KeyError

    assert isinstance(wrap(linear()), nn.Linear)


def test_contexts_can_not_be_nested_and_the_outer_one_survives_the_attempt():
    with enable_wrap(wrapper_cls=Wrapper):
        again = enable_wrap(wrapper_cls=Wrapper)
        with pytest.raises(UnsupportedError, match="nesting is not supported") as caught, again:
            pass
        assert isinstance(wrap(linear()), Wrapper)

    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("wrapper", [None, "FSDP", 3])
def test_a_wrapper_that_can_not_be_called_is_a_type_error(wrapper):
    with pytest.raises(ConfigTypeError, match="wrapper_cls"), enable_wrap(wrapper_cls=wrapper):
        pass


def test_a_module_may_carry_overrides_of_its_own():
    module = linear()
    module._wrap_overrides = {"a": 5}

    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        assert wrap(module).kwargs == {"a": 5, "b": 2}


def test_recursive_wrapping_puts_any_wrapper_in_place_and_counts_what_it_wrapped():
    root = model()

    wrapped, numel = _recursive_wrap(root, size(5), Wrapper, only_wrap_children=True, tag=1)

    assert wrapped is root
    assert [type(child) for child in root] == [Wrapper, nn.Linear, Wrapper]
    assert root[0].kwargs == {"tag": 1}
    assert numel == 10


def test_recursive_wrapping_wraps_the_top_as_well_if_the_policy_says_so():
    root = model()

    wrapped, numel = _recursive_wrap(root, always_wrap_policy, Wrapper)

    assert isinstance(wrapped, Wrapper)
    assert wrapped.inner is root
    assert all(isinstance(child, Wrapper) for child in (*root, *root[2].inner))
    assert numel == 14
    assert _recursive_wrap(model(), size(100), Wrapper)[1] == 0


def test_recursive_wrapping_counts_parameters_as_they_were_before_wrapping():
    def shrink(module):
        for param in module.parameters():
            param.data = param.data.flatten()[:1]
        return Wrapper(module)

    assert _recursive_wrap(model(), always_wrap_policy, shrink)[1] == 14


def test_recursive_wrapping_replaces_a_shared_module_in_all_places():
    shared = linear(4)
    root = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m is shared)
    made = []

    _, numel = _recursive_wrap(root, policy, lambda m: made.append(Wrapper(m)) or made[-1])

    assert [root[0][0]] == made
    assert root[0][0] is root[1][0]
    assert numel == 4


def test_recursive_wrapping_leaves_ignored_modules_alone_and_refuses_wrapped_ones():
    root = model()
    _recursive_wrap(root, always_wrap_policy, Wrapper, {root[0]}, set(root[0].parameters()))
    assert isinstance(root[0], nn.Linear)
    assert isinstance(root[1], Wrapper)

    with pytest.raises(ConfigError, match="Child module 1 is already wrapped by Wrapper"):
        _recursive_wrap(root, always_wrap_policy, Wrapper)
