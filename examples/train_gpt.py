"""Train a byte-level GPT on the source of Python's own standard library, sharded over all processes.

    torchrun --nproc-per-node 2 examples/train_gpt.py --stop-at 600
    torchrun --nproc-per-node 3 examples/train_gpt.py --resume          # or 1, 2, 4, 6, 12
    python examples/train_gpt.py --out runs/one                         # one process works too

Expected: the loss starts near 5.6 nats a byte (log 256 = 5.55), is under 2.6 after 100 steps and under 1.8 at the end.
The second run goes on where the first stopped, on the same batches; see README.md beside this file for the output.
NCCL where each process has a GPU of its own, gloo otherwise.

The batches are a function of the seed and the step alone: a global batch of ``--global-batch`` rows is divided among
the processes, so the loss curve does not depend on how many there are.  No other random choice is made after the
model is built, so a checkpoint needs no generator's state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from gpt_model import GPT, Block, next_byte_loss, sample
from progress import Console
from stdlib_text import Text, rows

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy, checkpoint
from fsdp.wrap import ModuleWrapPolicy

EVALUATION_BATCHES = 4
# What a resumed run must share with the run that wrote the checkpoint, or the curve would not go on.
FIXED = ("layers", "dim", "heads", "context", "global_batch", "accumulate", "seed")


@dataclass
class Job:
    """One training run, as one process sees it."""

    args: argparse.Namespace
    device: torch.device
    text: Text
    model: FSDP
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0  # optimizer steps done
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, held-out loss


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of every step this call has run, equal on every process."""
    args = parse(argv)
    device = join()
    world_size = dist.get_world_size()
    if args.global_batch % world_size:
        raise SystemExit(
            f"--global-batch {args.global_batch} does not divide among {world_size} processes"
        )
    torch.set_num_threads(args.threads)
    newest = newest_checkpoint(args.out, resume=args.resume)
    job = build(args, device)
    console = Console(args.steps, args.global_batch * args.accumulate * args.context, device)
    console.line(
        f"{world_size} process(es) on {device.type}, {dist.get_backend()}; "
        f"{len(job.text.train) / 1e6:.1f} MB of text; "
        f"{args.global_batch * args.accumulate} x {args.context} bytes a step"
    )
    if newest is not None:
        load(newest, job)
        console.line(f"resuming {newest}")
        console.last_evaluation(job.curve)
    if job.step >= args.steps:
        console.line(f"all {args.steps} steps are done; --steps {2 * job.step} would go on")
    losses = train(job, console)
    if args.sample:
        text = sample(job.model, b"def ", args.sample, args.context, device)
        console.line(f"--- a sample ---\n{text}\n----------------")
    return losses


def join() -> torch.device:
    """Join the process group (a group of one without torchrun) and choose this process's device."""
    if dist.is_initialized():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    else:
        device, options = torch.device("cpu"), {"backend": "gloo"}
    if "WORLD_SIZE" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return device


def build(args: argparse.Namespace, device: torch.device) -> Job:
    """The sharded model (one unit a block, the rest in the root unit), its optimizer and schedule."""
    torch.manual_seed(args.seed)  # the same values on every process
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        GPT(args.layers, args.dim, args.heads),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision if args.bf16 else None,
        device_id=device,
        use_orig_params=args.use_orig_params,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    factor = functools.partial(lr_factor, warmup=args.warmup, total=args.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return Job(args, device, Text(), model, optimizer, schedule)


def lr_factor(step: int, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(job: Job, console: Console) -> list[float]:
    """Run steps until one of the limits is reached; evaluate and save on the way and at the end."""
    args, losses, evaluated = job.args, [], 0
    last = min(args.steps, args.stop_at or args.steps)
    deadline = time.monotonic() + args.seconds
    while job.step < last:
        losses.append(train_step(job))
        console.bar(job.step, losses[-1], job.schedule.get_last_lr()[0])
        is_last = job.step == last or is_late(deadline, job.device)
        if is_last or job.step % args.eval_every == 0:
            loss = torch.stack(losses[evaluated:]).mean().item()
            evaluated = len(losses)
            job.curve.append((job.step, loss, evaluate(job)))
            console.last_evaluation(job.curve)
        if is_last or job.step % args.checkpoint_every == 0:
            save(job)
        if is_last:
            console.line(f"checkpoints and curve.csv are in {args.out}")
            break
    return [loss.item() for loss in losses]


def train_step(job: Job) -> torch.Tensor:
    """One optimizer step over ``--accumulate`` micro-batches; returns the mean loss over all processes."""
    args = job.args
    total = torch.zeros((), device=job.device)
    for micro in range(args.accumulate):
        batch = my_rows(job, job.text.train, args.seed, job.step * args.accumulate + micro)
        is_last = micro == args.accumulate - 1
        with contextlib.nullcontext() if is_last else job.model.no_sync():
            loss = next_byte_loss(job.model, batch) / args.accumulate
            loss.backward()
        total += loss.detach()
    job.model.clip_grad_norm_(args.clip)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.schedule.step()
    job.step += 1
    dist.all_reduce(total)
    return total / dist.get_world_size()


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Mean loss on rows of the held-out files, the same rows every time."""
    job.model.eval()
    batches = [my_rows(job, job.text.held_out, 0, number) for number in range(EVALUATION_BATCHES)]
    total = torch.stack([next_byte_loss(job.model, batch) for batch in batches]).mean()
    job.model.train()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def my_rows(job: Job, data: torch.Tensor, seed: int, batch: int) -> torch.Tensor:
    """This process's rows of a global batch, ``[global_batch / world_size, context + 1]``."""
    share = job.args.global_batch // dist.get_world_size()
    first = batch * job.args.global_batch + dist.get_rank() * share
    return rows(data, seed, range(first, first + share), job.args.context).to(job.device)


def is_late(deadline: float, device: torch.device) -> bool:
    """Whether the time is over on any process, so that all stop at the same step."""
    late = torch.tensor(float(time.monotonic() > deadline), device=device)
    dist.all_reduce(late)
    return late.item() > 0


def save(job: Job) -> None:
    """Write a checkpoint that any number of processes can resume from; it is complete or it is not there.

    Collective: every process writes what it holds.
    """
    extra = {
        "schedule": job.schedule,
        "step": job.step,
        "curve": job.curve,
        "config": {name: getattr(job.args, name) for name in FIXED},
    }
    folder = job.args.out
    name = folder / f"step-{job.step:06d}"
    keep = job.args.keep or None
    checkpoint.save(name, job.model, job.optimizer, extra, keep_last=keep, overwrite=True)
    if dist.get_rank() == 0:
        table = ["step,loss,held_out", *(f"{s},{a:.4f},{b:.4f}" for s, a, b in job.curve)]
        (folder / "curve.csv").write_text("\n".join(table) + "\n")


def newest_checkpoint(folder: Path, *, resume: bool) -> Path | None:
    """The checkpoint to go on from; a new run in an old run's folder is refused."""
    newest = checkpoint.latest(folder)
    if resume and newest is None:
        raise SystemExit(f"--resume: no checkpoint in {folder}")
    if newest is not None and not resume:
        raise SystemExit(f"{folder} holds {newest.name}: pass --resume or another --out")
    return newest


def load(path: Path, job: Job) -> None:
    """Take over the state of a checkpoint, whatever number of processes wrote it."""
    for name, value in checkpoint.read_extra(path)["config"].items():
        if value != getattr(job.args, name):
            option = "--" + name.replace("_", "-")
            raise SystemExit(
                f"{path} was written with {option} {value}, not {getattr(job.args, name)}"
            )
    loaded = checkpoint.load(path, job.model, job.optimizer, {"schedule": job.schedule})
    job.step, job.curve = loaded.extra["step"], loaded.extra["curve"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; the defaults are the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name: str, default: object, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} ({default})")

    def switch(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    option("--out", Path("runs/gpt"), "folder of checkpoints, seen by all processes")
    switch("--resume", "go on from the newest checkpoint there, at any number of processes")
    option("--steps", 700, "optimizer steps, and the length of the schedule")
    option("--stop-at", 0, "save and stop after this step; 0: the last one")
    option("--seconds", math.inf, "save and stop after so much time")
    option("--global-batch", 12, "rows a micro-batch, all processes together")
    option("--accumulate", 1, "micro-batches a step")
    option("--lr", 2e-3, "peak learning rate")
    option("--warmup", 20, "steps of linear warm-up")
    option("--clip", 1.0, "largest norm of the gradient")
    option("--layers", 4, "transformer blocks")
    option("--dim", 128, "width")
    option("--heads", 4, "attention heads")
    option("--context", 128, "bytes a row")
    switch("--bf16", "compute in bfloat16, reduce gradients in float32")
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    parser.add_argument("--strategy", choices=names, default=names[0], help="what is sharded")
    switch("--use-orig-params", "let the optimizer see the original parameters")
    option("--eval-every", 50, "steps between evaluations")
    option("--checkpoint-every", 50, "steps between checkpoints")
    option("--keep", 2, "newest checkpoints to keep; 0: all")
    option("--sample", 200, "bytes to generate at the end")
    option("--seed", 0, "of the model's values and of the batches")
    option("--threads", 1, "CPU threads a process; more only pay for larger models")
    args = parser.parse_args(argv)
    for name in ("global_batch", "accumulate", "steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
