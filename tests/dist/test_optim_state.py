"""Optimizer state travels between worlds, wrappings, exposures and the plain optimizer.

Oracle: one dense process on the mean of the ranks' losses, never interrupted.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import CheckpointError, UsageError
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import batch, build, wrap

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}
DATA_RANKS = 6


def dense_run(name, steps, start=0, model_state=None, optim_state=None):
    model = build()
    if model_state is not None:
        model.load_state_dict(model_state)
    optimizer = OPTIMIZERS[name](model.parameters())
    if optim_state is not None:
        optimizer.load_state_dict(optim_state)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for rank in range(DATA_RANKS):
            (model(batch(rank, step)).square().mean() / DATA_RANKS).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def wrapped_run(name, kwargs, steps, start=0, model_state=None, optim_state=None):
    classes = kwargs.pop("classes", None)
    kwargs["sharding_strategy"] = ShardingStrategy[kwargs.get("sharding_strategy", "FULL_SHARD")]
    model = wrap(build(seed=start), classes, **kwargs)
    if model_state is not None:
        model.load_state_dict(model_state)
    else:
        model.load_state_dict(build().state_dict())
    optimizer = OPTIMIZERS[name](model.parameters())
    if optim_state is not None:
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim_state))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = DATA_RANKS // world_size
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for part in range(share):
            (model(batch(rank * share + part, step)).square().mean() / share).backward()
        optimizer.step()
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def assert_states_close(expected, actual):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=2e-4, atol=1e-6, msg=name)


FORMS = [
    (2, {}),
    (3, {"use_orig_params": True}),
    (1, {"classes": set()}),
    (2, {"use_orig_params": True, "sharding_strategy": "NO_SHARD"}),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2), (2, 0), (1, 3), (3, 0)])
def test_resuming_elsewhere_equals_never_stopping(name, first, second):
    (world1, form1), (world2, form2) = FORMS[first], FORMS[second]
    model_state, optim_state = run_kept_ranks(wrapped_run, world1, name, form1, 3)[0]
    resumed, _ = run_kept_ranks(wrapped_run, world2, name, form2, 2, 3, model_state, optim_state)[0]
    assert_states_close(dense_run(name, 5)[0], resumed)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_plain_optimizer_state_loads_and_goes_back(use_orig_params):
    model_state, optim_state = dense_run("adamw", 3)
    form = {"use_orig_params": use_orig_params}
    resumed, saved = run_kept_ranks(wrapped_run, 2, "adamw", form, 2, 3, model_state, optim_state)[0]
    expected, dense_state = dense_run("adamw", 5)
    assert_states_close(expected, resumed)
    names = [name for name, _ in build().named_parameters()]
    for number, name in enumerate(names):
        assert list(saved["state"][name]) == list(dense_state["state"][number])
        for key, value in dense_state["state"][number].items():
            torch.testing.assert_close(saved["state"][name][key], value, rtol=2e-4, atol=1e-6)


def groups():
    model = wrap(build(), use_orig_params=True)
    decay = [p for n, p in model.named_parameters() if "weight" in n]
    rest = [p for n, p in model.named_parameters() if "weight" not in n]
    optimizer = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.3, "my_key": "kept"},
            {"params": []},
            {"params": rest, "lr": 0.5},
        ],
        lr=0.1,
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(batch(dist.get_rank())).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    assert [len(group["params"]) for group in saved["param_groups"]] == [len(decay), 0, len(rest)]
    assert saved["param_groups"][0]["my_key"] == "kept"
    assert saved["param_groups"][2]["initial_lr"] == 0.5
    before = {key: dict(value) for key, value in saved["state"].items()}
    local = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert all(before[name].keys() == saved["state"][name].keys() for name in before)
    assert [group["lr"] for group in local["param_groups"]] == [0.1, 0.1, 0.5]
    assert local["param_groups"][0]["my_key"] == "kept"
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert list(local["state"]) == [n for n, param in enumerate(held) if param.numel()]
    for number, param in enumerate(held):
        for key in ("exp_avg", "exp_avg_sq") if param.numel() else ():
            assert torch.equal(local["state"][number][key], optimizer.state[param][key])


def test_groups_keep_every_hyper_parameter():
    run_kept_ranks(groups, 2)


def misuse():
    model = wrap(build())
    stranger = torch.optim.SGD(build().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="does not have"):
        FSDP.optim_state_dict(model, stranger)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="nonsense"):
        FSDP.optim_state_dict_to_load(
            model, optimizer, {"state": {"nonsense": {}}, "param_groups": []}
        )
    with pytest.raises(CheckpointError, match="param_groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}})
    full = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(full) == (dist.get_rank() == 0)


def test_states_that_do_not_fit_are_refused_by_name():
    run_kept_ranks(misuse, 2)
