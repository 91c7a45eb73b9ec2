"""``ignored_modules`` and ``ignored_states`` as sets: what they take in, by identity, and what they refuse."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fsdp.errors import ConfigError, ConfigTypeError, FsdpWarning
from fsdp.init.ignored import resolve_ignored


class Wrapper(nn.Module):
    """Stands for the real wrapper."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


def resolve(root, modules=None, states=None):
    return resolve_ignored(
        root, modules, states, is_wrapped=lambda module: isinstance(module, Wrapper)
    )


def model():
    return nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    )


@pytest.mark.parametrize("given", [None, [], (), iter([])], ids=lambda given: type(given).__name__)
def test_nothing_given_ignores_nothing(given):
    ignored = resolve(model(), given)

    assert (set(), set(), set()) == (ignored.modules, ignored.params, ignored.buffers)


@pytest.mark.parametrize("argument", ["modules", "states"])
@pytest.mark.parametrize("container", [list, tuple, set, iter, dict.fromkeys])
def test_modules_bring_everything_below_them(argument, container):
    root = model()

    ignored = resolve(root, **{argument: container([root[1]])})

    assert ignored.modules == {root[1], root[1][0], root[1][1]}
    assert ignored.params == set(root[1].parameters())
    assert ignored.buffers == set(root[1].buffers())


def test_parameters_may_be_ignored_one_by_one():
    root = model()

    ignored = resolve(root, states=(param for param in [root[0].weight, root[1][0].bias]))

    assert ignored.params == {root[0].weight, root[1][0].bias}
    assert ignored.modules == ignored.buffers == set()


def test_what_a_wrapper_below_manages_is_not_ignored():
    root = model()
    root[1][0] = Wrapper(root[1][0])

    ignored = resolve(root, [root[1]])

    assert ignored.modules == {root[1], root[1][1]}
    assert ignored.params == set(root[1][1].parameters())


def test_a_tied_parameter_is_ignored_wherever_it_is():
    root = model()
    root[2].weight = root[0].weight

    assert root[2].weight in resolve(root, [root[0]]).params


def test_modules_that_are_equal_are_not_the_same():
    class Equal(nn.Linear):
        def __eq__(self, other):
            return isinstance(other, Equal)

        __hash__ = nn.Module.__hash__

    first, second = Equal(1, 1), Equal(1, 1)

    assert resolve(nn.Sequential(first, second), [first]).params == set(first.parameters())


def test_both_arguments_at_once_are_refused():
    root = model()

    with pytest.raises(ConfigError, match="Cannot pass both ignored_modules and ignored_states"):
        resolve(root, [root[0]], [root[1]])


@pytest.mark.parametrize("argument", ["modules", "states"])
@pytest.mark.parametrize("given", [3, nn.Linear(1, 1), torch.zeros(2), "0.weight"], ids=str)
def test_something_that_is_no_iterable_of_them_is_a_type_error(argument, given):
    with pytest.raises(ConfigTypeError, match=f"`ignored_{argument}` should be an iterable"):
        resolve(model(), **{argument: given})


@pytest.mark.parametrize("argument", ["modules", "states"])
@pytest.mark.parametrize("item", ["0", None, 1, torch.zeros(1), nn.Linear], ids=str)
def test_an_iterable_of_something_else_is_a_type_error_that_says_of_what(argument, item):
    with pytest.raises(ConfigTypeError, match=type(item).__name__) as caught:
        resolve(model(), **{argument: [item]})

    assert isinstance(caught.value, TypeError)
    assert re.search(rf"ignored_{argument} expects .*nn.Module list elements", str(caught.value))


def test_parameters_are_no_modules():
    root = model()

    with pytest.raises(ConfigTypeError, match="Parameter"):
        resolve(root, [root[0].weight])


def test_modules_and_parameters_can_not_be_mixed():
    root = model()

    with pytest.raises(ConfigTypeError, match=r"all nn.Parameter or all nn.Module .*Linear.*Param"):
        resolve(root, states=[root[0], root[1][0].weight])


@pytest.mark.parametrize("argument", ["modules", "states"])
def test_a_wrapper_can_not_be_ignored(argument):
    root = model()
    root[0] = Wrapper(root[0])

    with pytest.raises(ConfigError, match="should not include FSDP modules") as caught:
        resolve(root, **{argument: [root[0]]})

    assert isinstance(caught.value, ValueError)


def test_ignoring_the_top_level_module_is_a_warning_and_done():
    root = model()

    with pytest.warns(FsdpWarning, match="top-level module"):
        ignored = resolve(root, [root])

    assert ignored.modules == set(root.modules())
    assert ignored.params == set(root.parameters())
