"""What a new user gets wrong: one clear error of ours each, at once, on every rank; nothing hangs or is changed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import FsdpError, ShardedParameterError, UnsupportedError
from fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy
from tests.support.compare import assert_bitwise
from tests.support.models import MlpBlock, entry
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes

EXPOSURES = (False, True)


def without_group():
    FSDP(nn.Linear(2, 2))


def test_without_a_process_group_the_error_names_the_call_that_makes_one():
    for outcome in run_ranks_outcomes(without_group, 2, backend=None):
        assert outcome.raised(ValueError)
        assert outcome.raised(FsdpError)
        assert "init_process_group" in outcome.message


def wrong_types():
    item = entry("mlp")
    wrong = {
        "process_group": ("world", 3, (1, 2)),
        "sharding_strategy": ("FULL_SHARD", 1, BackwardPrefetch.BACKWARD_PRE),
        "cpu_offload": (True, "cpu"),
        "auto_wrap_policy": (3, "blocks", MlpBlock),
        "backward_prefetch": ("pre", True, ShardingStrategy.FULL_SHARD),
        "mixed_precision": (torch.bfloat16, True, "bf16"),
        "ignored_modules": (3, ["out"]),
        "device_id": (1.5, [0]),
    }
    for name, values in wrong.items():
        for value in values:
            plain = item.build()
            with pytest.raises(TypeError) as caught:
                FSDP(plain, **{name: value})
            assert isinstance(caught.value, FsdpError), (name, value, caught.value)
            text = str(caught.value)
            assert name in text or name.replace("_", " ") in text, (name, value, text)
            assert not any(isinstance(child, FSDP) for child in plain.modules())
            assert_bitwise(dict(item.build().state_dict()), dict(plain.state_dict()))
    for module in ("module", None, [nn.Linear(2, 2)], nn.Linear, torch.ones(3), lambda x: x):
        with pytest.raises(TypeError, match="Module"):
            FSDP(module)


def test_arguments_of_wrong_types_are_named_and_the_module_is_untouched():
    run_kept_ranks(wrong_types, 2)


def returns(value):
    return lambda module, recurse, nonwrapped_numel: value


def bad_policies():
    item = entry("mlp")
    for value in (1, 0, None, "yes", [], torch.tensor(1)):
        with pytest.raises(ValueError, match=r"True or False|bool"):
            FSDP(item.build(), auto_wrap_policy=returns(value))
    with pytest.raises((TypeError, ValueError)):
        FSDP(item.build(), auto_wrap_policy=lambda module: True)
    with pytest.raises(TypeError):
        ModuleWrapPolicy([3])
    with pytest.raises((TypeError, ValueError)):
        FSDP(item.build(), auto_wrap_policy=lambda_auto_wrap_policy)
    for value in (1, None, "yes"):
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m, v=value: v)
        with pytest.raises(ValueError, match=r"True or False|bool"):
            FSDP(item.build(), auto_wrap_policy=policy)


def test_a_policy_that_returns_no_boolean_is_refused():
    run_kept_ranks(bad_policies, 1)


def twice():
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    with pytest.raises(ValueError, match="already"):
        FSDP(model)
    with pytest.raises(ValueError, match="already"):
        FSDP(model.module)
    with pytest.raises(ValueError, match="NOT be FullyShardedDataParallel"):
        FSDP(nn.Sequential(model), auto_wrap_policy={nn.Linear})
    with pytest.raises(ValueError, match="already"):
        wrap_entry(item, model.module.blocks[0])
    item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
    shared = nn.Linear(3, 3)
    first = FSDP(shared)
    with pytest.raises(ValueError, match="already"):
        FSDP(shared)
    first(torch.ones(1, 3)).sum().backward()
    half = nn.Linear(3, 3)
    half.weight = nn.Linear(3, 3).weight
    tied = nn.Linear(3, 3)
    tied.weight = half.weight
    FSDP(nn.ModuleList([tied, FSDP(half)]))  # not twice: the tied weight moves to the outer unit
    with pytest.raises(ValueError, match="already"):
        FSDP(nn.Sequential(shared))  # the wrapped module itself, past its wrapper


def test_wrapping_twice_is_refused_in_every_form():
    run_kept_ranks(twice, 2)


def two_devices():
    """A CPU and a meta device are not two devices; a parameter on another one is (made up: no such device here)."""

    class Elsewhere(nn.Parameter):
        @property
        def device(self):
            return torch.device("cuda", 1)

    plain = entry("mlp").build()
    for other in ("blocks.1.up.weight",):
        owner = plain.get_submodule(other.rpartition(".")[0])
        owner.weight = Elsewhere(owner.weight.detach())
        with pytest.raises(RuntimeError, match="single device") as caught:
            FSDP(plain, auto_wrap_policy={MlpBlock})
        assert isinstance(caught.value, FsdpError)
        assert other in str(caught.value)
        assert "cuda:1" in str(caught.value)
        assert "device_id" in str(caught.value)


def test_a_module_on_two_devices_is_refused_naming_the_parameter_and_the_remedy():
    run_kept_ranks(two_devices, 2)


def replaced():
    """Parameters changed behind the wrapper's back: taken over where that can be right, else an error naming them."""
    item = entry("mlp")
    x, _ = item.make_batch(0, 0)
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        dense = item.build()
        for owner in (model.module.blocks[0].module, dense.blocks[0]):
            owner.up.weight = nn.Parameter(torch.full((15, 7), 0.1))
        torch.testing.assert_close(model(x), dense(x))
        model.module.blocks[1].module.up.weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(FsdpError, match=r"blocks\.1\.up\.weight"):
            model(x)
    for change in (delete, to_buffer, reshape_data):
        for orig in EXPOSURES:
            model = wrap_entry(item, item.build(), use_orig_params=orig)
            if not change(model.module.blocks[1].module.up, orig):
                continue
            with pytest.raises(FsdpError, match=r"blocks\.1\.up\.(weight|bias)"):
                model(x)


def delete(layer, orig):
    del layer.weight
    return True


def to_buffer(layer, orig):
    del layer.weight
    layer.register_buffer("weight", torch.zeros(15, 7))
    return True


def reshape_data(layer, orig):
    if not orig:
        return False
    layer.bias.data = torch.zeros(99)
    return True


def test_parameters_replaced_by_hand_are_taken_over_or_named():
    run_kept_ranks(replaced, 2)


def touched():
    """Every use of a sharded parameter raises, naming it and summon_full_params; metadata can be read."""
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    weight = model.module.blocks[1].module.up.weight
    uses = {
        "sum": weight.sum,
        "add": lambda: weight + 1,
        "radd": lambda: 1 + weight,
        "matmul": lambda: torch.ones(1, 15) @ weight,
        "index": lambda: weight[0, 0],
        "tolist": weight.tolist,
        "numpy": lambda: weight.detach().numpy(),
        "fill": lambda: weight.data.fill_(1.0),
        "init": lambda: nn.init.zeros_(weight),
        "clone": weight.clone,
        "print": lambda: repr(weight + 0),
        "layer": lambda: nn.functional.linear(torch.ones(1, 7), weight),
        "inner": lambda: model.module.blocks[1].module.up(torch.ones(1, 7)),
        "compare": lambda: bool((weight == 0).all()),
    }
    for name, use in uses.items():
        with pytest.raises(RuntimeError) as caught:
            use()
        if name == "tolist":
            continue  # torch itself refuses, before anything of ours is asked
        assert isinstance(caught.value, ShardedParameterError), name
        assert "blocks.1.up.weight" in str(caught.value), name
        assert "summon_full_params" in str(caught.value), name
    assert weight.shape == (15, 7)
    assert weight.dtype == torch.float32
    assert weight.numel() == 105
    assert weight.requires_grad
    assert "blocks.1.up.weight" in repr(weight) or "sharded" in repr(weight).lower()
    item.loss(model, item.make_batch(0, 0)).backward()


def test_touching_a_sharded_parameter_never_crashes_and_always_names_it():
    run_kept_ranks(touched, 2)


def misuse():
    """Right calls on wrong things."""
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    with pytest.raises((TypeError, ValueError)):
        model.clip_grad_norm_("much")
    with pytest.raises((TypeError, AttributeError)), FSDP.summon_full_params("model"):
        pass
    with pytest.raises((NotImplementedError, FsdpError)):
        FSDP(item.build(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert CPUOffload() == CPUOffload(offload_params=False)
    assert MixedPrecision() == MixedPrecision(None)
    with pytest.raises(TypeError):
        FSDP()
    with pytest.raises(TypeError):
        FSDP(item.build(), nonsense=1)


def test_right_calls_on_wrong_things_raise():
    run_kept_ranks(misuse, 2)


class Empty(nn.Module):
    """No parameters at all."""

    def forward(self, x):
        return x * 2


def nothing():
    """Modules without parameters, without forward, and with parameters that are all ignored."""
    for orig in EXPOSURES:
        model = FSDP(Empty(), use_orig_params=orig)
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))
        assert model.state_dict() == {}
        assert model.clip_grad_norm_(1.0) == 0
        with FSDP.summon_full_params(model):
            pass
        model = FSDP(nn.Sequential(Empty(), nn.Linear(2, 1)), auto_wrap_policy={Empty})
        model(x).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_without_parameters_is_a_unit_like_any_other(world_size):
    run_kept_ranks(nothing, world_size)


def foreign(use_orig_params):
    def wrapped(first, **kwargs):
        return FSDP(
            nn.Sequential(first, nn.Linear(5, 3)), use_orig_params=use_orig_params, **kwargs
        )

    traced = torch.jit.trace(nn.Linear(5, 5), torch.ones(2, 5))
    with pytest.raises(UnsupportedError, match=r"module '0' is scripted or traced.*0\.weight"):
        wrapped(traced)
    theirs = torch.distributed.fsdp.FullyShardedDataParallel(  # noqa: TID251 - the other wrapper
        nn.Linear(5, 5), device_id=torch.device("cpu")
    )
    with pytest.raises(
        UnsupportedError, match=r"module '0' is wrapped with torch's.*0\._flat_param"
    ):
        wrapped(theirs)
    # Without parameters of its own, or with ignored ones, a scripted module is as good as any.
    for model in (
        wrapped(torch.jit.script(nn.Hardswish())),
        wrapped(traced.requires_grad_(False), ignored_modules=[traced]),
    ):
        model(torch.ones(2, 5)).sum().backward()
        assert "1.weight" in model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_that_others_look_after_are_refused_by_name(use_orig_params, world_size):
    run_kept_ranks(foreign, world_size, use_orig_params)
