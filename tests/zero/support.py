"""Models, batches and counters for the tests of ZeroRedundancyOptimizer."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp.optim import ZeroRedundancyOptimizer

BATCH = 4


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 1)
    ).to(dtype)


def make_batch(iteration, world_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(iteration)
    return torch.randn(world_size * BATCH, 5, generator=generator, dtype=dtype)


def own_part(batch):
    rank = dist.get_rank()
    return batch[rank * BATCH : (rank + 1) * BATCH]


def make_pair(optimizer_class=torch.optim.AdamW, *, ddp=None, **options):
    """A DDP model with its ZeroRedundancyOptimizer, and a dense one with the plain optimizer."""
    zero_options = {
        key: options.pop(key)
        for key in ("partition", "parameters_as_bucket_view", "overlap_with_ddp")
        if key in options
    }
    wrapped = DDP(make_model(), **(ddp or {}))
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class, **zero_options, **options)
    dense = make_model()
    return wrapped, zero, dense, optimizer_class(dense.parameters(), **options)


def train(wrapped, zero, dense, plain, iterations=range(4), after_step=lambda iteration: None):
    """Train both on the same global batches."""
    for iteration in iterations:
        batch = make_batch(iteration, dist.get_world_size())
        zero.zero_grad()
        plain.zero_grad()
        wrapped(own_part(batch)).square().mean().backward()
        dense(batch).square().mean().backward()
        if not zero.overlaps:
            zero.step()
        plain.step()
        after_step(iteration)


def assert_same_parameters(wrapped, dense, atol=1e-6):
    for ours, theirs in zip(wrapped.module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def assert_same_everywhere(params):
    for param in params:
        values = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(values, param.detach().contiguous())
        for value in values:
            assert torch.equal(values[0], value)


def state_numel(zero):
    """Elements of optimizer state this rank holds, scalars left out."""
    return sum(
        value.numel()
        for entries in zero.optim.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


def bytes_sent():
    """Bytes that this process's TCP connections have sent, once all ranks got here.

    Collective: all ranks.
    """
    dist.barrier()
    total = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        if not path.is_socket():
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total
