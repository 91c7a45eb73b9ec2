"""Where a backend makes the mean of gradients itself, nothing is left to divide; elsewhere the sum is divided."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, _torch
from tools.bench.loopback import loopback_group

MEAN, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def reduced(monkeypatch, world_size, reduce_dtype, orig, divisor=None):
    """This rank's gradient, that of the unwrapped model at the same place, and the operations that ran.

    On a loop-back group all ranks contribute alike, so their mean is the unwrapped model's gradient; they have other
    weights, which the gradient of this loss knows nothing of.
    """
    ops = []
    launcher = _torch.reduce_scatter_of

    def noting(group):
        def launch(output, whole, options):
            ops.append(options.reduceOp)
            return launcher(group)(output, whole, options)

        return launch

    monkeypatch.setattr(_torch, "reduce_scatter_of", noting)
    torch.manual_seed(0)
    module, batch, scales = nn.Linear(5, 7, bias=False), torch.randn(3, 5), torch.randn(3, 7)
    (module(batch) * scales).sum().backward()
    dense = module.weight.grad.flatten()
    module.weight.grad = None
    with loopback_group(world_size):
        policy = MixedPrecision(reduce_dtype=reduce_dtype)
        model = FSDP(
            module, mixed_precision=policy, use_orig_params=orig, device_id=torch.device("cpu")
        )
        if divisor is not None:
            model.set_gradient_divisor(divisor)
        (model(batch) * scales).sum().backward()
        (param,) = model.parameters()
        own = torch.nn.functional.pad(dense, (0, -len(dense) % world_size))[: param.grad.numel()]
        return param.grad.flatten().clone(), own, ops


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    ("world_size", "dtype", "op"),
    [
        (2, torch.float32, MEAN),
        (3, torch.float32, MEAN),
        (3, torch.float64, MEAN),
        (4, torch.bfloat16, MEAN),
        (3, torch.bfloat16, SUM),  # a third is not exact in bfloat16
        (4, torch.float16, SUM),  # the sum could overflow, so part of the division comes before it
    ],
)
def test_the_backend_averages_where_that_is_as_exact_as_dividing(
    monkeypatch, world_size, dtype, op, orig
):
    grad, dense, ops = reduced(monkeypatch, world_size, dtype, orig)
    assert ops == [op]
    torch.testing.assert_close(
        grad, dense.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_the_users_divisor_takes_the_place_of_the_mean(monkeypatch, orig):
    grad, dense, ops = reduced(monkeypatch, 4, None, orig, divisor=1.0)
    assert ops == [SUM]
    torch.testing.assert_close(grad, 4 * dense)
