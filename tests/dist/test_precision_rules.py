"""``MixedPrecision`` beyond the reference: rules by module, output and master dtypes, full precision in evaluation."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FsdpWarning, MixedPrecision, ShardingStrategy
from fsdp.errors import ConfigError, ConfigTypeError
from tests.dist.test_engine_features import record
from tests.support.compare import GRADIENTS, TRAINED, assert_bitwise, assert_close
from tests.support.oracles import full_grads
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import Net, batch, build, dense_grads, wrap

BF16, F32 = torch.bfloat16, torch.float32


def watch(model):
    """Dtypes of weights, inputs and outputs of the second block's norm and of the last layer, as they run."""
    seen = {}
    inner = model.module.blocks[1].module
    for name, module in (("norm", inner.norm), ("up", inner.up), ("out", model.module.out)):

        def look(module, args, output, name=name):
            seen[name] = (module.weight.dtype, args[0].dtype, output.dtype)

        module.register_forward_hook(look)
    return seen


def ruled(strategy):
    policy = MixedPrecision(
        param_dtype=BF16, reduce_dtype=F32, rules={nn.LayerNorm: F32, "ou?": F32}, output_dtype=F32
    )
    plain = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
    for orig in (False, True):
        kwargs = {"use_orig_params": orig, "sharding_strategy": ShardingStrategy[strategy]}
        model = wrap(build(), mixed_precision=policy, **kwargs)
        assert len(model.explain().units) == len(wrap(build(), **kwargs).explain().units)
        seen = watch(model)
        events = record(model)
        output = model(batch(dist.get_rank()))
        assert output.dtype is F32
        output.square().sum().backward()
        assert seen == {"norm": (F32, F32, BF16), "up": (BF16, BF16, BF16), "out": (F32, F32, BF16)}
        other = wrap(build(), mixed_precision=plain, **kwargs)
        expected = record(other)
        other(batch(dist.get_rank())).float().square().sum().backward()
        ops = [(event.op, event.unit) for event in events]
        assert ops == [(event.op, event.unit) for event in expected]  # no collective more


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rules_give_modules_a_dtype_without_units_or_collectives(world_size, strategy):
    run_kept_ranks(ruled, world_size, strategy)


def float64_everywhere():
    """With a rule for everything the numbers are those of a model in that dtype."""
    policy = MixedPrecision(rules={"*": torch.float64}, reduce_dtype=torch.float64)

    def script(model, rank):
        model(batch(rank).to(next(iter(model.parameters())).dtype)).square().sum().backward()

    expected = dense_grads(build().double(), script, dist.get_world_size())
    for orig in (False, True):
        model = wrap(build(), use_orig_params=orig, mixed_precision=policy)
        script(model, dist.get_rank())
        rounded = {name: grad.float() for name, grad in expected.items()}
        assert_close(rounded, full_grads(model), GRADIENTS)
        twin = copy.deepcopy(model)
        twin.zero_grad()
        script(twin, dist.get_rank())
        assert_close(rounded, full_grads(twin), GRADIENTS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_under_a_rule_are_those_of_its_dtype(world_size):
    run_kept_ranks(float64_everywhere, world_size)


def masters():
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=F32, master_dtype=F32)
    for orig in (False, True):
        low = build().bfloat16()
        low.blocks[0].requires_grad_(False)
        start = {name: value.clone() for name, value in low.state_dict().items()}
        model = wrap(low, use_orig_params=orig, mixed_precision=policy)
        dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        assert {dtype for name, dtype in dtypes.items() if "blocks.0" in name} == {BF16}
        assert {dtype for name, dtype in dtypes.items() if "blocks.0" not in name} == {F32}
        reference = wrap(
            build().bfloat16().float(),
            use_orig_params=orig,
            mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32),
        )
        for block in (reference.module.blocks[0],):
            block.requires_grad_(False)
        pair = [(m, torch.optim.SGD(m.parameters(), lr=1e-5)) for m in (model, reference)]
        for step in range(3):
            for m, optimizer in pair:
                optimizer.zero_grad()
                m(batch(dist.get_rank(), step)).square().mean().backward()
                optimizer.step()
        state = {name: value.float() for name, value in model.state_dict().items()}
        assert_close(dict(reference.state_dict()), state, TRAINED)
        assert not torch.equal(state["inp.weight"], start["inp.weight"].float())


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_take_steps_that_the_low_dtype_would_lose(world_size):
    run_kept_ranks(masters, world_size)


def warned(**kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(build().bfloat16(), mixed_precision=MixedPrecision(**kwargs))
    return [str(w.message) for w in caught if "low precision" in str(w.message)]


def test_training_in_a_low_precision_is_warned_about_once_with_numbers():
    first, second = run_ranks(warned, 2, param_dtype=BF16)
    count = sum(p.numel() for p in build().parameters())
    assert len(first) == 1
    assert f"{len(list(build().parameters()))} trainable parameters" in first[0]
    assert "master_dtype" in first[0]
    assert count > 0
    assert second == []
    assert run_ranks(warned, 1, param_dtype=BF16, master_dtype=BF16) == [[]]
    assert run_ranks(warned, 1, param_dtype=BF16, master_dtype=F32) == [[]]
    assert issubclass(FsdpWarning, UserWarning)


def evaluated(strategy):
    policy = MixedPrecision(
        param_dtype=BF16, rules={nn.LayerNorm: torch.float16}, full_precision_in_eval=True
    )
    for orig in (False, True):
        model = wrap(
            build(),
            use_orig_params=orig,
            mixed_precision=policy,
            sharding_strategy=ShardingStrategy[strategy],
        )
        trained = model(batch(dist.get_rank()))
        assert trained.dtype is BF16
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(batch(0)), build()(batch(0)), rtol=1e-6, atol=1e-6)
        with torch.inference_mode():
            assert model(batch(0)).dtype is F32
        model.train()
        trained.square().sum().backward()  # of the forward before the evaluation
        between = full_grads(model)
        model.zero_grad()
        model(batch(dist.get_rank())).square().sum().backward()
        assert_bitwise(full_grads(model), between)
        model.eval()
        assert model(batch(0)).dtype is BF16  # with gradients


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_in_full_precision_is_that_of_the_plain_model(world_size, strategy):
    run_kept_ranks(evaluated, world_size, strategy)


def test_wrong_rules_are_refused_at_once():
    for rules, error in (
        ([nn.Linear], ConfigTypeError),
        ({Net(): F32}, ConfigTypeError),
        ({int: F32}, ConfigTypeError),
        ({"a": "float32"}, ConfigTypeError),
        ({"a": None}, ConfigTypeError),
        ({"a": torch.int64}, ConfigError),
    ):
        with pytest.raises(error, match="rules"):
            MixedPrecision(rules=rules)
    policy = MixedPrecision(rules={"a": F32})
    assert policy == MixedPrecision(rules={"a": F32})
    assert hash(policy) == hash(MixedPrecision(rules={"a": F32}))
    assert "rules={'a': torch.float32}" in repr(policy)
