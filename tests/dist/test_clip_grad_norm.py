"""``clip_grad_norm_``: the norm of the whole gradient for every order, equal on all ranks, whatever the nesting."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FsdpWarning, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import UsageError
from fsdp.wrap import CustomPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks

ORDERS = (0.5, 1, 2.0, 3.0, math.inf)


def backward(item):
    return lambda model, rank: item.loss(model, item.make_batch(rank, 0)).backward()


def dense_clipped(item, max_norm, order, ranks):
    """The dense model's norm and clipped gradients."""
    model = item.build()
    for name, grad in mean_grads(model, backward(item), ranks).items():
        model.get_parameter(name).grad = grad
    params = [param for param in model.parameters() if param.numel()]
    norm = nn.utils.clip_grad_norm_(params, max_norm, order)
    return norm, {name: param.grad for name, param in model.named_parameters()}


def check(model, item, max_norm, order):
    ranks = range(dist.get_world_size())
    norm, expected = dense_clipped(item, max_norm, order, ranks)
    backward(item)(model, dist.get_rank())
    got = model.clip_grad_norm_(max_norm, order)
    assert got.shape == ()
    torch.testing.assert_close(got, norm, rtol=1e-5, atol=0)
    assert_close(expected, full_grads(model), GRADIENTS, none_is_zero=True)
    return got.item()


def orders(name, order):
    item = entry(name)
    norms = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for orig in (False, True):
            for max_norm in (0.05, 1e6):  # one that bites and one that must change nothing
                model = wrap_entry(
                    item,
                    item.build(),
                    sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=orig,
                )
                norms.append(check(model, item, max_norm, order))
    return norms


@pytest.mark.parametrize("name", ["gpt_tied", "lora", "odd"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_the_dense_norm_on_every_rank(name, order):
    by_rank = run_kept_ranks(orders, 2, name, order)
    assert by_rank[0] == by_rank[1]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_other_world_sizes_too(world_size, order):
    by_rank = run_kept_ranks(orders, world_size, "gpt_tied", order)
    assert all(norms == by_rank[0] for norms in by_rank)


def mixed_nesting(order):
    """A sharded root, a replicated block, a block that keeps its parameters, and a block that is ignored."""
    item = entry("mlp")
    strategies = {0: ShardingStrategy.NO_SHARD, 1: ShardingStrategy.SHARD_GRAD_OP}
    norms = []
    for orig in (False, True):
        plain = item.build()
        by_block = {plain.blocks[i]: strategy for i, strategy in strategies.items()}
        policy = CustomPolicy(
            lambda m, by_block=by_block: (
                {"sharding_strategy": by_block[m]} if m in by_block else isinstance(m, MlpBlock)
            )
        )
        norms.append(
            check(FSDP(plain, auto_wrap_policy=policy, use_orig_params=orig), item, 0.05, order)
        )
    return norms


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_units_of_different_strategies_are_counted_once_each(order):
    by_rank = run_kept_ranks(mixed_nesting, 3, order)
    assert by_rank[0] == by_rank[1] == by_rank[2]


def ignored():
    """Ignored parameters are on every rank: they count once.  Their gradients are made equal by hand."""
    item = entry("mlp")
    ranks = range(dist.get_world_size())
    norm, expected = dense_clipped(item, 0.05, 2.0, ranks)
    plain = item.build()
    model = wrap_entry(item, plain, ignored_modules=[plain.out])
    backward(item)(model, dist.get_rank())
    for param in plain.out.parameters():
        dist.all_reduce(param.grad)
        param.grad /= len(ranks)
    got = model.clip_grad_norm_(0.05)
    torch.testing.assert_close(got, norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(plain.out.weight.grad, expected["out.weight"])
    return got.item()


def test_ignored_parameters_count_once_and_are_scaled():
    first, second = run_kept_ranks(ignored, 2)
    assert first == second


def low_precision():
    """bfloat16 gradients: the norm is summed in float32, and what is kept in bfloat16 stays so."""
    item = entry("mlp")
    policy = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrap_entry(item, item.build(), mixed_precision=policy, use_orig_params=True)
    backward(item)(model, dist.get_rank())
    squares = torch.zeros(())
    for grad in full_grads(model).values():
        squares += grad.float().square().sum()
    got = model.clip_grad_norm_(0.05)
    torch.testing.assert_close(
        got.float(), squares.sqrt(), rtol=2**-8, atol=0
    )  # returned in bfloat16
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {
        torch.bfloat16
    }


def test_low_precision_gradients_have_an_accurate_norm():
    run_kept_ranks(low_precision, 2)


def nothing_to_clip():
    item = entry("mlp")
    for orig in (False, True):
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        assert model.clip_grad_norm_(1.0).item() == 0.0
        backward(item)(model, dist.get_rank())
        model.zero_grad()
        assert model.clip_grad_norm_(1.0).item() == 0.0
        with pytest.raises(UsageError, match="root"):
            model.blocks[0].clip_grad_norm_(1.0)


def test_without_gradients_the_norm_is_zero_and_an_inner_unit_refuses():
    run_kept_ranks(nothing_to_clip, 2)


def infinite():
    """One infinite element on one rank makes the norm infinite on all, and clipping takes no NaN for a number."""
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    backward(item)(model, dist.get_rank())
    if dist.get_rank() == 1:
        next(model.parameters()).grad[0] = math.inf
    return model.clip_grad_norm_(1.0).item()


def test_an_infinite_gradient_of_one_rank_shows_on_all():
    assert run_kept_ranks(infinite, 2) == [math.inf, math.inf]


def by_tensor():
    """``max_norm`` may be a tensor."""
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    backward(item)(model, dist.get_rank())
    model.clip_grad_norm_(torch.tensor(0.05))
    again = model.clip_grad_norm_(0.05)
    assert again.item() == pytest.approx(0.05, rel=1e-4)


def test_the_bound_may_be_a_tensor_and_clipping_twice_reaches_it():
    run_kept_ranks(by_tensor, 2)


class Halves(nn.Module):
    """Two layers in one unit, of which a step uses one: some ranks then hold no gradient at all."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(7, 7, dtype=dtype)
        self.second = nn.Linear(7, 7, dtype=dtype)

    def forward(self, x, number):
        return (self.first if number == 0 else self.second)(x)


def one_half(dtype, order):
    model = Halves(dtype)
    dense = copy.deepcopy(model)
    wrapped = FSDP(model, use_orig_params=True)
    rows = torch.randn(dist.get_world_size(), 2, 7, dtype=dtype)
    for number in range(2):
        for made, x in ((wrapped, rows[dist.get_rank()]), (dense, rows.flatten(0, 1))):
            made.zero_grad()
            made(x, number).abs().square().mean().backward()
        with warnings.catch_warnings():  # of ranks without gradients
            warnings.simplefilter("ignore", FsdpWarning)
            norm = wrapped.clip_grad_norm_(0.01, order)
        params = [param for param in dense.parameters() if param.grad is not None]
        expected = nn.utils.clip_grad_norm_(params, 0.01, order)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)  # the dtype, too
        for name, grad in full_grads(wrapped).items():
            torch.testing.assert_close(grad, dense.get_parameter(name).grad)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.cdouble])
def test_ranks_without_gradients_agree_on_the_norm_in_every_dtype(dtype, order, world_size):
    run_ranks(one_half, world_size, dtype, order)
