"""``fsdp.clip_grad_norm_``: parameters of any models together, as torch's function on the dense ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import ShardingStrategy
from fsdp.errors import ConfigTypeError, UsageError
from tests.support.oracles import full_grads
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import assert_same_gradients, batch, build, dense_grads, wrap


def script(model, rank):
    model(batch(rank)).square().sum().backward()


def dense_pair(world_size):
    pair = build(), build(seed=1)
    for model in pair:
        grads = dense_grads(model, script, world_size)
        for name, param in model.named_parameters():
            param.grad = grads[name]
    return pair


def clipped(strategy, norm_type):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for orig in (False, True):
        dense = dense_pair(world_size)
        ours = [
            wrap(build(seed=seed), use_orig_params=orig, sharding_strategy=kind)
            for seed, kind in enumerate((ShardingStrategy[strategy], ShardingStrategy.FULL_SHARD))
        ]
        extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        for param in extra:
            param.grad = torch.full_like(param, 0.5)
        for model in ours:
            script(model, rank)
        params = [p for model in dense for p in model.parameters()]
        expected = nn.utils.clip_grad_norm_([*params, extra[0]], 0.3, norm_type)
        got = fsdp.clip_grad_norm_(
            [ours[0], {"params": ours[1].parameters()}, extra[1:]], 0.3, norm_type
        )
        reference = nn.utils.get_total_norm([torch.full((2,), 0.5)], norm_type)
        if norm_type == math.inf:
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        else:
            whole = nn.utils.get_total_norm([torch.full((3,), 0.5)], norm_type)
            wanted = (expected**norm_type - whole**norm_type + reference**norm_type) ** (
                1 / norm_type
            )
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=0)
        for model, plain in zip(ours, dense, strict=True):
            scale = (0.3 / (got + 1e-6)) / (0.3 / (expected + 1e-6))
            wanted = {name: p.grad * scale for name, p in plain.named_parameters()}
            assert_same_gradients(wanted, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_models_and_a_free_parameter_are_clipped_as_one(world_size, strategy, norm_type):
    run_kept_ranks(clipped, world_size, strategy, norm_type)


def nonfinite():
    for orig in (False, True):
        model = wrap(build(), use_orig_params=orig)
        model(batch(dist.get_rank())).square().sum().backward()
        before = full_grads(model)
        with fsdp.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for name, param in model.named_parameters():
                if name in ("blocks.1.up.bias", "out.weight"):
                    param.grad.view(-1)[0] = math.nan
        for call in (
            lambda model=model: model.clip_grad_norm_(1.0, error_if_nonfinite=True),
            lambda model=model: fsdp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True),
        ):
            with pytest.raises(UsageError, match=r"'out\.weight'") as caught:
                call()
            assert "'blocks.1.up.bias'" in str(caught.value)
            assert "inp" not in str(caught.value)
        after = full_grads(model)
        assert torch.equal(after["inp.weight"], before["inp.weight"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_are_not_finite_are_named_on_every_rank_and_nothing_is_scaled(world_size):
    run_kept_ranks(nonfinite, world_size)


def refused():
    model = wrap(build())
    with model.no_sync():
        script(model, 0)
    with pytest.raises(UsageError, match="unreduced"):
        fsdp.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ConfigTypeError, match="str"):
        fsdp.clip_grad_norm_("weights", 1.0)


def test_unreduced_gradients_and_strange_arguments_are_refused():
    run_kept_ranks(refused, 2)
