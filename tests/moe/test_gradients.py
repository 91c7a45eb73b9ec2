"""Units over fewer ranks than their tree, experts: gradients, norms and steps equal the dense mixture's."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError, UnsupportedError, UsageError
from tests.moe.support import build, data, dense_mean, loss_of, place, spread, wrap
from tests.support.compare import GRADIENTS, TRAINED, assert_close
from tests.support.oracles import full_grads, full_params, mean_grads
from tests.support.ranks import run_kept_ranks

WORLDS = [(2, 2), (4, 2), (4, 4), (3, 1), (2, 1)]  # ranks, and how many of them share the experts


def gradients(expert_ranks, strategy):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(expert_ranks)
    expected = dense_mean(world)
    for orig in (False, True):
        model = wrap(spread(build(), where), where, strategy=strategy, use_orig_params=orig)
        loss_of(model, rank).backward()
        got = full_grads(model)
        assert_close({name: expected[name] for name in got}, got, GRADIENTS)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("world", "expert_ranks"), WORLDS)
def test_experts_gradients_are_the_mean_over_all_data_that_they_saw(world, expert_ranks, strategy):
    run_kept_ranks(gradients, world, expert_ranks, strategy)


def clipped(expert_ranks, order, orig, strategy):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(expert_ranks)
    expected = dense_mean(world)
    dense = build()
    for name, param in dense.named_parameters():
        param.grad = expected[name].clone()
    norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.01, order)
    norms = []
    for by_function in (False, True):
        model = wrap(spread(build(), where), where, strategy=strategy, use_orig_params=orig)
        loss_of(model, rank).backward()
        clip = model.clip_grad_norm_
        if by_function:
            clip = lambda *args: fsdp.clip_grad_norm_(model.parameters(), *args)  # noqa: B023, E731
        got = clip(0.01, order)
        torch.testing.assert_close(got, norm, rtol=1e-6 if order != 0.5 else 1e-5, atol=0)
        norms.append(got.item())
        grads = full_grads(model)
        wanted = {name: dense.get_parameter(name).grad for name in grads}
        assert_close(wanted, grads, GRADIENTS)
    return norms


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 0.5, math.inf])
def test_each_parameter_counts_once_in_the_norm_which_is_equal_on_all_ranks(order, orig):
    by_rank = run_kept_ranks(clipped, 4, 2, order, orig, "FULL_SHARD")
    assert all(norms == by_rank[0] for norms in by_rank)


@pytest.mark.parametrize("expert_ranks", [2, 4])
def test_replicated_experts_count_once_too(expert_ranks):
    by_rank = run_kept_ranks(clipped, 4, expert_ranks, 2.0, False, "NO_SHARD")
    assert all(norms == by_rank[0] for norms in by_rank)


def nonfinite():
    where = place(2)
    model = wrap(spread(build(), where), where)
    loss_of(model, dist.get_rank()).backward()
    with fsdp.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            if name == "blocks.1.experts.each.2.up.bias":  # on ranks 1 and 3 only
                param.grad[0] = math.nan
    with pytest.raises(UsageError, match=r"gradients of 'blocks\.1\.experts\.each\.2\.up\.bias'\."):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_what_is_not_finite_on_some_ranks_is_named_on_all():
    run_kept_ranks(nonfinite, 4)


def divisors(expert_ranks):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(expert_ranks)
    mean = dense_mean(world)
    for orig in (False, True):
        model = wrap(spread(build(), where), where, use_orig_params=orig)
        for divisor, factor in ((7.0, world / 7.0), (None, 1.0)):
            model.zero_grad()
            model.set_gradient_divisor(divisor)
            loss_of(model, rank).backward()
            got = full_grads(model)
            assert_close({name: mean[name] * factor for name in got}, got, GRADIENTS)


def test_a_divisor_for_a_step_is_the_experts_too_and_none_restores_their_own():
    run_kept_ranks(divisors, 4, 2)


def by_hand(orig):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(2)
    plain = spread(build(), where)
    for block in plain.blocks:
        for number, expert in block.experts.each.items():
            block.experts.each[number] = FSDP(
                expert, process_group=where.along, gradient_divisor=world, use_orig_params=orig
            )
    model = FSDP(plain, use_orig_params=orig)
    expected = dense_mean(world)
    loss_of(model, rank).backward()
    got = full_grads(model)
    assert_close({name: expected[name] for name in got}, got, GRADIENTS)
    norm = model.clip_grad_norm_(1e9)
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(norm, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("orig", [False, True])
def test_experts_wrapped_by_hand_with_another_group_are_the_same(orig):
    run_kept_ranks(by_hand, 4, orig)


def trained(orig, accumulate, clip):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(2)
    dense = build()
    model = wrap(spread(build(), where), where, use_orig_params=orig)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, model)]
    for step in range(3):
        for micro in range(accumulate):
            number = step * accumulate + micro
            for who in range(world):
                (loss_of(dense, who, number) / world).backward()
            with model.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                loss_of(model, rank, number).backward()
        if clip:
            nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
            model.clip_grad_norm_(0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = full_params(model)
    assert_close({name: dense.get_parameter(name) for name in got}, got, TRAINED)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_with_accumulation_and_clipping_is_the_dense_models(orig, accumulate):
    run_kept_ranks(trained, 4, orig, accumulate, True)


def synchronised():
    where = place(2)
    plain = spread(build(seed=dist.get_rank()), where)
    model = wrap(plain, where, sync_module_states=True)
    got = full_params(model)
    sources = {True: build(seed=dist.get_rank() % 2), False: build(seed=0)}
    for name, value in got.items():
        source = sources["experts" in name]
        torch.testing.assert_close(value, source.get_parameter(name), rtol=0, atol=0)


def test_synchronising_gives_experts_the_values_of_the_first_rank_that_has_them():
    run_kept_ranks(synchronised, 4)


def unused(orig):
    """An expert that no token of this rank visits is reduced all the same: others gave it tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(2)

    def loss(model, who):
        x = data(who) * (1 if who in (1, 2) else 0)  # the others have no token worth anything
        return model(x).square().mean()

    expected = mean_grads(build(), lambda m, who: loss(m, who).backward(), range(world))
    model = wrap(spread(build(), where), where, use_orig_params=orig)
    loss(model, rank).backward()
    got = full_grads(model)
    assert_close({name: expected[name] for name in got}, got, GRADIENTS)


@pytest.mark.parametrize("orig", [False, True])
def test_ranks_whose_tokens_do_not_reach_an_expert_still_reduce_it(orig):
    run_kept_ranks(unused, 4, orig)


def refused():
    where = place(2)
    model = wrap(spread(build(), where), where)
    with pytest.raises(UnsupportedError, match="communication hook has one state"):
        model.register_comm_hook(None, lambda state, grad, output=None: None)
    with pytest.raises(UnsupportedError, match="Join needs every unit over all ranks"):
        model.join_hook()
    for wrong in (0, -2, "two"):
        with pytest.raises(ConfigError, match="the gradient divisor is"):
            wrap(spread(build(), where), where, divisor=wrong)
        with pytest.raises(ConfigError, match="the gradient divisor is"):
            FSDP(nn.Linear(2, 2), gradient_divisor=wrong)


def test_what_can_not_be_right_is_refused():
    run_kept_ranks(refused, 4)
