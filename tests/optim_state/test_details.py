"""Groups, schedulers, absent state; what moves and in how many launches; what memory loaded tensors have."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullOptimStateDictConfig, StateDictType, checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm.recording import Recording
from tests.optim_state.worlds import OPTIMIZERS, Form, assert_equal, one_step, wrap
from tests.support.ranks import run_kept_ranks, run_ranks

MAKERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
}


def make(form, name):
    """Three groups, one of them empty, one with a key of the user's, under a scheduler."""
    model = wrap(form)
    named = list(model.named_parameters())
    first = [p for n, p in named if "layers.0" in n or n == "flat_param"]
    rest = [p for _, p in named if not any(p is other for other in first)]
    groups = [
        {"params": first, "lr": 0.03, "mine": {"kept": [1, 2]}},
        {"params": []},
        {"params": rest, "weight_decay": 0.1},
    ]
    optimizer = MAKERS[name](groups)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def run(made, steps, start=0):
    model, optimizer, schedule = made
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
        schedule.step()
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer), schedule.state_dict()


def stop_and_go_on(form, name):
    expected = run(make(form, name), 5)
    model_state, optim_state, schedule_state = run(make(form, name), 2)
    before = copy.deepcopy(optim_state)
    again = model, optimizer, schedule = make(form, name)
    model.load_state_dict(model_state)
    local = FSDP.optim_state_dict_to_load(model, optimizer, optim_state)
    optimizer.load_state_dict(local)
    schedule.load_state_dict(schedule_state)
    assert_equal(before, optim_state)
    assert_equal(expected, run(again, 3, 2))
    groups = expected[1]["param_groups"]
    assert groups[0]["mine"] == {"kept": [1, 2]}
    assert [group["initial_lr"] for group in groups] == [0.03, 0.1, 0.1]
    assert groups[1]["params"] == []
    assert not any("frozen" in fqn for fqn in expected[1]["state"])
    if form.use_orig_params:
        assert not any("unused" in fqn for fqn in expected[1]["state"])
    if name == "sgd":
        assert all(values == {"momentum_buffer": None} for values in expected[1]["state"].values())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("form", [Form(2), Form(2, True), Form(3, True, "every")], ids=str)
def test_groups_schedulers_and_absent_state_survive_bitwise(form, name):
    run_kept_ranks(stop_and_go_on, form.world_size, form, name)


def groups_in_another_order(form):
    model, optimizer, _ = made = make(form, "amsgrad")
    saved = run(made, 1)[1]
    first, _, rest = (group["params"] for group in optimizer.param_groups)
    swapped = torch.optim.AdamW([{"params": rest}, {"params": first}], lr=0.9)
    FSDP.optim_state_dict_to_load(model, swapped, saved, load_directly=True)
    assert [group["lr"] for group in swapped.param_groups] == [0.05, 0.015]
    assert swapped.param_groups[1]["mine"] == {"kept": [1, 2]}
    assert_equal(saved["state"], FSDP.optim_state_dict(model, swapped)["state"])


@pytest.mark.parametrize("form", [Form(2), Form(2, True)], ids=["flat", "orig"])
def test_groups_are_found_by_the_names_in_them(form):
    run_kept_ranks(groups_in_another_order, 2, form)


def launches(form, name, *, rank0_only=False, sharded=False):
    """Launches of one save, by kind, on this rank."""
    model = wrap(form)
    optimizer = OPTIMIZERS[name](model.parameters())
    one_step(model, optimizer, 0)
    events = []
    units = [wrapper._unit for wrapper in FSDP.fsdp_modules(model)]
    for unit in units:
        unit.shard = Recording(unit.shard, unit.name, events)
    if sharded:
        FSDP.sharded_optim_state_dict(model, optimizer)
    else:
        with FSDP.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            optim_state_dict_config=FullOptimStateDictConfig(rank0_only=rank0_only),
        ):
            FSDP.optim_state_dict(model, optimizer)
    return [(event.op, event.unit) for event in events], len(units)


@pytest.mark.parametrize("form", [Form(2), Form(2, True)], ids=["flat", "orig"])
@pytest.mark.parametrize("how", [{}, {"rank0_only": True}, {"sharded": True}], ids=str)
def test_launches_do_not_grow_with_the_number_of_state_tensors(form, how):
    one, units = run_kept_ranks(launches, 2, form, "momentum", **how)[0]
    three, _ = run_kept_ranks(launches, 2, form, "adam-amsgrad", **how)[0]
    assert one == three
    assert len(one) == 2 + units  # two for the descriptions, then one a unit


def fresh_and_loaded(form):
    model = wrap(form)
    fresh = OPTIMIZERS["adam-amsgrad"](model.parameters())
    one_step(model, fresh, 0)
    loaded = OPTIMIZERS["adam-amsgrad"](model.parameters())
    FSDP.optim_state_dict_to_load(
        model, loaded, FSDP.optim_state_dict(model, fresh), load_directly=True
    )
    for param, values in fresh.state.items():
        for name, value in values.items():
            other = loaded.state[param][name]
            assert (value.shape, value.stride(), value.dtype, value.device) == (
                other.shape, other.stride(), other.dtype, other.device,
            ), name  # fmt: skip
            assert other.untyped_storage().nbytes() == value.untyped_storage().nbytes()


@pytest.mark.parametrize("form", [Form(2), Form(2, True), Form(1, True)], ids=str)
def test_loaded_state_lies_in_memory_as_fresh_state_does(form):
    run_kept_ranks(fresh_and_loaded, form.world_size, form)


def counters_of_scalars(form):
    """``eta`` is one number a parameter, also of the one that has no dimensions; ``ax`` is not."""
    model = wrap(form)
    optimizer = OPTIMIZERS["asgd"](model.parameters())
    one_step(model, optimizer, 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert saved["state"]["layers.0.scale"]["ax"].shape == ()
    local = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in local["state"].items():
        for name, value in optimizer.state[params[number]].items():
            assert values[name].shape == value.shape, name


@pytest.mark.parametrize("form", [Form(2, True), Form(1, True), Form(2)], ids=str)
def test_counters_of_parameters_without_dimensions_stay_counters(form):
    run_kept_ranks(counters_of_scalars, form.world_size, form)


def scattered_bytes(form):
    """The largest message of a scatter, beside what the largest unit's pieces of all state take on one rank."""
    model = wrap(form)
    optimizer = OPTIMIZERS["adam-amsgrad"](model.parameters())
    one_step(model, optimizer, 0)
    full = FSDP.full_optim_state_dict(model, optimizer)
    sent, send = [], dist.send
    dist.send = lambda tensor, *args: (sent.append(tensor.nbytes), send(tensor, *args))[1]
    objects, gather_objects = [], dist.all_gather_object
    dist.all_gather_object = lambda *args: (objects.append(1), gather_objects(*args))[1]
    FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer)
    pieces = [
        3 * sum(handle.shard.nbytes for handle in wrapper._handles if handle.requires_grad)
        for wrapper in FSDP.fsdp_modules(model)
    ]
    return sent, pieces, len(objects)


@pytest.mark.parametrize("form", [Form(3), Form(3, True)], ids=["flat", "orig"])
def test_scatter_sends_a_unit_at_a_time(form):
    sent, pieces, objects = run_ranks(scattered_bytes, 3, form)[0]
    assert len(sent) == 2 * len(pieces)
    assert max(sent) <= max(pieces)
    assert objects == 1


class CountsInVectors(torch.optim.Optimizer):
    """Momentum, and a counter of shape ``[1]`` that scales it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if param.grad is None:
                    continue
                if not state:
                    state["step"] = torch.zeros(1)
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(param.grad)
                param.sub_(state["momentum"], alpha=group["lr"] / float(state["step"]))


class WithTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.inner(x) * self.temperature


def counts_in_vectors(folder, way, use_orig_params):
    def built():
        torch.manual_seed(3)
        model = FSDP(WithTemperature(), use_orig_params=use_orig_params)
        return model, CountsInVectors(model.parameters())

    def steps(model, optimizer):
        for number in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 5), float(number + dist.get_rank()))).square().sum().backward()
            optimizer.step()

    saved, fresh = built(), built()
    steps(*saved)
    if way == "checkpoint":
        checkpoint.save(folder, *saved)
        checkpoint.load(folder, *fresh)
    else:
        full = FSDP.full_optim_state_dict(*saved)
        fresh[0].load_state_dict(saved[0].state_dict())
        local = FSDP.scatter_full_optim_state_dict(full or None, fresh[0], optim=fresh[1])
        fresh[1].load_state_dict(local)
    steps(*saved)
    steps(*fresh)
    assert_equal(saved[0].state_dict(), fresh[0].state_dict())
    expected, got = (FSDP.optim_state_dict(*pair)["state"] for pair in (saved, fresh))
    assert expected.keys() == got.keys()
    for name in expected:
        assert_equal(dict(sorted(expected[name].items())), dict(sorted(got[name].items())))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", ["checkpoint", "scatter"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scalar_of_shape_1_beside_a_parameter_of_that_shape_is_loaded(
    world_size, way, use_orig_params, tmp_path
):
    run_kept_ranks(counts_in_vectors, world_size, str(tmp_path / "saved"), way, use_orig_params)
