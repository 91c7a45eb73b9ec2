"""Worlds that save and worlds that load; the oracle is the whole state dict of model and optimizer."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from fsdp import CPUOffload, ShardingStrategy, checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from tests.support.models import ENTRIES
from tests.support.oracles import wrap_entry

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


def build(name, strategy="FULL_SHARD", wrapping="blocks", orig=False, offload=False, seed=0):
    """The wrapped model and an optimizer without state."""
    item = ENTRIES[name]
    kwargs = {
        "sharding_strategy": ShardingStrategy[strategy],
        "cpu_offload": CPUOffload(offload_params=offload),
    }
    size = dist.get_world_size()
    if strategy == "HYBRID_SHARD":
        inner = 2 if size % 2 == 0 else 1
        kwargs["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (size // inner, inner))
    model = wrap_entry(item, item.build(seed), wrapping, use_orig_params=orig, **kwargs)
    trainable = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1)


def step(name, model, optimizer, index=0):
    """One training step on this rank's batch."""
    item = ENTRIES[name]
    optimizer.zero_grad()
    item.loss(model, item.make_batch(dist.get_rank(), index)).backward()
    optimizer.step()


def whole(model, optimizer):
    """Everything, on every rank."""
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def saved(path, name, kwargs, steps=2, extra=None, how="save"):
    """Train and save; what was saved comes back from every rank."""
    model, optimizer = build(name, **kwargs)
    for index in range(steps):
        step(name, model, optimizer, index)
    random.seed(dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    pending = getattr(checkpoint, how)(path, model, optimizer, extra or {"step": steps})
    if how == "async_save":
        pending.wait()
    numbers = (random.random(), torch.rand(1).item())
    return (*whole(model, optimizer), numbers)


def loaded(path, name, kwargs):
    """Load into other values; what was loaded comes back from every rank."""
    model, optimizer = build(name, **kwargs, seed=5)
    found = checkpoint.load(path, model, optimizer)
    numbers = (random.random(), torch.rand(1).item())
    state, optimizer_state = whole(model, optimizer)
    step(name, model, optimizer, 3)
    return state, optimizer_state, numbers, found.extra, found.random_state


def assert_same(expected, actual, where=""):
    """Bitwise, through dicts and lists."""
    if isinstance(expected, dict):
        assert sorted(map(str, expected)) == sorted(map(str, actual)), where
        for key in expected:
            assert_same(expected[key], actual[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), where
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == actual.dtype, where
        assert torch.equal(expected, actual), where
    else:
        assert expected == actual, where
