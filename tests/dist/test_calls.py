"""Calling a wrapper calls the wrapped module as torch does, whatever others have put around its forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks


class Plain(nn.Linear):
    """A class of our own, which may be changed."""


class Doubled(nn.Linear):
    """Has another way to be called than other modules."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Stood(nn.Module):
    """Stands in a module's place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def by_class(model):
    """The class itself doubles."""


def by_forward_hook(model):
    model.module.register_forward_hook(lambda module, args, output: 2 * output)


def by_pre_hook(model):
    model.module.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def by_pre_hook_with_keywords(model):
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    )


def by_global_hook(model):
    target = model.module
    register_module_forward_hook(
        lambda module, args, output: 2 * output if module is target else None
    )


def by_global_pre_hook(model):
    target = model.module
    register_module_forward_pre_hook(
        lambda module, args: (2 * args[0],) if module is target else None
    )


def by_forward_of_the_instance(model):
    forward = model.module.forward
    model.module.forward = lambda x: 2 * forward(x)


def by_a_module_around_it(model):
    model._fsdp_wrapped_module = Stood(model.module)


def by_compiled_call(model):
    call = model.module._call_impl
    model.module._compiled_call_impl = lambda x: 2 * call(x)


def by_class_changed_later(model):
    type(model.module).__call__ = lambda self, x: 2 * nn.Module.__call__(self, x)


def by_another_class(model):
    model.module.__class__ = Doubled


def by_call_of_the_instance(model):
    call = model.module._call_impl
    model.module._call_impl = lambda x: 2 * call(x)


WAYS = (
    by_class_changed_later,
    by_another_class,
    by_call_of_the_instance,
    by_class,
    by_forward_hook,
    by_pre_hook,
    by_pre_hook_with_keywords,
    by_global_hook,
    by_global_pre_hook,
    by_forward_of_the_instance,
    by_a_module_around_it,
    by_compiled_call,
)


def doubles(way, use_orig_params):
    torch.manual_seed(0)
    module = (Doubled if way is by_class else Plain)(3, 5, bias=False)
    weight = module.weight.detach().clone()
    model = FSDP(module, use_orig_params=use_orig_params)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        if step == 1 or way is by_class:
            way(model)
        factor = 2 if step or way is by_class else 1
        output = model(x)
        torch.testing.assert_close(output, factor * x @ weight.T)
        output.sum().backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_around_the_forward_of_the_wrapped_module_runs(way, use_orig_params):
    run_ranks(doubles, 2, way, use_orig_params)


def counts_backward_hooks(register, is_global):
    model = FSDP(nn.Linear(3, 5))
    seen = []
    target = model.module

    def hook(module, *grads):
        if module is target:
            seen.append(module)

    (register if is_global else getattr(target, register))(hook)
    for _ in range(2):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("register", "is_global"),
    [
        ("register_full_backward_hook", False),
        ("register_full_backward_pre_hook", False),
        (register_module_full_backward_hook, True),
        (register_module_full_backward_pre_hook, True),
    ],
    ids=["hook", "pre_hook", "global_hook", "global_pre_hook"],
)
def test_backward_hooks_of_the_wrapped_module_run(register, is_global):
    run_ranks(counts_backward_hooks, 2, register, is_global)


def another_hook_in_the_place_of_ours():
    model = FSDP(nn.Linear(3, 5))
    seen = []
    model.module._forward_hooks.clear()
    model.module.register_forward_hook(lambda *_: seen.append(1))
    model(torch.ones(2, 3))
    assert seen == [1]


def test_hooks_are_told_apart_and_not_counted():
    run_ranks(another_hook_in_the_place_of_ours, 2)


class Replaces(nn.Linear):
    def forward(self, x):
        self.weight = nn.Parameter(torch.zeros(5, 3))
        raise ValueError("of the user")


def fails_twice(use_orig_params):
    model = FSDP(
        nn.Sequential(Replaces(3, 5)),
        auto_wrap_policy=ModuleWrapPolicy({Replaces}),
        use_orig_params=use_orig_params,
    )
    with pytest.raises(ValueError, match="of the user") as raised:
        model(torch.ones(2, 3))
    assert any("was replaced" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_error_of_the_forward_is_raised_before_what_follows_from_it(use_orig_params):
    run_ranks(fails_twice, 2, use_orig_params)


class Catches(nn.Module):
    def __init__(self):
        super().__init__()
        self.tried = nn.Linear(3, 3)

    def forward(self, x):
        try:
            return self.tried(x)
        except RuntimeError:
            return x


def goes_on_after_a_failed_gather(use_orig_params):
    model = FSDP(
        Catches(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    unit = model.module.tried._unit
    wait = type(unit).wait_unshard

    def out_of_memory(self):
        if self is unit:
            type(unit).wait_unshard = wait  # once
            raise RuntimeError("out of memory")
        wait(self)

    type(unit).wait_unshard = out_of_memory
    x = torch.ones(2, 3)
    torch.testing.assert_close(model(x), x)
    assert model.training_state.name == "IDLE"
    model(x).sum().backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_whose_gather_failed_leaves_the_units_around_it_as_they_were(use_orig_params):
    run_ranks(goes_on_after_a_failed_gather, 2, use_orig_params)


class Fails(nn.Linear):
    def forward(self, x):
        if x.sum() == 0:
            raise ValueError("zeros")
        return super().forward(x)


def goes_on():
    model = FSDP(Fails(3, 5))
    x = torch.ones(2, 3)
    expected = model(x).detach()
    for _ in range(2):
        with pytest.raises(ValueError, match="zeros"):
            model(torch.zeros(2, 3))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_forward_that_raised_leaves_the_unit_as_it_was():
    run_ranks(goes_on, 2)


def events_of_a_profile():
    model = FSDP(nn.Sequential(Fails(3, 5)), auto_wrap_policy=ModuleWrapPolicy({Fails}))
    x = torch.ones(2, 3)
    model(x)
    with torch.profiler.profile(with_stack=True) as profile:
        model(x)
    return {event.name for event in profile.events()}


def test_a_profile_names_wrapped_modules():
    for names in run_ranks(events_of_a_profile, 2):
        assert any("Fails" in name for name in names), sorted(names)
