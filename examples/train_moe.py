"""Train a byte-level mixture of experts, its experts spread over processes and everything sharded.

    torchrun --nproc-per-node 4 examples/train_moe.py --expert-ranks 2
    torchrun --nproc-per-node 2 examples/train_moe.py --expert-ranks 2 --bf16
    python examples/train_moe.py                                       # one process has every expert

Expected: the loss starts near 5.6 nats a byte and is under 2.5 after 100 steps.
The processes are divided into rows of ``--expert-ranks`` neighbours that hold all experts together and exchange tokens;
processes with the same place in their rows hold the same experts.  With 4 processes in rows of 2::

    processes        experts      sharded over            everything else
    0   and   2      0 to 3       process group (0, 2)    sharded over all four
    1   and   3      4 to 7       process group (1, 3)

The loss curve does not depend on how many processes there are, nor on ``--expert-ranks``.
docs/how-to/mixture-of-experts.md explains the three lines that make it right.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import next_byte_loss
from moe_model import Block, Model, Place
from progress import Console
from stdlib_text import Text, rows
from torch import nn
from train_gpt import join

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, checkpoint
from fsdp.wrap import CustomPolicy


def place(experts: int, expert_ranks: int) -> Place:
    """Divide the processes into rows and columns.  Collective: every process makes all groups, in one order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % expert_ranks or experts % expert_ranks:
        raise SystemExit(
            f"--expert-ranks {expert_ranks} must divide {world} processes and {experts} experts"
        )
    starts = range(0, world, expert_ranks)
    rows_ = [dist.new_group(range(start, start + expert_ranks)) for start in starts]
    columns = [dist.new_group(range(i, world, expert_ranks)) for i in range(expert_ranks)]
    mine, each = rank % expert_ranks, experts // expert_ranks
    return Place(rows_[rank // expert_ranks], columns[mine], range(mine * each, (mine + 1) * each))


def build(args: argparse.Namespace, device: torch.device) -> FSDP:
    """The sharded model: experts over their column, everything else over all processes."""
    torch.manual_seed(args.seed)  # the same values on every process
    model = Model(args.layers, args.dim, args.experts)
    where = place(args.experts, args.expert_ranks)
    for block in model.blocks:
        block.mixture.keep(where)
    of_experts = {
        "process_group": where.column,
        # An expert's gradient sums over the tokens of every process, so it is divided as the others are.
        "gradient_divisor": dist.get_world_size(),
    }

    routed = {expert for block in model.blocks for expert in block.mixture.experts.values()}

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return of_experts if module in routed else isinstance(module, Block)

    low = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, rules={"*.router": torch.float32}
    )
    return FSDP(
        model,
        auto_wrap_policy=CustomPolicy(choose),
        mixed_precision=low if args.bf16 else None,
        device_id=device,
        use_orig_params=True,
    )


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of every step, equal on every process."""
    args = parse(argv)
    device = join()
    torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    if args.global_batch % world:
        raise SystemExit(
            f"--global-batch {args.global_batch} does not divide among {world} processes"
        )
    model = build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text, losses = Text(), []
    share = args.global_batch // world
    console = Console(args.steps, args.global_batch * args.context, device)
    for step in range(args.steps):
        first = step * args.global_batch + rank * share
        batch = rows(text.train, args.seed, range(first, first + share), args.context).to(device)
        loss = next_byte_loss(model, batch)
        loss.backward()
        model.clip_grad_norm_(1.0)  # the norm of the whole model, every expert counted once
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / world)
        console.bar(step + 1, losses[-1], args.lr)
    if args.out is not None:
        checkpoint.save(args.out, model, optimizer)  # loads at any number of processes and rows
        console.line(f"saved {args.out}")
    return [loss.item() for loss in losses]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; the defaults are the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {
        "experts": 8,
        "expert-ranks": 1,
        "layers": 2,
        "dim": 64,
        "context": 64,
        "global-batch": 12,
        "steps": 100,
        "seed": 0,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16, the router in float32"
    )
    parser.add_argument("--out", type=Path, default=None, help="save a checkpoint here at the end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
