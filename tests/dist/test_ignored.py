"""``ignored_modules`` and ``ignored_states``: left alone, saved all the same, refused where they make no sense."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import FsdpWarning
from fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_kept_ranks, run_ranks

POLICIES = {
    "none": None,
    "blocks": ModuleWrapPolicy({MlpBlock}),
    "always": always_wrap_policy,
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
}


def identity(policy, orig, by_parameter):
    item = entry("mlp")
    plain = item.build()
    block, layer = plain.blocks[1], plain.out
    kept = {"blocks.1." + name: param for name, param in block.named_parameters()} | {
        "out." + name: param for name, param in layer.named_parameters()
    }
    ignored = (
        {"ignored_states": list(kept.values())}
        if by_parameter
        else {"ignored_modules": iter([block, layer])}
    )
    model = FSDP(plain, auto_wrap_policy=POLICIES[policy], use_orig_params=orig, **ignored)
    named = dict(model.named_parameters())
    for name, param in kept.items():
        assert named[name] is param, name
        assert param.shape == dict(item.build().named_parameters())[name].shape
    if not by_parameter:
        assert model.module.blocks[1] is block
        assert not any(isinstance(child, FSDP) for child in block.modules())
    assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))

    def script(m, rank):
        item.loss(m, item.make_batch(rank, 0)).backward()

    rank = dist.get_rank()
    script(model, rank)
    mean = mean_grads(item.build(), script, range(dist.get_world_size()))
    local = mean_grads(item.build(), script, [rank])
    expected = {name: local[name] if name in kept else grad for name, grad in mean.items()}
    grads = {name: param.grad for name, param in kept.items()}
    gathered = full_grads(model)
    assert_close(expected, {name: grads.get(name, gathered[name]) for name in expected}, GRADIENTS)
    source = item.build(seed=3).state_dict()
    model.load_state_dict(source)
    assert_bitwise(dict(source), dict(model.state_dict()))
    assert torch.equal(kept["out.weight"], source["out.weight"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("by_parameter", [False, True], ids=["modules", "states"])
def test_ignored_parameters_stay_the_same_objects_with_local_gradients(policy, orig, by_parameter):
    run_kept_ranks(identity, 2, policy, orig, by_parameter)


def wrong():
    with pytest.raises(TypeError, match="iterable"):
        FSDP(entry("mlp").build(), ignored_modules=3)
    with pytest.raises(TypeError, match="str"):
        FSDP(entry("mlp").build(), ignored_modules=["out"])
    plain = entry("mlp").build()
    with pytest.raises(TypeError):
        FSDP(plain, ignored_modules=[plain.out.weight])
    with pytest.raises(ValueError, match="both"):
        FSDP(plain, ignored_modules=[plain.out], ignored_states=[plain.out])
    with pytest.raises((TypeError, ValueError)):
        FSDP(plain, ignored_states=[plain.out, plain.inp.weight])
    plain.out = FSDP(plain.out)
    with pytest.raises(ValueError, match="FSDP"):
        FSDP(plain, ignored_modules=[plain.out])
    assert not any(isinstance(child, FSDP) for child in plain.blocks.modules())
    top = nn.Linear(3, 2)
    with pytest.warns(FsdpWarning, match="top-level"):
        model = FSDP(top, ignored_modules=[top])
    model(torch.ones(1, 3)).sum().backward()
    assert top.weight.grad.shape == (2, 3)


def test_wrong_arguments_are_refused_before_anything_changes():
    run_ranks(wrong, 1)


class SharedBuffers(nn.Module):
    """An ignored submodule with a buffer, and a parameter tied between an ignored and a managed module."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def tied():
    for orig in (False, True):
        plain = SharedBuffers()
        model = FSDP(plain, ignored_modules=[plain.b, plain.norm], use_orig_params=orig)
        assert model.module.a.weight is model.module.b.weight
        model(torch.randn(4, 3)).sum().backward()
        assert model.module.a.weight.shape == (3, 3)


def test_a_parameter_tied_to_an_ignored_module_is_ignored_in_all_places():
    run_kept_ranks(tied, 2)
