"""What accelerate and transformers ask about a wrapped model, over stand-ins for their modules.

The real ones are run by ``tools/clients.py``; here is what they rely on.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp import (
    FsdpWarning,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.adapters.accelerate import teach_accelerate
from fsdp.adapters.imports import replace_everywhere, when_imported
from fsdp.adapters.transformers import teach_transformers
from fsdp.errors import CheckpointError, UsageError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), nn.Linear(5, 2)
    )


def wrapped(orig, seed=0, **options):
    return FSDP(
        net(seed),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=orig,
        **options,
    )


def train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- names -------------------------------------------------------------------------------------------------------------


def names_by_children(model, forbidden):
    """As transformers puts names together."""
    result = []
    for name, child in model.named_children():
        inner = names_by_children(child, forbidden)
        result += [f"{name}.{n}" for n in inner if not isinstance(child, forbidden)]
    return result + list(model._parameters)


def taught_names():
    module, client = types.ModuleType("trainer_pt_utils"), types.ModuleType("trainer")
    module.get_parameter_names = client.get_parameter_names = names_by_children
    sys.modules["trainer"] = client
    model = wrapped(orig=True)
    teach_transformers(module, FSDP)
    known = {name for name, _ in model.named_parameters()}
    decayed = set(client.get_parameter_names(model, (nn.LayerNorm,)))
    return decayed <= known, known - decayed, client.get_parameter_names(net(), (nn.LayerNorm,))


def test_names_put_together_from_children_are_those_of_named_parameters():
    for all_known, left_out, plain in run_ranks(taught_names, 1):
        assert all_known
        assert left_out == {"1.1.weight", "1.1.bias"}
        assert plain == names_by_children(net(), (nn.LayerNorm,))


# -- optimizer state ---------------------------------------------------------------------------------------------------


class Plugin:
    state_dict_type = StateDictType.SHARDED_STATE_DICT


def loads_into_a_fresh_optimizer(orig):
    """As accelerate loads a sharded state: what the fresh optimizer gives is filled in place."""
    module = types.ModuleType("fsdp_utils")
    filled = []

    def load_fsdp_optimizer(fsdp_plugin, accelerator, optimizer, model, input_dir):
        with FSDP.state_dict_type(model, fsdp_plugin.state_dict_type):
            filled.append(FSDP.optim_state_dict(model, optimizer))

    module.load_fsdp_optimizer = load_fsdp_optimizer
    teach_accelerate(module, FSDP)
    model = wrapped(orig)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    module.load_fsdp_optimizer(Plugin(), None, optimizer, model, "folder")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())
    return {name: sorted(values) for name, values in filled[0]["state"].items()}


@pytest.mark.parametrize("orig", [False, True])
def test_a_fresh_optimizer_has_state_to_fill_and_parameters_stay(orig):
    wanted = {name: ["exp_avg", "exp_avg_sq", "step"] for name, _ in net().named_parameters()}
    assert run_ranks(loads_into_a_fresh_optimizer, 2, orig) == [wanted] * 2


def sharded_state_of_a_fresh_optimizer(make):
    model = wrapped(orig=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        FSDP.optim_state_dict(model, make(model.parameters()))


def fresh_adam():
    with pytest.warns(FsdpWarning, match="has no state yet"):
        sharded_state_of_a_fresh_optimizer(torch.optim.Adam)


def fresh_sgd():
    sharded_state_of_a_fresh_optimizer(lambda params: torch.optim.SGD(params, lr=0.1))


def test_a_sharded_state_without_state_is_warned_about():
    run_ranks(fresh_adam, 1)


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_never_has_state_is_not():
    run_ranks(fresh_sgd, 1)


def loads_from_the_first_rank(orig, everywhere):
    model = wrapped(orig)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    full = FullOptimStateDictConfig(rank0_only=not everywhere)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), full):
        saved = FSDP.optim_state_dict(model, optimizer)
    other = wrapped(not orig, seed=1)
    fresh = torch.optim.Adam(other.parameters())
    full = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), full):
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, saved or None))
    return FSDP.optim_state_dict(model, optimizer), FSDP.optim_state_dict(other, fresh)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_rank0_only_the_first_rank_alone_needs_the_optimizer_state(
    world_size, orig, everywhere
):
    for wanted, got in run_ranks(loads_from_the_first_rank, world_size, orig, everywhere):
        assert list(got["state"]) == list(wanted["state"])
        for name, values in wanted["state"].items():
            for key, value in values.items():
                assert torch.equal(got["state"][name][key], value)


def loads_nothing():
    model = wrapped(orig=True)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match="rank0_only=True"):
        FSDP.optim_state_dict_to_load(model, optimizer, None)


def test_no_state_at_all_is_an_error_that_says_how_to_load_from_one_rank():
    run_ranks(loads_nothing, 1)


def rekeyed(orig):
    """As Lightning does, over the wrapped model."""
    model = wrapped(orig)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    named = FSDP.optim_state_dict(model, optimizer)
    numbered = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model)
    again = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model)
    assert list(again["state"]) == list(named["state"])
    plain = torch.optim.Adam(net().parameters())
    plain.load_state_dict(numbered)
    return list(numbered["state"]), numbered["param_groups"][0]["params"]


@pytest.mark.parametrize("orig", [False, True])
def test_a_wrapped_models_state_is_rekeyed_as_the_unwrapped_optimizer_numbers(orig):
    count = len(list(net().parameters()))
    for keys, params in run_ranks(rekeyed, 2, orig):
        assert keys == params == list(range(count))


# -- parameters --------------------------------------------------------------------------------------------------------


def raised_to_float32(orig):
    """As accelerate raises a model built in bfloat16."""
    model = wrapped(orig, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    expected = net().to(torch.bfloat16).float().state_dict()
    for unit in FSDP.fsdp_modules(model):
        assert unit._has_params
        unit._flat_param.data = unit._flat_param.data.to(torch.float32)
        unit._handle._orig_param_dtype = torch.float32
    output = model(torch.ones(2, 4))
    output.float().sum().backward()
    assert output.dtype is torch.bfloat16
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    state = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_data_of_another_dtype_given_to_a_flat_parameter_is_the_new_shard(orig, world_size):
    run_ranks(raised_to_float32, world_size, orig)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        return x * self.scale


def cast_where_ranks_hold_nothing():
    """One element on three ranks: two of them hold nothing that could tell."""
    model = FSDP(nn.Sequential(FSDP(Scale(), use_orig_params=True)), use_orig_params=True)
    model.to(torch.bfloat16)
    output = model(torch.ones(2, dtype=torch.bfloat16))
    return output, {handle.dtype for unit in FSDP.fsdp_modules(model) for handle in unit._handles}


def test_a_cast_reaches_ranks_that_hold_nothing_of_a_unit():
    for output, dtypes in run_ranks(cast_where_ranks_hold_nothing, 3):
        assert output.dtype is torch.bfloat16
        assert output.tolist() == [2.0, 2.0]
        assert dtypes == {torch.bfloat16}


class Generating(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.bias = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.inner(x) + self.bias

    @torch.no_grad()
    def generate(self, x):
        return self(self(x)) + self.bias


def generates_summoned(orig):
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(Generating(), auto_wrap_policy=policy, use_orig_params=orig)
    x = torch.ones(2, 3)
    with FSDP.summon_full_params(model):
        inside = model.generate(x)
    return inside, model.generate(x), Generating().generate(x)


@pytest.mark.parametrize("orig", [False, True])
def test_generate_runs_inside_summon_full_params_with_gradients_enabled_outside_of_it(orig):
    for inside, outside, plain in run_ranks(generates_summoned, 2, orig):
        torch.testing.assert_close(inside, plain)
        torch.testing.assert_close(outside, plain)


# -- imports -----------------------------------------------------------------------------------------------------------


def test_an_imported_module_is_acted_on_at_once_and_a_later_one_when_it_comes(
    tmp_path, monkeypatch
):
    (tmp_path / "a_late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported("sys", seen.append)
    when_imported("a_late_module", lambda module: seen.append(module.value))
    assert seen == [sys]

    import a_late_module  # noqa: F401

    assert seen == [sys, 1]
    assert not any(getattr(finder, "_path", "") == "a_late_module" for finder in sys.meta_path)


def test_a_function_is_replaced_wherever_it_was_imported_to(monkeypatch):
    home, guest = types.ModuleType("home"), types.ModuleType("guest")
    home.function = guest.renamed = lambda: 1
    guest.own = lambda: 1
    monkeypatch.setitem(sys.modules, "guest", guest)
    monkeypatch.setitem(sys.modules, "home", home)

    replace_everywhere(home, "function", 2)

    assert (home.function, guest.renamed) == (2, 2)
    assert guest.own() == 1


def overlapped_by_torch(orig):
    model = wrapped(orig)
    _apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False
    )
    with pytest.raises(UsageError, match="only supported with use_orig_params=True") as caught:
        model(torch.ones(2, 4))
    assert "fsdp.optim.apply_optimizer_in_backward" in str(caught.value)
    assert caught.value.fqn == "0.weight"


@pytest.mark.parametrize("orig", [False, True])
def test_optimizers_that_nothing_would_step_are_refused(orig):
    run_ranks(overlapped_by_torch, 2, orig)


def sizes_while_summoned(orig):
    model = FSDP(nn.Linear(5, 5), use_orig_params=orig)
    with FSDP.summon_full_params(model):
        flat_param = model._flat_param
        return flat_param.numel()


def test_a_summoned_flat_parameter_counts_its_padding_with_original_parameters_only():
    assert run_ranks(sizes_while_summoned, 4, False) == [30] * 4
    # 25 elements, 3 so that the next begins at 16 bytes, 5, and 3 so that ranks have equal shards.
    assert run_ranks(sizes_while_summoned, 4, True) == [36] * 4


class Late:
    """A tensor that is read when it is used, as Lightning's are."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [arg.value if isinstance(arg, Late) else arg for arg in args]
        return function(*args, **(kwargs or {}))


def loads_late_tensors(orig):
    model = wrapped(orig, seed=1)
    wanted = net().state_dict()
    model.load_state_dict({name: Late(value) for name, value in wanted.items()})
    got = model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("orig", [False, True])
def test_what_becomes_a_tensor_when_it_is_used_is_loaded(orig):
    run_ranks(loads_late_tensors, 2, orig)


def read_into_sharded_tensors(orig, folder):
    """As Lightning resumes: torch's reader gives the optimizer's state as ShardedTensors."""
    model = wrapped(orig)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    other = wrapped(not orig, seed=1)
    fresh = torch.optim.Adam(other.parameters())
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        read = load_sharded_optimizer_state_dict(
            other.state_dict(), "optim", dcp.FileSystemReader(folder)
        )
        assert type(read["optim"]["state"]["0.weight"]["exp_avg"]).__name__ == "ShardedTensor"
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, read["optim"]))
    return FSDP.optim_state_dict(model, optimizer), FSDP.optim_state_dict(other, fresh)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_an_optimizer_state_in_sharded_tensors_is_loaded(orig, world_size, tmp_path):
    for wanted, got in run_ranks(read_into_sharded_tensors, world_size, orig, str(tmp_path)):
        for name, values in wanted["state"].items():
            for key, value in values.items():
                assert torch.equal(got["state"][name][key], value), (name, key)
