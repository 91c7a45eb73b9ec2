"""torch.compile of blocks, before or after wrapping: gradients of the dense model, clean keys, no recompilation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)


def compiled(use_orig_params):
    for order in ("before", "wrapper", "module"):
        torch._dynamo.reset()
        compiled_in(order, use_orig_params)


def compiled_in(order, use_orig_params):
    from torch._dynamo.utils import counters

    counters.clear()
    net = build()
    if order == "before":
        for index, block in enumerate(net.blocks):
            net.blocks[index] = torch.compile(block, backend="aot_eager")
        model = FSDP(net, auto_wrap_policy={type(net.blocks[0])}, use_orig_params=use_orig_params)
    else:
        model = wrap(net, use_orig_params=use_orig_params)
        for wrapper in FSDP.fsdp_modules(model)[1:]:
            target = wrapper if order == "wrapper" else wrapper.module
            target.compile(backend="aot_eager")
    frames = []
    for _ in range(4):
        model.zero_grad()
        model(batch(dist.get_rank())).square().sum().backward()
        model.eval()
        with torch.no_grad():
            model(batch(dist.get_rank()))
        model.train()
        frames.append(counters["frames"]["total"])
    assert 0 < frames[1] == frames[3], (order, frames)
    expected = dense_grads(
        build(), lambda m, r: m(batch(r)).square().sum().backward(), dist.get_world_size()
    )
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)
    reference = build(seed=4).state_dict()
    model.load_state_dict(reference)
    state = model.state_dict()
    assert list(state) == list(reference)
    assert all(torch.equal(state[name], reference[name]) for name in reference)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_compiled_blocks_train_as_eager_ones_in_either_order_with_wrapping(
    world_size, use_orig_params
):
    run_kept_ranks(compiled, world_size, use_orig_params)
