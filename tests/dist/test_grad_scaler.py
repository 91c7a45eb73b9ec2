"""ShardedGradScaler: ranks agree on overflows; fp16 training equals the plain scaler on the dense model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import batch, build, wrap


def overflow(use_orig_params, fused):
    model = wrap(build(), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    before = model.state_dict()
    scaler.scale(model(batch(dist.get_rank())).sum()).backward()
    if dist.get_rank() == 0:
        next(p for p in model.parameters() if p.numel()).grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(use_orig_params, fused):
    assert run_kept_ranks(overflow, 3, use_orig_params, fused) == [4.0, 4.0, 4.0]


class StandIn:
    """A process group of one rank, as tests of training loops have it: no backends, no default group."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def allreduce(self, tensors, options=None):
        return self

    def wait(self):
        return True


@pytest.mark.parametrize("value", [3.0, float("inf")])
def test_a_stand_in_for_a_process_group_will_do(value):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=StandIn())
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == ([1.0, 1.0] if value == float("inf") else [-2.0, -2.0])


def trained():
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=16.0, growth_interval=2)
    dense = build()
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    dense_scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(batch(dist.get_rank(), step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        dense_optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            loss = dense(batch(rank, step)).square().mean() / dist.get_world_size()
            dense_scaler.scale(loss).backward()
        dense_scaler.unscale_(dense_optimizer)
        torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        dense_scaler.step(dense_optimizer)
        dense_scaler.update()
    assert scaler.get_scale() == dense_scaler.get_scale()
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=2e-4, atol=1e-6)


def test_scaled_training_equals_the_dense_model():
    run_kept_ranks(trained, 2)
