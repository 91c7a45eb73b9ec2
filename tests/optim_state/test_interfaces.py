"""The six interfaces say the same thing in different forms.

Oracle: ``optim_state_dict`` with whole tensors, whose equality with the dense model ``test_matrix`` proves; and the
optimizer's own state, which every way of loading must give back.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor

from fsdp import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, ConfigError
from tests.optim_state.worlds import OPTIMIZERS, Form, assert_equal, build, one_step, wrap
from tests.support.ranks import run_kept_ranks, run_ranks, run_ranks_outcomes

FORMS = [
    Form(1),
    Form(2),
    Form(3, True, "every"),
    Form(2, True, strategy="NO_SHARD"),
    Form(4, strategy="HYBRID_SHARD"),
    Form(2, beside=True),
]


def trained(form, name="adam-amsgrad", steps=2):
    model = wrap(form)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step)
    return model, optimizer


def own_state(optimizer):
    """The optimizer's state dict, with entries for parameters of which there is some."""
    own = copy.deepcopy(optimizer.state_dict())
    return {"state": own["state"], "param_groups": own["param_groups"]}


def every_way_back(form):
    model, optimizer = trained(form)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    before = copy.deepcopy(full)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    rank0 = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(rank0) == (dist.get_rank() == 0)
    if rank0:
        assert_equal(full, rank0)
    ways = {
        "to_load": FSDP.optim_state_dict_to_load(model, optimizer, full),
        "shard_full": FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        "to_load, DTensors": FSDP.optim_state_dict_to_load(model, optimizer, sharded),
        "flatten_sharded": FSDP.flatten_sharded_optim_state_dict(sharded, model, optim=optimizer),
        "scatter": FSDP.scatter_full_optim_state_dict(rank0 or None, model, optim=optimizer),
        "parameters": FSDP.shard_full_optim_state_dict(full, model),
    }
    expected = own_state(optimizer)
    for way, found in ways.items():
        assert_equal(sorted(expected["state"]), sorted(found["state"]), way)
        for number, values in expected["state"].items():
            assert_equal(values, found["state"][number], f"{way}/{number}")
        assert_equal(expected["param_groups"], found["param_groups"], way)
    assert_equal(before, full)
    for way in ("shard_full", "scatter"):
        optimizer.load_state_dict(ways[way])
        assert_equal(full, FSDP.optim_state_dict(model, optimizer), way)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_way_back_gives_the_optimizers_own_state(form):
    run_kept_ranks(every_way_back, form.world_size, form)


def sharded_elsewhere(first, second):
    model, optimizer = trained(first)
    saved = FSDP.sharded_optim_state_dict(model, optimizer)
    for fqn, values in saved["state"].items():
        assert isinstance(values["exp_avg"], DTensor) == (not fqn.startswith("aside"))  # ignored
        assert not isinstance(values["step"], DTensor)
    other = wrap(second)
    fresh = OPTIMIZERS["adam-amsgrad"](other.parameters())
    FSDP.optim_state_dict_to_load(other, fresh, saved, load_directly=True)
    full = FSDP.optim_state_dict(model, optimizer)
    loaded = FSDP.optim_state_dict(other, fresh)
    assert_equal(full["state"], {fqn: loaded["state"][fqn] for fqn in full["state"]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Form(3), Form(3, True, "every")),
        (Form(2, True), Form(2, wrapping="root")),
        (Form(4, True), Form(4, strategy="HYBRID_SHARD")),
        (Form(2), Form(2, True, strategy="NO_SHARD")),
    ],
    ids=str,
)
def test_sharded_states_load_in_other_forms(first, second):
    run_kept_ranks(sharded_elsewhere, first.world_size, first, second)


def current_type():
    model, optimizer = trained(Form(2))
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True),
    ):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (dist.get_rank() == 0)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert isinstance(saved["state"]["embed.weight"]["exp_avg"], DTensor)
    with FSDP.state_dict_type(
        model,
        StateDictType.LOCAL_STATE_DICT,
        optim_state_dict_config=LocalOptimStateDictConfig(),
    ):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert_equal(own_state(optimizer), saved)
        again = FSDP.optim_state_dict_to_load(model, optimizer, saved)
        assert_equal(own_state(optimizer), again)
        root_only = wrap(Form(2, wrapping="root"))
        other = OPTIMIZERS["adam-amsgrad"](root_only.parameters())
        FSDP.set_state_dict_type(root_only, StateDictType.LOCAL_STATE_DICT)
        with pytest.raises(CheckpointError, match="same world size and wrapping"):
            FSDP.optim_state_dict_to_load(root_only, other, saved)


def test_the_pair_follows_the_current_state_dict_type():
    run_kept_ranks(current_type, 2)


def optim_input():
    model, optimizer = trained(Form(2))
    full = FSDP.optim_state_dict(model, optimizer)
    params = list(model.parameters())
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP.full_optim_state_dict(model, optimizer, params, False)
    with pytest.warns(FutureWarning, match="optim_input"):
        found = FSDP.shard_full_optim_state_dict(full, model, params)
    assert_equal(FSDP.shard_full_optim_state_dict(full, model, None, optimizer), found)
    # Callers of torch's later signatures pass the optimizer third, or the group.
    assert_equal(found, FSDP.shard_full_optim_state_dict(full, model, optimizer))
    sharded = FSDP.sharded_optim_state_dict(model, optimizer, dist.group.WORLD)
    assert_equal(found, FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="both"):
        FSDP.shard_full_optim_state_dict(full, model, params, optimizer)


def test_optim_input_is_accepted_with_a_warning():
    run_ranks(optim_input, 2)


def lost_on_rank_0():
    model, optimizer = trained(Form(2))
    mine = {} if dist.get_rank() else None
    FSDP.scatter_full_optim_state_dict(mine, model, optim=optimizer)


def misfit_on_rank_0():
    model, optimizer = trained(Form(2))
    full = FSDP.full_optim_state_dict(model, optimizer)
    if full:
        full["state"]["head.bias"]["exp_avg"] = torch.zeros(3, 3)
    FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer)


def wrong_optimizer_on_rank_1():
    model, optimizer = trained(Form(2))
    full = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank():
        optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
    FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(lost_on_rank_0, "None on the first rank"), (misfit_on_rank_0, "head.bias"),
     (wrong_optimizer_on_rank_1, "does not have")],
)  # fmt: skip
def test_a_fault_on_one_rank_of_scatter_raises_on_all(fault, said):
    for outcome in run_ranks_outcomes(fault, 2, timeout=20):
        assert outcome.error_type in ("CheckpointError", "UsageError")
        assert said in outcome.message


def test_rekeying_keeps_groups_order_and_the_callers_dict():
    model = build()
    groups = [
        {"params": [model.head.bias, model.embed.weight], "lr": 0.5, "mine": "kept"},
        {"params": []},
        {"params": list(model.layers.parameters())},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.randn(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    numbered = optimizer.state_dict()
    before = copy.deepcopy(numbered)
    named = FSDP.rekey_optim_state_dict(
        numbered, OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )
    assert named["param_groups"][0]["params"] == ["head.bias", "embed.weight"]
    assert named["param_groups"][0]["mine"] == "kept"
    assert named["param_groups"][1]["params"] == []
    assert list(named["state"])[:2] == ["head.bias", "embed.weight"]
    again = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert_equal(before, again)
    assert_equal(before, numbered)
    assert_equal(
        named,
        FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_NAME, model, optim=optimizer),
    )


def test_rekeying_refuses_what_the_optimizer_has_not():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strange = {"state": {"lost.weight": {}}, "param_groups": [{"params": ["lost.weight"]}]}
    with pytest.raises(CheckpointError, match=r"lost\.weight"):
        FSDP.rekey_optim_state_dict(strange, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    mixed = {"state": {"head.bias": {}, 3: {}}, "param_groups": [{"params": [3]}]}
    with pytest.raises(CheckpointError, match=r"head\.bias"):
        FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, model, optim=optimizer)


def named_optimizer():
    model, optimizer = trained(Form(2, True))
    full = FSDP.optim_state_dict(model, optimizer)
    named = FSDP.optim_state_dict_to_load(model, optimizer, full, is_named_optimizer=True)
    names = [name for name, param in model.named_parameters() if param in optimizer.state]
    assert list(named["state"]) == [n for n in names if "unused" not in n and "frozen" not in n]
    own = FSDP.optim_state_dict_to_load(model, optimizer, full)
    by_name = {
        "state": named["state"],
        "param_groups": named["param_groups"],
    }
    assert_equal(full, FSDP.optim_state_dict(model, optimizer, by_name))
    assert_equal(full, FSDP.optim_state_dict(model, optimizer, own))


class Outer(torch.nn.Module):
    """A plain module around a wrapper: in its ``named_parameters()`` the wrapper's own child shows."""

    def __init__(self):
        super().__init__()
        self.inner = wrap(Form(2, True))

    def forward(self, x):
        return self.inner(x)


def around_another(make):
    """torch's own optimizer of names, which keeps no ``defaults`` and passes over names it does not know."""
    model = make()
    names = [name for name, param in model.named_parameters() if "frozen" not in name]
    params = [param for name, param in model.named_parameters() if name in names]
    optimizer = _NamedOptimizer(
        list(zip(names, params, strict=True)),
        torch.optim.Adam,
        [{"params": params}],
        model,
        lr=1e-2,
    )
    optimizer.zero_grad = model.zero_grad  # its own needs the ``defaults`` it lacks
    one_step(model, optimizer, 0)
    saved = copy.deepcopy(FSDP.optim_state_dict(model, optimizer))
    one_step(model, optimizer, 1)
    named = FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)
    optimizer.load_state_dict(named)
    assert_equal(saved["state"], FSDP.optim_state_dict(model, optimizer)["state"])


def wrapped():
    return wrap(Form(2, True))


@pytest.mark.parametrize("make", [wrapped, Outer])
def test_an_optimizer_around_another_is_resumed(make):
    run_kept_ranks(around_another, 2, make)


def reversed_halves(module):
    """As users give a part of a model first that comes last."""
    halves = [module.layers[1], module.layers[0]]
    return [param for half in halves for param in half.parameters()]


def other_order(orig):
    """Parts of the model in an order of the user's own, in a wrapped and in a plain optimizer."""
    model, plain = wrap(Form(2, orig, "every")), build()
    optimizer = torch.optim.Adam(reversed_halves(model), lr=1e-2)
    alone = torch.optim.Adam(reversed_halves(plain), lr=1e-2)
    names = {param: name for name, param in plain.named_parameters()}
    for number, param in enumerate(alone.param_groups[0]["params"]):
        state = torch.full_like(param, number)
        alone.state[param] = {"step": torch.tensor(1.0), "exp_avg": state, "exp_avg_sq": -state}
    FSDP.optim_state_dict_to_load(model, optimizer, alone.state_dict(), load_directly=True)
    saved = FSDP.optim_state_dict(model, optimizer)
    in_order = [names[param] for param in alone.param_groups[0]["params"]]
    assert saved["param_groups"][0]["params"] == in_order
    for number, name in enumerate(in_order):
        assert (saved["state"][name]["exp_avg"] == number).all()
    shuffled = {**saved["param_groups"][0], "params": sorted(in_order)}
    numbered = FSDP.rekey_optim_state_dict(
        {**saved, "param_groups": [shuffled]}, OptimStateKeyType.PARAM_ID, plain, optim=alone
    )
    fresh = torch.optim.Adam(reversed_halves(plain), lr=1e-2)
    fresh.load_state_dict(numbered)
    found = fresh.state_dict()["state"]
    assert_equal(alone.state_dict()["state"], dict(sorted(found.items())))


@pytest.mark.parametrize("orig", [False, True])
def test_an_order_of_the_users_own_is_the_same_for_wrapped_and_plain_optimizers(orig):
    run_kept_ranks(other_order, 2, orig)


def without_groups(form):
    model, optimizer = trained(form)
    whole = FSDP.optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    alone = FSDP.optim_state_dict(model, optimizer, {"state": own["state"]})
    assert_equal({"state": whole["state"]}, alone)
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, alone)
    assert_equal({"state": own_state(optimizer)["state"]}, loadable)
    with pytest.raises(CheckpointError, match=r"state number \d+, which is in none of its groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": own["state"]})


@pytest.mark.parametrize("form", [Form(2), Form(3, True)], ids=str)
def test_a_state_without_groups_stays_without(form):
    run_kept_ranks(without_groups, form.world_size, form)


def test_named_optimizers_get_and_give_names():
    run_kept_ranks(named_optimizer, 2)


def completed_by_the_caller(form):
    """A parameter beside the wrappers is new: the older functions leave it out, the optimizer wants it named."""
    model, optimizer = trained(form)
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    wider = wrap(form)
    wider.register_parameter("extra", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    fresh = OPTIMIZERS["adam-amsgrad"](wider.parameters())
    number = list(wider.parameters()).index(wider.extra)
    for load in (
        lambda: FSDP.shard_full_optim_state_dict(state, wider, optim=fresh),
        lambda: FSDP.shard_full_optim_state_dict(state, wider, list(wider.parameters())),
        lambda: FSDP.flatten_sharded_optim_state_dict(sharded, wider, optim=fresh),
        lambda: FSDP.scatter_full_optim_state_dict(
            state if dist.get_rank() == 0 else None, wider, optim=fresh
        ),
    ):
        part = load()
        assert number not in part["state"]
        assert number not in part["param_groups"][0]["params"]
        with pytest.raises(ValueError, match="size of optimizer's group"):
            fresh.load_state_dict(part)
        part["param_groups"][0]["params"].insert(number, number)
        fresh.load_state_dict(part)
        kept = {old + (old >= number) for old in optimizer.state_dict()["state"]}
        assert set(fresh.state_dict()["state"]) == kept
    with pytest.raises(CheckpointError, match="does not name: 'extra'"):
        FSDP.optim_state_dict_to_load(wider, fresh, state)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:The `optim_input`:FutureWarning")
def test_what_no_wrapper_manages_is_left_to_the_caller_by_the_older_functions(world_size, orig):
    run_kept_ranks(completed_by_the_caller, world_size, Form(world_size, orig, beside=True))
