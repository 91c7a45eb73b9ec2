"""Models of several strategies, a scaler and a free parameter, clipped in one call: the norm is one process's to 1e-6.

Oracle: torch's own function over the dense models' mean gradients, scaled and unscaled as the wrapped ones are.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp import ShardingStrategy
from fsdp.errors import UsageError
from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

KINDS = ("HYBRID_SHARD", "FULL_SHARD", "NO_SHARD")
SCALE = 64.0


class NoHostSynchronisation(TorchDispatchMode):
    """Fails where a value of a tensor is brought to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waited for a value"
        return func(*args, **(kwargs or {}))


def wrapped(kind, seed, orig):
    item = entry("gpt_tied")
    strategy = ShardingStrategy[kind]
    options = {"device_mesh": init_device_mesh("cpu", (2, 2))} if kind == "HYBRID_SHARD" else {}
    return wrap_entry(
        item, item.build(seed), sharding_strategy=strategy, use_orig_params=orig, **options
    )


def script(model, rank):
    item = entry("gpt_tied")
    item.loss(model, item.make_batch(rank, 0)).backward()


def free_parameter():
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([0.3, -0.1, 0.2])
    return param


def together(order, orig):
    dense = [entry("gpt_tied").build(seed) for seed in range(len(KINDS))]
    for model in dense:
        for name, grad in mean_grads(model, script, range(4)).items():
            model.get_parameter(name).grad = grad
    free = free_parameter()
    params = [*(p for model in dense for p in model.parameters()), free]
    expected = nn.utils.clip_grad_norm_(params, 0.05, order)

    ours = [wrapped(kind, seed, orig) for seed, kind in enumerate(KINDS)]
    scaler = ShardedGradScaler("cpu", init_scale=SCALE)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in ours]
    for model, optimizer in zip(ours, optimizers, strict=True):
        item = entry("gpt_tied")
        scaler.scale(item.loss(model, item.make_batch(dist.get_rank(), 0))).backward()
        scaler.unscale_(optimizer)
    own = free_parameter()
    with NoHostSynchronisation():
        norm = fsdp.clip_grad_norm_([*ours, own], 0.05, order)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(own.grad, free.grad)
    for model, plain in zip(ours, dense, strict=True):
        wanted = {name: param.grad for name, param in plain.named_parameters()}
        assert_close(wanted, full_grads(model), GRADIENTS)
    return norm.item()


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("order", [1.0, 2.0, 2.5, math.inf])
def test_several_strategies_and_a_scaler_are_clipped_as_one(order, orig):
    by_rank = run_kept_ranks(together, 4, order, orig)
    assert by_rank == [by_rank[0]] * 4


def by_method(orig):
    for kind in KINDS:
        model = wrapped(kind, 0, orig)
        script(model, dist.get_rank())
        with NoHostSynchronisation():
            model.clip_grad_norm_(0.05)


@pytest.mark.parametrize("orig", [False, True])
def test_the_host_never_waits_for_the_norm(orig):
    run_kept_ranks(by_method, 4, orig)


def named(orig):
    for kind in KINDS:
        model = wrapped(kind, 0, orig)
        script(model, dist.get_rank())
        names = [name for name, _ in entry("gpt_tied").build().named_parameters()]
        with fsdp.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for name, param in model.named_parameters():
                if name == names[-2] and dist.get_rank() >= 0:
                    param.grad.view(-1)[0] = math.inf
        for call in (
            model.clip_grad_norm_,
            lambda *a, m=model, **k: fsdp.clip_grad_norm_(m, *a, **k),
        ):
            with pytest.raises(UsageError, match="not finite") as caught:
                call(1.0, error_if_nonfinite=True)
            assert caught.value.fqn == names[-2]


@pytest.mark.parametrize("orig", [False, True])
def test_what_is_not_finite_is_named_under_every_strategy(orig):
    run_kept_ranks(named, 4, orig)
