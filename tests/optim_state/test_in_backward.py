"""Steps inside the backward: equal to steps after it, with one unit's gradients in memory.

Oracle: an identical wrapped model whose optimizer steps after each backward, bit by bit.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError, UsageError
from fsdp.optim import apply_optimizer_in_backward
from fsdp.runtime import reduction_queue
from tests.optim_state.worlds import OPTIMIZERS, Form, assert_equal, build, part, unmanaged, wrap
from tests.support.ranks import run_kept_ranks, run_ranks

FORMS = [
    Form(1),
    Form(2),
    Form(3, True, "every"),
    Form(2, True, strategy="NO_SHARD"),
    Form(4, strategy="HYBRID_SHARD"),
]


def pair(form, name="adam-amsgrad", **options):
    """A model that steps in its backward, and its twin that does not."""
    model, twin = wrap(form), wrap(form)
    optimizer, other = (OPTIMIZERS[name](m.parameters()) for m in (model, twin))
    return model, optimizer, apply_optimizer_in_backward(model, optimizer, **options), twin, other


def step_the_rest(model, optimizer):
    """What no unit manages is left to the user; of the units nothing is left."""
    rest = unmanaged(model)
    assert all(param.grad is None for param in set(model.parameters()) - set(rest))
    average(rest)
    optimizer.step()
    optimizer.zero_grad()


def average(params):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def loss_of(model, step, number=0):
    rank = model.rank if hasattr(model, "rank") else 0
    return model(part(10 * number + rank, step)).square().mean()


def same_as_after(form):
    for name in ("adam-amsgrad", "momentum", "adamw-fused"):
        check_same_as_after(form, name)


def check_same_as_after(form, name):
    model, optimizer, _, twin, other = pair(form, name)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
    for step in range(3):
        loss_of(model, step).backward()
        step_the_rest(model, optimizer)
        loss_of(twin, step).backward()
        average(unmanaged(twin))
        other.step()
        other.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_equal(twin.state_dict(), model.state_dict())
    assert_equal(FSDP.optim_state_dict(twin, other), FSDP.optim_state_dict(model, optimizer))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_equals_steps_after_the_backward(form):
    run_kept_ranks(same_as_after, form.world_size, form)


def accumulates(form, steps):
    model, optimizer, applied, twin, other = pair(form, accumulation_steps=steps)
    for step in range(3):
        for number in range(3):
            if steps == 1 and number < 2:
                with model.no_sync():
                    loss_of(model, step, number).backward()
            else:
                loss_of(model, step, number).backward()
            assert applied.steps == step + (number == 2)
            if steps == 1 and number < 2:
                with twin.no_sync():
                    loss_of(twin, step, number).backward()
            else:
                loss_of(twin, step, number).backward()
        step_the_rest(model, optimizer)
        average(unmanaged(twin))
        other.step()
        other.zero_grad()
    assert_equal(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize("steps", [1, 3], ids=["no_sync", "accumulation_steps"])
@pytest.mark.parametrize("form", [Form(2), Form(2, True)], ids=["flat", "orig"])
def test_accumulation_steps_with_the_sum(form, steps):
    run_kept_ranks(accumulates, 2, form, steps)


class _NoStep:
    def step(self):
        """Leave what no unit manages as it is."""

    zero_grad = step


def clips(form):
    model, _, applied, twin, other = pair(form, "momentum", max_norm=0.01)
    before = None
    for step in range(4):
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
        rest = unmanaged(twin)
        for param in rest:  # whose norm is the user's affair
            param.grad = None
        step_the_rest(model, _NoStep())
        norm = twin.clip_grad_norm_(float("inf"))
        for param in twin.parameters():
            if param.grad is not None and before is not None:
                param.grad.mul_(min(1.0, 0.01 / (before + 1e-6)))
        other.step()
        other.zero_grad()
        before = float(norm)
        torch.testing.assert_close(float(applied.norm), before, rtol=1e-5, atol=0)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "form", [Form(2), Form(3, True), Form(4, True, strategy="HYBRID_SHARD")], ids=str
)
def test_clipping_uses_the_norm_of_the_step_before(form):
    run_kept_ranks(clips, form.world_size, form)


def gradients_at_once(form):
    """For each step of a unit the units that have gradients then."""
    model = wrap(form)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    apply_optimizer_in_backward(model, optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            [
                wrapper._unit.name
                for wrapper in FSDP.fsdp_modules(model)
                for handle in wrapper._handles
                if any(param.grad is not None for param in handle.exposed)
            ]
        )
    )
    loss_of(model, 0).backward()
    return seen


@pytest.mark.parametrize("form", [Form(2), Form(2, True)], ids=["flat", "orig"])
def test_gradients_of_one_unit_exist_at_a_time(form):
    stepped = [names for names in run_kept_ranks(gradients_at_once, 2, form)[0] if names]
    assert stepped == [["layers.1"], ["layers.0"], [""]]


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("broken on purpose")


def after_a_failure():
    reduction_queue._SMALL_BYTES = 0  # small units too are reduced one after the other
    reduction_queue._BURST_BYTES[True] = 0
    model, _, applied, *_ = pair(Form(2, wrapping="every"))
    hook = model.module.aside.register_forward_hook(lambda m, i, out: Breaks.apply(out))
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, 0).backward()
    hook.remove()
    assert applied.steps == 0
    for step in range(2):
        loss_of(model, step).backward()
    assert applied.steps == 2
    step_the_rest(model, _NoStep())


def test_a_failed_backward_is_forgotten():
    run_ranks(after_a_failure, 2)


def reductions_at_once(form):
    """The most reductions that hold gradients at a time, of so many units."""
    reduction_queue._SMALL_BYTES = reduction_queue._BURST_BYTES[True] = 0
    model = wrap(form)
    apply_optimizer_in_backward(model, OPTIMIZERS["sgd"](model.parameters()))
    queue, seen = model._unit.root.reductions, []
    for wrapper in FSDP.fsdp_modules(model):
        wrapper._fsdp_wrapped_module.register_full_backward_pre_hook(
            lambda *_: seen.append(len(queue._due) + len(queue._in_flight))
        )
    loss_of(model, 0).backward()
    return max(seen), len(seen)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_unit_waits_for_its_step_at_a_time(world_size, strategy):
    form = Form(world_size, True, "every", strategy=strategy)
    most, units = run_ranks(reductions_at_once, world_size, form)[0]
    assert most == 1 < units - 1


def refuses():
    model, optimizer, applied, *_ = pair(Form(2))
    with pytest.raises(UsageError, match="already applied"):
        apply_optimizer_in_backward(model, optimizer)
    applied.remove()
    loss_of(model, 0).backward()
    assert any(param.grad is not None for param in model.parameters())
    with pytest.raises(UsageError, match="none of the model's parameters"):
        apply_optimizer_in_backward(model, torch.optim.SGD(build().parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="max_norm"):
        apply_optimizer_in_backward(model, optimizer, max_norm=0.0)
    with pytest.raises(ConfigError, match="accumulation_steps"):
        apply_optimizer_in_backward(model, optimizer, accumulation_steps=0)
    with pytest.raises(ConfigError, match="LBFGS"):
        apply_optimizer_in_backward(model, torch.optim.LBFGS(model.parameters()))


def test_misuse_is_refused_and_it_can_be_undone():
    run_kept_ranks(refuses, 2)


class Choosy(nn.Module):
    """Uses one of two layers, as the rank says; with original parameters ranks agree at the end of the backward."""

    def __init__(self):
        super().__init__()
        self.both = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x, choice):
        return self.both[choice](x)


def differing_use():
    torch.manual_seed(0)
    model, twin = (FSDP(copy.deepcopy(Choosy()), use_orig_params=True) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    apply_optimizer_in_backward(model, optimizer)
    for step in range(2):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        model(x, dist.get_rank()).sum().backward()
        twin(x, dist.get_rank()).sum().backward()
        other.step()
        other.zero_grad()
    assert_equal(twin.state_dict(), model.state_dict())
    assert_equal(FSDP.optim_state_dict(twin, other), FSDP.optim_state_dict(model, optimizer))
    assert "both.2.weight" not in FSDP.optim_state_dict(model, optimizer)["state"]


def test_parameters_that_only_some_ranks_used_are_stepped_on_all():
    run_kept_ranks(differing_use, 2)
