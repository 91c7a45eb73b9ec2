"""Train behind DistributedDataParallel with the optimizer state shared out over all processes (ZeRO-1).

    torchrun --nproc-per-node 2 examples/ddp_zero.py                   # an ordinary step, gradients to their owners
    torchrun --nproc-per-node 2 examples/ddp_zero.py --overlap         # the step inside backward
    torchrun --nproc-per-node 2 examples/ddp_zero.py --uneven          # ranks with different numbers of inputs
    torchrun --nproc-per-node 2 examples/ddp_zero.py --save zero.pt
    torchrun --nproc-per-node 3 examples/ddp_zero.py --load zero.pt    # another number of processes, or 1

Expected: the loss falls from 0.29 to about 0.04, each process holds 1/W of the optimizer state to within one element
of each moment, and a loaded run begins where the saved one ended.  NCCL where each process has a GPU of its own, gloo
otherwise.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp.optim import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)


def build(args: argparse.Namespace, device: torch.device) -> tuple[DDP, ZeroRedundancyOptimizer]:
    """The wrapped model and its optimizer, with one of the two gradient hooks."""
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    )
    ddp = DDP(model.to(device))
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(),
        torch.optim.AdamW,
        overlap_with_ddp=args.overlap,
        partition="element",  # AdamW treats every element alone: each rank gets the same number
        lr=3e-3,
    )
    if args.overlap:
        hook = hook_with_zero_step_interleaved(allreduce_hook, ddp, zero)
    else:
        hook = reduce_scatter_hook(ddp, zero)  # the traffic of DDP alone
    ddp.register_comm_hook(None, hook)
    return ddp, zero


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A function of step and rank: what a teacher says of random inputs."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs.to(device), inputs.sin().mean(1, keepdim=True).mul(4).to(device)


def train(args: argparse.Namespace, ddp: DDP, zero: ZeroRedundancyOptimizer, start: int) -> float:
    """Take ``args.steps`` steps; with ``--uneven`` rank r takes 5 r more.  Return this rank's last loss."""
    rank, device = dist.get_rank(), next(ddp.parameters()).device
    steps = args.steps + (5 * rank if args.uneven else 0)
    with Join([ddp, zero], enable=args.uneven):
        for step in range(start, start + steps):
            inputs, targets = batch(step, rank, device)
            zero.zero_grad()
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()  # with --overlap parameters are up to date when this returns
            if not args.overlap:
                zero.step()
            if rank == 0 and (step - start) % 50 == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if rank == dist.get_world_size() - 1:
        print(f"step {start + steps - 1:4d}  loss {loss.item():.4f}", flush=True)
    return loss.item()


def share_of_state(zero: ZeroRedundancyOptimizer) -> int:
    """Elements of optimizer state that this process holds."""
    held = (value for entries in zero.optim.state.values() for value in entries.values())
    return sum(value.numel() for value in held if value.dim())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlap", action="store_true", help="step inside backward")
    parser.add_argument("--uneven", action="store_true", help="more inputs on higher ranks")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args(arguments)

    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    ddp, zero = build(args, device)
    start = 0
    if args.load:
        saved = torch.load(args.load, weights_only=True)
        ddp.module.load_state_dict(saved["model"])
        zero.load_state_dict(saved["optimizer"])  # complete on every rank; each keeps its own share
        start = saved["step"]
    loss = train(args, ddp, zero, start)
    print(f"rank {dist.get_rank()}: {share_of_state(zero)} elements of optimizer state", flush=True)
    if args.save:
        optimizer_state = zero.state_dict(
            consolidate=True, to=0
        )  # every rank calls, rank 0 gets it
        if dist.get_rank() == 0:
            model_state = ddp.module.state_dict()
            step = start + args.steps
            torch.save(
                {"model": model_state, "optimizer": optimizer_state, "step": step}, args.save
            )
    return loss


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
