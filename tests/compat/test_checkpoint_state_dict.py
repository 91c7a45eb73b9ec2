"""``torch.distributed.checkpoint.state_dict`` with our wrapper: its functions give what the unwrapped model's would.

Oracle: the same functions over the dense model.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Net(nn.Module):
    """Inner units, a tied weight, a buffer, and odd sizes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.Tanh())
        self.last = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x):
        return self.tied(self.last(self.block(torch.relu(self.first(self.norm(x))))))


def dense(seed=0):
    torch.manual_seed(seed)
    return Net()


def wrapped(orig, classes=(nn.Sequential,), seed=0):
    model = FSDP(dense(seed), auto_wrap_policy=ModuleWrapPolicy(set(classes)), use_orig_params=orig)
    return model, adam(model)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def train(model, optimizer, steps=3):
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_dense(steps=3):
    model = dense()
    optimizer = adam(model)
    train(model, optimizer, steps)
    return model, optimizer


def assert_same(got, wanted):
    """Two nested state dicts are equal, slices gathered."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(whole, wanted)
    else:
        assert got == wanted


def saved(orig, full, offload):
    model, optimizer = wrapped(orig)
    train(model, optimizer)
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
    got = get_state_dict(model, optimizer, options=options)
    wanted = get_state_dict(*trained_dense())
    if full and offload and dist.get_rank():
        assert got == ({}, {})
        return
    assert_same(got[0], wanted[0])
    assert_same(dict(sorted(got[1]["state"].items())), dict(sorted(wanted[1]["state"].items())))
    assert [group["params"] for group in got[1]["param_groups"]] == [
        group["params"] for group in wanted[1]["param_groups"]
    ]
    kinds = {isinstance(got[0][name], DTensor) for name, _ in dense().named_parameters()}
    assert kinds == {not full}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("orig", [False, True])
def test_saving_gives_the_dense_models_state(orig, full, offload):
    run_ranks(saved, 2, orig, full, offload)


def saved_and_loaded(orig, options, folder):
    model, optimizer = wrapped(orig)
    train(model, optimizer)
    state = get_state_dict(model, optimizer, options=options)
    model, optimizer = wrapped(not orig, (nn.Linear,), seed=1)
    if not options.full_state_dict:
        dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=folder)
        state = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": state[0], "optim": state[1]}, checkpoint_id=folder)
    if options.cpu_offload and options.full_state_dict:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state[0], options=options)
        set_optimizer_state_dict(model, optimizer, state[1], options=options)
    else:
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )
    train(model, optimizer)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_loading_into_another_wrapping_continues_the_run(full, offload, world_size, tmp_path):
    model, optimizer = trained_dense()
    train(model, optimizer)
    orig = world_size == 2
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
    for got in run_ranks(saved_and_loaded, world_size, orig, options, str(tmp_path)):
        assert_same(got, model.state_dict())


def optimizer_state_of_a_plain_root(orig):
    """The wrapper is inside a module that is not wrapped."""
    root = nn.ModuleDict({"inner": FSDP(dense(), use_orig_params=orig), "head": nn.Linear(3, 1)})
    optimizer = torch.optim.Adam(root.parameters())
    root["head"](root["inner"](torch.ones(4, 5))).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    return get_optimizer_state_dict(root, optimizer, options=options)["state"]


@pytest.mark.parametrize("orig", [False, True])
def test_a_wrapper_below_a_plain_module_is_found(orig):
    names = [f"inner.{name}" for name, _ in dense().named_parameters()]
    for state in run_ranks(optimizer_state_of_a_plain_root, 2, orig):
        assert set(state) == {*names, "head.weight", "head.bias"}
        assert state["inner.first.weight"]["exp_avg"].shape == (7, 5)


def torchs_wrapper():
    from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

    wrapped(orig=False)  # which teaches the module
    model = Theirs(dense(), device_id=CPU, use_orig_params=True)
    optimizer = adam(model)
    train(model, optimizer)
    wanted = get_state_dict(*trained_dense())
    got = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert_same(got[0], wanted[0])
    assert set(got[1]["state"]) == set(wanted[1]["state"])


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_wrapper_is_treated_as_ever():
    run_ranks(torchs_wrapper, 2)


LATE = """
import sys, torch, torch.distributed as dist, fsdp
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
assert "torch.distributed.checkpoint.state_dict" not in sys.modules
import torch.distributed.checkpoint.state_dict as module
assert isinstance(model, module.FSDP)
assert module.FSDP.fsdp_modules(model) == [model]
assert not [finder for finder in sys.meta_path if "Watching" in type(finder).__name__
            and finder._path == module.__name__]
"""


def test_the_module_is_taught_when_it_is_imported_after_wrapping():
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=60)
