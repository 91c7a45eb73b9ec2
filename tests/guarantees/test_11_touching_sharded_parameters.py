"""Touching a sharded parameter is an error that names it and the remedy; the process never crashes.

With ``use_orig_params=True`` users hold their own parameters over this rank's pieces: plain tensors, which say by
``fsdp_shape`` what they are pieces of.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ShardedParameterError
from tests.support.ranks import run_ranks
from tests.support.scripts import batch, build, wrap

TOUCHES = {
    "sum": lambda w: w.sum(),
    "index": lambda w: w[0],
    "matmul": lambda w: w @ torch.ones(7),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, 7), w),
    "numpy": lambda w: w.detach().numpy(),
    "item": lambda w: w.view(-1)[0].item(),
    "in_place": lambda w: w.data.zero_(),
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float64),
    "compare": lambda w: bool((w == 0).all()),
    "list": lambda w: torch.stack([w, w]),
    "print_values": lambda w: w.tolist(),
}


def touched(when):
    model = wrap(build())
    if when == "after a step":
        model(batch(0)).sum().backward()
    if when == "after eval":
        model.eval()
        with torch.no_grad():
            model(batch(0))
    weight = model.module.blocks[1].module.up.weight
    assert tuple(weight.shape) == (15, 7)
    assert weight.dtype is torch.float32
    assert "blocks.1.up.weight" in repr(weight)
    for name, touch in TOUCHES.items():
        with pytest.raises(ShardedParameterError, match="summon_full_params") as caught:
            touch(weight)
        assert caught.value.fqn == "blocks.1.up.weight", name
    with FSDP.summon_full_params(model):
        whole = model.module.blocks[1].module.up.weight
        assert torch.equal(whole, build().blocks[1].up.weight) or when == "after a step"
        assert torch.isfinite(whole.sum())
    model(batch(0)).sum().backward()  # the model is as usable as before


@pytest.mark.parametrize("when", ["before any forward", "after a step", "after eval"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_operation_raises_naming_the_parameter(world_size, when):
    run_ranks(touched, world_size, when)


def pieces():
    model = wrap(build(), use_orig_params=True)
    model(batch(0)).sum().backward()
    weight = model.module.blocks[1].module.up.weight
    assert weight.fsdp_shape == (15, 7)
    total = torch.tensor([weight.detach().sum(), weight.numel()])
    dist.all_reduce(total)
    assert total[1] == 15 * 7
    torch.testing.assert_close(total[0], build().blocks[1].up.weight.sum().detach())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_orig_parameters_are_pieces_that_add_up_to_the_whole(world_size):
    run_ranks(pieces, world_size)
