"""Mistakes are named: the parameter, what is wrong, what to do; on every rank, before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, UsageError
from tests.optim_state.worlds import OPTIMIZERS, Form, build, dense, one_step, wrap
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes


@pytest.fixture
def saved():
    """A plain optimizer's state under names, as every wrapped one gives it."""
    model, state = build(), dense("adam-amsgrad", 1)[1]
    names = [name for name, _ in model.named_parameters()]
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": [{**state["param_groups"][0], "params": names}],
    }


def refuses(saved, form, name, said, fqn):
    model = wrap(form)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(saved)
    with pytest.raises(CheckpointError, match=said) as caught:
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert caught.value.fqn == fqn
    assert repr(before) == repr(saved)


def check(saved, said, fqn, form=None, name="adam-amsgrad"):
    for each in [form] if form else [Form(2), Form(2, True)]:
        run_kept_ranks(refuses, 2, saved, each, name, said, fqn)


def test_names_the_model_has_not(saved):
    saved["state"]["lost.weight"] = saved["state"]["head.bias"]
    check(saved, r"'lost\.weight'", "lost.weight")


def test_names_that_are_missing(saved):
    group = saved["param_groups"][0]
    saved["param_groups"] = [{**group, "params": [n for n in group["params"] if n != "head.bias"]}]
    del saved["state"]["head.bias"]
    check(saved, r"does not name: 'head\.bias'", "head.bias")


def test_names_mixed_with_numbers(saved):
    saved["state"][3] = saved["state"].pop("head.bias")
    check(saved, "mixes key types", next(iter(saved["param_groups"][0]["params"])))


def test_a_tensor_of_another_shape(saved):
    saved["state"]["layers.1.up.weight"]["exp_avg"] = torch.zeros(3, 4)
    check(saved, r"'exp_avg' has shape \(3, 4\): expected \(11, 5\)", "layers.1.up.weight")


@pytest.mark.parametrize(("name", "lacking"), [("momentum", "dampening"), ("asgd", "alpha")])
def test_the_state_of_another_optimizer_class(saved, name, lacking):
    check(saved, f"another optimizer class: .* needs .*{lacking}", "embed.weight", Form(2), name)


def test_groups_of_an_earlier_torch_are_no_other_class(saved):
    del saved["param_groups"][0]["decoupled_weight_decay"]
    run_kept_ranks(loads, 2, saved)


def loads(saved):
    model = wrap(Form(2))
    optimizer = OPTIMIZERS["adam-amsgrad"](model.parameters())
    FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    one_step(model, optimizer, 0)


def test_groups_that_divide_a_flat_parameter(saved):
    group = saved["param_groups"][0]
    rest = [name for name in group["params"] if name != "layers.0.scale"]
    saved["param_groups"] = [{**group, "params": rest}, {**group, "params": ["layers.0.scale"]}]
    check(saved, "several groups.*use_orig_params=True", "layers.0.scale", Form(2))


def test_steps_that_differ_within_a_flat_parameter(saved):
    saved["state"]["layers.0.scale"]["step"] = torch.tensor(7.0)
    with_flat = r"'step' differs between .* use_orig_params=True"
    check(saved, with_flat, "layers.0.up.weight", Form(2))


@pytest.mark.parametrize("broken", [None, {}, {"state": {}}, {"param_groups": []}])
def test_what_is_no_state_dict(broken):
    check(broken, "'state' and 'param_groups'", None, Form(2))


def test_numbers_of_another_model():
    other = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    check(other.state_dict(), r"groups of \[2\].*'embed.weight'", None)


def of_another_model():
    model = wrap(Form(2))
    other = torch.optim.SGD(build().named_parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"16 parameters in group 0.*\(5, 5\).*embed\.weight"):
        FSDP.optim_state_dict(model, other)


def test_an_optimizer_of_another_model_can_not_be_saved():
    run_kept_ranks(of_another_model, 2)


def factored(form):
    """Adafactor keeps row and column statistics, which no flat shard can hold."""
    model = wrap(form)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    optimizer.state[next(iter(optimizer.state))]["row_var"] = torch.zeros(3)
    FSDP.optim_state_dict(model, optimizer)


def one_rank_lacks_state():
    model = wrap(Form(2))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    one_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        del optimizer.state[optimizer.param_groups[0]["params"][0]]
    FSDP.optim_state_dict(model, optimizer)


def one_rank_holds_a_stranger():
    model = wrap(Form(2))
    params = build().parameters() if dist.get_rank() else model.parameters()
    FSDP.optim_state_dict(model, torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize(
    ("fault", "args", "said"),
    [
        (factored, [Form(2)], "'row_var' of shape"),
        (factored, [Form(2, True)], "WholeParamOptimizer"),
        (one_rank_lacks_state, [], "ranks differ"),
        (one_rank_holds_a_stranger, [], "does not have"),
    ],
)
def test_what_can_not_be_saved_is_refused_on_every_rank(fault, args, said):
    for outcome in run_ranks_outcomes(fault, 2, *args, timeout=20):
        assert outcome.error_type in ("CheckpointError", "UsageError"), outcome.traceback
        assert said in outcome.message
