"""A program for ``test_mapped_files``: train a model on one rank, under a limit of memory; prints what it found.

    python -m tests.offload.larger FOLDER|- LAYERS LIMIT_MIB

The limit is on private memory (``RLIMIT_DATA``), counted from when the process group is there; files that are mapped
do not count, as they do not against a host's memory: the system can write them out.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.optim.paged import PagedOptimizer
from fsdp.wrap import ModuleWrapPolicy

DIM = 768
MIB = 1 << 20


def status(name: str) -> int:
    """A figure of ``/proc/self/status`` in bytes."""
    (found,) = re.findall(
        rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(found) * 1024


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def main(folder: str, layers: int, limit_mib: int) -> None:
    """Train three steps and print a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
    if limit_mib:
        limit = status("VmData") + limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = status("VmRSS")
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
    offload = None if folder == "-" else CPUOffload(offload_params=True, folder=folder)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        cpu_offload=offload,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if folder != "-":
        optimizer = PagedOptimizer(optimizer, folder=folder, part_bytes=4 * MIB)
    losses, seconds = [], []
    for step in range(3):
        start = time.perf_counter()
        x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    state = 16 * sum(param.numel() for param in model.parameters())
    growth = status("VmHWM") - before
    crc = 0
    for param in model.parameters():
        crc = zlib.crc32(param.detach().numpy().tobytes(), crc)
    found = {
        "state_mib": state / MIB,
        "resident_growth_mib": growth / MIB,
        "losses": [value.hex() for value in losses],
        "weights": crc,
        "seconds": seconds,
        "files_left": len(list(Path(folder).iterdir())) if folder != "-" else 0,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
