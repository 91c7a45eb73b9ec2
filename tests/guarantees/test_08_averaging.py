"""``set_gradient_divisor(d)`` gives the gradient of the sum over all ranks divided by d, for every strategy."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fsdp import ShardingStrategy
from tests.dist.test_engine_features import micro_batches
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)


def divided(strategy):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [rank_ + 1 for rank_ in range(world_size)]  # unequal numbers of rows
    total = float(sum(rows))
    for use_orig_params in (False, True):
        model = wrap(build(), sharding_strategy=strategy, use_orig_params=use_orig_params)
        model.set_gradient_divisor(total)
        model(batch(rank, rows=rows[rank])).square().sum().backward()
        dense = build()
        for other in range(world_size):
            (dense(batch(other, rows=rows[other])).square().sum() / total).backward()
        expected = {name: param.grad for name, param in dense.named_parameters()}
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)
        model.zero_grad()
        model.set_gradient_divisor(None)
        model(batch(rank)).square().sum().backward()
        expected = dense_grads(build(), micro_batches("s"), world_size)
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)
    with pytest.raises(ValueError, match="positive"):
        model.set_gradient_divisor(0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_token_count_as_divisor_gives_the_gradient_of_one_big_batch(world_size, strategy):
    run_kept_ranks(divided, world_size, ShardingStrategy[strategy])


def divided_over_a_mesh(shape):
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    rank, tokens = dist.get_rank(), 10.0
    dense = build()
    for other in range(dist.get_world_size()):
        (dense(batch(other)).square().sum() / tokens).backward()
    expected = {name: param.grad for name, param in dense.named_parameters()}
    for use_orig_params in (False, True):
        model = wrap(
            build(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh,
            use_orig_params=use_orig_params,
        )
        for step_tokens in (3.0, tokens):  # it may be set for each step
            model.zero_grad()
            model.set_gradient_divisor(step_tokens)
            model(batch(rank)).square().sum().backward()
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2)], ids=str)
def test_over_a_mesh_the_divisor_covers_both_axes(shape):
    run_kept_ranks(divided_over_a_mesh, shape[0] * shape[1], shape)
