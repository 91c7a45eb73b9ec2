"""``WholeParamOptimizer`` equals the same optimizers over the unwrapped model in one process.

Oracle: that process, on the mean of the ranks' losses, in float64 (Muon itself computes in bfloat16, so a difference of
one rounding in its input may show as one of 2**-8 in an update of size ``lr``; its gradients are exact to 1e-16 here).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, checkpoint
from fsdp.comm.recording import Recording
from fsdp.errors import CheckpointError, ConfigError, UsageError
from fsdp.optim import WholeParamOptimizer
from fsdp.optim.whole_matrices import assign_owners
from fsdp.runtime.held import units_in
from tests.optim_state.worlds import (
    Form,
    assert_equal,
    build,
    one_step,
    part,
    wrap,
)
from tests.support.ranks import run_kept_ranks, run_ranks


class Lamb(torch.optim.Optimizer):
    """A trust ratio of whole parameters; counts its steps in the group, as some do."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["beta"])
                ratio = (param.norm() / (momentum.norm() + 1e-6)).clamp(max=10.0)
                param.sub_(group["lr"] * ratio * momentum)


class Shampoo(torch.optim.Optimizer):
    """Preconditioners of other shapes than the parameter's."""

    stepped: list[tuple[int, ...]] = []  # noqa: RUF012 shapes of what this rank has stepped

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                Shampoo.stepped.append(tuple(param.shape))
                state = self.state[param]
                if not state:
                    state["left"] = torch.eye(param.shape[0], dtype=param.dtype)
                    state["right"] = torch.eye(param.shape[1], dtype=param.dtype)
                state["left"] += param.grad @ param.grad.T
                state["right"] += param.grad.T @ param.grad
                update = torch.linalg.solve(state["left"], param.grad)
                param.sub_(group["lr"] * torch.linalg.solve(state["right"], update.T).T)


ADAMW = {"elementwise": torch.optim.AdamW, "elementwise_options": {"lr": 1e-2, "weight_decay": 0.0}}
KINDS = {
    "muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.0}, ADAMW),
    "shampoo": (Shampoo, {"lr": 0.05}, ADAMW),
    "lamb": (Lamb, {"lr": 0.05}, {}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}, {}),
}


def make(model, kind, **more):
    maker, options, others = KINDS[kind]
    return WholeParamOptimizer(model, maker, **options, **others, **more)


def dense(kind, steps):
    """The oracle's parameters and the two optimizers that made them."""
    model = build()
    maker, options, others = KINDS[kind]
    params = [param for param in model.parameters() if param.requires_grad]
    whole = [param for param in params if not others or param.dim() == 2]
    optimizers = [maker(whole, **options)]
    if others:
        rest = [param for param in params if param.dim() != 2]
        optimizers.append(others["elementwise"](rest, **others["elementwise_options"]))
    for step in range(steps):
        one_step(model, _Both(optimizers), step)
    return model.state_dict()


class _Both:
    def __init__(self, optimizers):
        self.step = lambda: [one.step() for one in optimizers]
        self.zero_grad = lambda: [one.zero_grad() for one in optimizers]


def trained(form, kind, steps=3, states=None, start=0, **more):
    model = wrap(form)
    optimizer = make(model, kind, **more)
    if states is not None:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1]))
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


FORMS = [
    Form(1),
    Form(2),
    Form(3, True, "every"),
    Form(4, True, "root"),
    Form(2, strategy="NO_SHARD"),
    Form(4, strategy="HYBRID_SHARD"),
    Form(4, True, strategy="HYBRID_SHARD"),
    Form(2, True, beside=True),
]


def all_kinds(form, *args):
    """One world for all optimizers; what they are called is in the failure."""
    found = {}
    for kind in KINDS:
        # Flat parameters give unused ones a gradient of zeros, on which Adafactor decays them.
        exposed = kind == "adafactor" and not form.beside
        each = dataclasses.replace(form, use_orig_params=True) if exposed else form
        states = [args[0][kind]] if args else []
        found[kind] = trained(each, kind, 2, *states, start=2 * len(args), bucket_bytes=500)
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_equals_the_optimizers_of_one_process(form):
    for found in run_kept_ranks(all_kinds, form.world_size, form):
        for kind, (actual, _) in found.items():
            assert_near(dense(kind, 2), actual, kind)


def assert_near(expected, actual, kind):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{kind}, {n}: {m}"
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Form(2, True), Form(3, True, "every")),
        (Form(4, True, strategy="HYBRID_SHARD"), Form(1, True)),
        (Form(3), Form(2, True, strategy="NO_SHARD")),
    ],
    ids=str,
)
def test_its_state_travels_between_worlds(first, second):
    states = run_kept_ranks(all_kinds, first.world_size, first)[0]
    for kind, (resumed, _) in run_kept_ranks(all_kinds, second.world_size, second, states)[
        0
    ].items():
        assert_near(dense(kind, 4), resumed, kind)


def stop_and_go_on():
    for kind in KINDS:
        states = trained(Form(2), kind, 2)
        assert_equal(trained(Form(2), kind, 4), trained(Form(2), kind, 2, states, 2), kind)


def test_resuming_in_the_same_form_is_bitwise():
    run_kept_ranks(stop_and_go_on, 2)


def through_a_checkpoint(folder, form, steps, start):
    model = wrap(form)
    optimizer = make(model, "shampoo")
    if start:
        checkpoint.load(folder / "saved", model, optimizer)
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
    if not start:
        checkpoint.save(folder / "saved", model, optimizer)
    return model.state_dict()


def test_its_state_goes_through_checkpoints(tmp_path):
    run_kept_ranks(through_a_checkpoint, 2, tmp_path, Form(2), 2, 0)
    resumed = run_kept_ranks(through_a_checkpoint, 3, tmp_path, Form(3, True, "every"), 2, 2)[0]
    assert_near(dense("shampoo", 4), resumed, "shampoo")


def low_precision():
    """Gradients in another dtype than parameters travel as they are."""
    for use_orig_params in (False, True):
        for keep in (False, True):
            precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=keep)
            model = FSDP(
                build().float(), mixed_precision=precision, use_orig_params=use_orig_params
            )
            sgd = torch.optim.SGD  # takes gradients of any dtype
            optimizer = WholeParamOptimizer(model, sgd, lr=0.1, elementwise=sgd)
            before = model.state_dict()
            model(part(dist.get_rank(), 0)).square().mean().backward()
            optimizer.step()
            after = model.state_dict()
            assert all(value.dtype is torch.float32 for value in after.values())
            assert not torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
            yield after


def compare_low_precision():
    first, *others = low_precision()
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6, msg=name)


def test_mixed_precision_and_low_precision_gradients_work():
    run_kept_ranks(compare_low_precision, 2)


def share_of_work(form):
    model = wrap(form)
    optimizer = make(model, "shampoo", bucket_bytes=500)
    one_step(model, optimizer, 0)
    own = optimizer.state_dict()["state"]
    elements = sum(v.numel() for values in own.values() for v in values.values() if v.dim() == 2)
    whole = FSDP.optim_state_dict(model, optimizer)["state"]
    in_all = sum(
        value.numel() for values in whole.values() if "left" in values for value in values.values()
    )
    return sorted(Shampoo.stepped), elements, in_all


@pytest.mark.parametrize(
    "form",
    [Form(3, True), Form(2, True, strategy="NO_SHARD"), Form(4, True, strategy="HYBRID_SHARD")],
    ids=str,
)
def test_each_matrix_is_stepped_once_in_the_group_and_its_state_kept_once(form):
    shares = run_ranks(share_of_work, form.world_size, form)
    stepped = sorted(shape for share in shares for shape in share[0])
    # All matrices but the unused one, and the ignored one, which every rank steps.
    model = build()
    managed = [
        tuple(param.shape)
        for name, param in model.named_parameters()
        if param.dim() == 2 and not name.startswith(("unused", "frozen", "aside"))
    ]
    assert stepped == sorted(managed + [(5, 5)] * form.world_size)
    beside = 2 * 25 * form.world_size
    assert sum(share[1] for share in shares) - beside == shares[0][2] - 2 * 25
    assert all(share[0] for share in shares)


def launches_and_steps():
    """What one step launches, in order, and when it computes: ``in``, ``out`` or ``step``, with the bucket."""
    model = wrap(Form(2, wrapping="root"))
    events = []
    unit = units_in(model)[0]
    unit.shard = Recording(unit.shard, "", events)
    optimizer = make(model, "shampoo", bucket_bytes=300)
    one_step(model, optimizer, 0)
    events.clear()
    computes = Shampoo.step
    Shampoo.step = lambda self: (events.append("step"), computes(self))[1]
    optimizer.step()
    return [event if event == "step" else event.op for event in events]


def test_the_next_bucket_is_on_its_way_while_one_is_stepped():
    events = run_kept_ranks(launches_and_steps, 2)[0]
    assert events.pop(0) == "all_reduce"  # which parameters have gradients
    assert events.pop(1) == "step"  # the ignored matrix, in place, with the first bucket under way
    buckets = events.count("step")
    assert buckets > 1
    middle = ["exchange", "step", "exchange"] * buckets  # in of the next one, step, out
    assert events == ["exchange", *middle[:-3], "step", "exchange"]


def test_owners_have_equal_work():
    costs = [float(7 + number % 5) for number in range(40)]
    owners = assign_owners(costs, 4)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= max(costs)


def scheduled(form):
    """Schedulers, overrides, a closure, a counter in the group: as with any other optimizer."""
    model = wrap(form)
    optimizer = WholeParamOptimizer(
        model, Lamb, overrides=lambda name, shape: {"lr": 0.0} if "layers.0" in name else {}, lr=0.1
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(2):
        one_step(model, optimizer, step)
        schedule.step()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0]
    assert [group["k"] for group in optimizer.param_groups] == [3, 3]
    after = model.state_dict()
    for name, value in before.items():
        frozen = name.startswith(("layers.0", "unused", "frozen"))
        assert torch.equal(value, after[name]) == frozen, name
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert len(held) == len(set(held))


@pytest.mark.parametrize("form", [Form(2), Form(2, True)], ids=["flat", "orig"])
def test_groups_schedulers_and_closures_work(form):
    run_kept_ranks(scheduled, 2, form)


def versions():
    """A step between a forward and its backward is refused, as with any other optimizer."""
    for use_orig_params, is_whole in itertools.product((False, True), repeat=2):
        model = wrap(Form(2, use_orig_params))
        sgd = torch.optim.SGD
        optimizer = WholeParamOptimizer(
            model, sgd, lr=0.1, elementwise=sgd, whole=lambda name, shape, w=is_whole: w
        )
        one_step(model, optimizer, 0)
        for grad in [param.grad for param in model.parameters() if param.grad is not None]:
            grad.fill_(1.0)
        loss = model(torch.ones(1, 5, dtype=torch.float64)).sum()
        optimizer.step()
        with pytest.raises(UsageError, match="modified in place"):
            loss.backward()


def test_its_writes_are_seen():
    run_kept_ranks(versions, 2)


def refused():
    model = wrap(Form(2, True))
    with pytest.raises(ConfigError, match="embed"):
        WholeParamOptimizer(model, Lamb, whole=lambda name, shape: False)
    with pytest.raises(ConfigError, match="elementwise"):
        WholeParamOptimizer(model, Lamb, elementwise_options={"lr": 1.0})
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        WholeParamOptimizer(model, torch.optim.Muon)
    optimizer = make(model, "muon")
    with pytest.raises(UsageError, match="groups"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(CheckpointError, match="optim_state_dict_to_load"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    one_step(model, optimizer, 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    names = [name for group in saved["param_groups"] for name in group["params"]]
    one_group = {**saved, "param_groups": [{**saved["param_groups"][0], "params": names}]}
    lamb = WholeParamOptimizer(model, Lamb)
    with pytest.raises(CheckpointError, match="another optimizer class"):
        FSDP.optim_state_dict_to_load(model, lamb, one_group)
    partial = functools.partial(torch.optim.Muon, lr=0.5)
    assert WholeParamOptimizer(model, partial, **ADAMW).param_groups[0]["lr"] == 0.5


def test_misuse_is_refused():
    run_kept_ranks(refused, 2)
