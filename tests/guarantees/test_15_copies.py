"""A wrapped model can be pickled, averaged and deleted like a plain one.

Deepcopies, ``AveragedModel`` and the memory of a deleted model are in ``tests/dist/test_guarantees.py``.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardedEMA, ShardingStrategy
from fsdp.errors import CheckpointError, ConfigError
from tests.dist.test_engine_features import record
from tests.dist.test_guarantees import Tied
from tests.support.compare import assert_bitwise
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes
from tests.support.scripts import (
    Block,
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)


def script(model, rank):
    model(batch(rank)).square().sum().backward()


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file.getbuffer().nbytes, torch.load(file, weights_only=False)


def pickles(strategy):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for orig in (False, True):
        net = build(Tied)
        net.blocks[1].requires_grad_(False)
        model = wrap(net, use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
        model.set_gradient_divisor(0.5 * world_size)
        script(model, rank)
        size, twin = through_torch_save(model)
        assert type(twin) is FSDP
        assert isinstance(twin.module.blocks[0], FSDP)
        assert_bitwise(dict(model.state_dict()), dict(twin.state_dict()))
        assert [name for name, _ in twin.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
        assert twin.module.out.weight is twin.module.last.weight
        assert twin.generate(torch.ones(1, 7)).shape == (1, 5)
        twin.zero_grad()
        script(twin, rank)
        frozen = build(Tied)
        frozen.blocks[1].requires_grad_(False)
        expected = {
            name: None if grad is None else 2 * grad
            for name, grad in dense_grads(frozen, script, world_size).items()
        }
        assert_same_gradients(expected, full_grads(twin), none_is_zero=False)
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert not torch.equal(twin.state_dict()["inp.weight"], model.state_dict()["inp.weight"])
        inner = pickle.loads(pickle.dumps(model.module.blocks[0]))
        assert inner.check_is_root()
        inner(torch.ones(1, 7))
        assert size > 0


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pickled_model_is_the_same_model_in_the_same_world(world_size, strategy):
    run_kept_ranks(pickles, world_size, strategy)


def big_pickle(use_orig_params):
    net = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    model = FSDP(net, use_orig_params=use_orig_params)
    return through_torch_save(model)[0]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pickle_holds_this_ranks_shard_once_and_no_more(world_size, use_orig_params):
    whole = 2 * 200 * 200 * 4
    for size in run_kept_ranks(big_pickle, world_size, use_orig_params):
        assert 0.99 * whole / world_size < size < whole / world_size + 40_000


def rules_and_buffers(use_orig_params):
    policy = MixedPrecision(
        param_dtype=torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        rules={nn.LayerNorm: torch.float32},
    )
    model = wrap(build(Tied), mixed_precision=policy, use_orig_params=use_orig_params)
    model.module.scale.mul_(1.0 / 3)
    before = model.module.scale.clone()
    model(batch(0))
    twin = through_torch_save(model)[1]
    assert torch.equal(twin.state_dict()["scale"], before)
    torch.testing.assert_close(twin(batch(0)), model(batch(0)), rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dtype_rules_and_cast_buffers_survive(world_size, use_orig_params):
    run_kept_ranks(rules_and_buffers, world_size, use_orig_params)


def another_world(data=None):
    if data is None:
        return pickle.dumps(wrap(build()))
    pickle.loads(data)
    return None


def test_a_pickle_in_another_world_is_refused_by_name():
    data = run_kept_ranks(another_world, 2)
    (alone,) = run_ranks_outcomes(another_world, 1, data[0])
    assert alone.raised(CheckpointError)
    assert "fsdp.checkpoint" in alone.message
    first, second = run_ranks_outcomes(another_world, 2, data[1])
    assert "pickled by rank 1 and is loaded by rank 0" in first.message
    assert second.ok or "rank" in second.message


def averages():
    rank = dist.get_rank()
    for orig in (False, True):
        dense, model = build(), wrap(build(), use_orig_params=orig)
        events = record(model)
        pairs = [
            (m, torch.optim.SGD(m.parameters(), lr=0.1), ShardedEMA(m, 0.9)) for m in (dense, model)
        ]
        expected = {name: value.clone() for name, value in dense.state_dict().items()}
        for step in range(5):
            for m, optimizer, ema in pairs:
                optimizer.zero_grad()
                m(batch(0, step)).square().mean().backward()  # the same data on every rank
                optimizer.step()
                communicated = len(events)
                ema.update()
                assert len(events) == communicated
            # Gradients are the same up to the order of sums over ranks, so the model's own values are averaged.
            for name, value in model.state_dict().items():
                expected[name].lerp_(value, 1.0 - 0.9)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ema = pairs[1][2]
        with ema.swapped():
            assert_bitwise(expected, dict(model.state_dict()))
            model(batch(rank))
        assert_bitwise(before, dict(model.state_dict()))
        other = ShardedEMA(model, 0.5)
        other.load_state_dict(through_torch_save(ema.state_dict())[1])
        with other.swapped():
            assert_bitwise(expected, dict(model.state_dict()))
        with pytest.raises(CheckpointError, match="another model"):
            other.load_state_dict({"decay": 0.1, "averages": {}})
        with pytest.raises(ConfigError, match=r"\[0, 1\]"):
            ShardedEMA(model, 1.5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_average_equals_the_average_of_the_whole_bit_by_bit(world_size):
    run_kept_ranks(averages, world_size)


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: through_torch_save(value)[1],
    "deepcopy": copy.deepcopy,
}


def optimizer_alone(use_orig_params):
    models = [wrap(build(), use_orig_params=use_orig_params) for _ in range(2)]
    kept, fresh = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for step, copied in enumerate(COPIES.values()):
        for model, optimizer in zip(models, (kept, fresh), strict=True):
            model.zero_grad()
            model(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
        twin = copied(kept)
        torch.testing.assert_close(twin.state_dict(), kept.state_dict(), rtol=0, atol=0)
        params = [optimizer.param_groups[0]["params"] for optimizer in (twin, kept)]
        torch.testing.assert_close(*params, rtol=0, atol=0)
        fresh = torch.optim.AdamW(models[1].parameters())
        fresh.load_state_dict(twin.state_dict())
    assert_bitwise(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_copied_or_pickled_alone_has_its_state_for_another_one(
    world_size, use_orig_params
):
    run_kept_ranks(optimizer_alone, world_size, use_orig_params)


def forgotten(use_orig_params):
    model = wrap(
        build(),
        mixed_precision=MixedPrecision(rules={Block: torch.float64}),
        use_orig_params=use_orig_params,
    )
    weight = next(model.parameters())
    if use_orig_params:
        weight.register_post_accumulate_grad_hook(lambda p: None)
    script(model, 0)
    twin = pickle.loads(pickle.dumps(model))
    watched = [weakref.ref(part) for m in (model, twin) for part in (m, m.module, m._unit)]
    del model, twin, weight
    gc.collect()
    return [reference() is None for reference in watched]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_deleting_a_model_and_its_copy_frees_both(world_size, use_orig_params):
    for freed in run_kept_ranks(forgotten, world_size, use_orig_params):
        assert all(freed)
