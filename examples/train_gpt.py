"""Train a byte-level GPT on the source of Python's own standard library, sharded over all processes.

    torchrun --nproc-per-node 2 examples/train_gpt.py --seconds 90 --out runs/gpt
    torchrun --nproc-per-node 3 examples/train_gpt.py --seconds 120 --out runs/gpt --resume
    python examples/train_gpt.py --steps 50                      # one process works too

Expected: the loss starts near 5.5 nats a byte (uniform over 256 values) and is under 2.6 within the first run; the
second run goes on where the first stopped, at another number of processes, on the same sequence of batches.

The batches are a function of the seed and the step alone: a global batch of ``--global-batch`` rows is divided among
the processes, so the loss curve does not depend on how many there are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import random
import resource
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm causal self-attention and MLP; each block becomes one unit."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is tied to the head."""

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(VOCABULARY, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._init)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` bytes to ``[batch, length, 256]`` logits."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Bytes of the standard library's source; every twentieth file is held out for evaluation."""

    def __init__(self, limit: int = 12_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
        files = [path for path in files if "site-packages" not in path.parts]
        held_out = files[::20]
        self.train = self._bytes([path for path in files if path not in set(held_out)], limit)
        self.held_out = self._bytes(held_out, limit)

    @staticmethod
    def _bytes(files: list[Path], limit: int) -> torch.Tensor:
        data = b"\n".join(path.read_bytes() for path in files)[:limit]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def rows(self, data: torch.Tensor, seed: int, rows: range, context: int) -> torch.Tensor:
        """Rows of one global batch, ``[len(rows), context + 1]``: a function of the seed and the row's number."""
        starts = [random.Random(f"{seed}-{row}").randrange(len(data) - context - 1) for row in rows]
        return torch.stack([data[start : start + context + 1] for start in starts]).long()


def loss_on(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the next byte, in nats."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def learning_rate(step: int, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss on held-out files, the same rows whatever the number of processes."""
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    share = args.global_batch // world
    rows = text.rows(text.held_out, -1, range(rank * share, (rank + 1) * share), args.context)
    loss = loss_on(model, rows.to(device))
    dist.all_reduce(loss)
    model.train()
    return loss.item() / world


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, context: int, device: torch.device) -> str:
    """Continue ``prompt``; every process runs the same forwards and draws the same bytes."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)
        weights = torch.softmax(model(window)[0, -1].float() / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(weights.cpu(), 1, generator=generator)))
    model.train()
    return bytes(tokens).decode("utf-8", errors="replace")


def save(folder: Path, keep: int, step: int, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that any number of processes can resume from; it is complete or it is not there.

    Collective: every process.
    """
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"step-{step:06d}.pt"
        partial = final.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(final)
        for old in sorted(folder.glob("step-*.pt"))[:-keep]:
            old.unlink()
    dist.barrier()


def load(folder: Path, model: FSDP, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; returns the number of steps it has seen."""
    checkpoints = sorted(folder.glob("step-*.pt"))
    if not checkpoints:
        raise SystemExit(f"--resume: no checkpoint in {folder}")
    state = torch.load(checkpoints[-1], map_location="cpu", mmap=True)
    model.load_state_dict(state["model"])
    local = FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
    optimizer.load_state_dict(local)
    return int(state["step"])


class Progress:
    """One line on a terminal, a line every so often elsewhere; silent on all processes but the first."""

    def __init__(self, every: float = 2.0) -> None:
        self._every = every
        self._last = self._start = time.monotonic()
        self._tokens = 0

    def show(
        self, step: int, loss: torch.Tensor, lr: float, tokens: int, device: torch.device
    ) -> None:
        """Count ``tokens`` and print, if it is time to."""
        self._tokens += tokens
        now = time.monotonic()
        if dist.get_rank() or now - self._last < self._every:
            return
        self._last = now
        speed = self._tokens / (now - self._start)
        print(
            f"step {step:5d} | loss {loss.item():.3f} | lr {lr:.2e} | {speed:8,.0f} tokens/s | {memory(device)}",
            end="\r" if sys.stdout.isatty() else "\n",
            flush=True,
        )


def memory(device: torch.device) -> str:
    """Peak memory of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB on the device"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB resident"


def say(text: str) -> None:
    """Print on the first process."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; the defaults are the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--steps", type=int, default=700, help="length of the schedule")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so much time")
    parser.add_argument(
        "--global-batch", type=int, default=12, help="rows a micro-batch, all processes together"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16, reduce in float32"
    )
    parser.add_argument(
        "--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], default="FULL_SHARD"
    )
    parser.add_argument("--use-orig-params", action="store_true", help="show original parameters")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--sample", type=int, default=120, help="bytes to generate at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads a process; cores / processes if 0"
    )
    return parser.parse_args(argv)


def start() -> torch.device:
    """Join the process group (a group of one without torchrun) and choose the device."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            os.environ.setdefault(name, value)
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def build(args: argparse.Namespace, device: torch.device) -> FSDP:
    """The sharded model: one unit a block, the rest in the root unit."""
    torch.manual_seed(args.seed)
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    return FSDP(
        GPT(args.layers, args.dim, args.heads, args.context),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision,
        device_id=device,
        use_orig_params=args.use_orig_params,
    )


def train_step(
    model: FSDP,
    optimizer: Any,
    text: Text,
    step: int,
    args: argparse.Namespace,
    device: torch.device,
) -> torch.Tensor:
    """One optimizer step over ``args.accumulate`` micro-batches; returns the mean loss over all processes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = args.global_batch // world
    total = torch.zeros((), device=device)
    for micro in range(args.accumulate):
        first = (step * args.accumulate + micro) * args.global_batch + rank * share
        rows = text.rows(text.train, args.seed, range(first, first + share), args.context).to(
            device
        )
        last = micro == args.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_on(model, rows) / args.accumulate
            loss.backward()
        total += loss.detach()
    model.clip_grad_norm_(args.clip)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / world


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of every step this call has run."""
    args = parse(argv)
    device = start()
    world = dist.get_world_size()
    if args.global_batch % world:
        raise SystemExit(
            f"--global-batch {args.global_batch} does not divide among {world} processes"
        )
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // world))
    text = Text()
    model = build(args, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    first = load(args.out, model, optimizer) if args.resume else 0
    schedule = functools.partial(learning_rate, warmup=20, total=args.steps)
    say(
        f"{'resuming at step ' + str(first) if first else 'training'} on {world} process(es), {device.type}, "
        f"{len(text.train) / 1e6:.1f} MB of text"
    )
    deadline, progress, losses, step = time.monotonic() + args.seconds, Progress(), [], first
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step)
        loss = train_step(model, optimizer, text, step, args, device)
        losses.append(loss.item())
        step += 1
        tokens = args.global_batch * args.accumulate * args.context
        progress.show(step, loss, group["lr"], tokens, device)
        if step % args.eval_every == 0:
            say(
                f"step {step:5d} | held-out loss {evaluate(model, text, args, device):.3f} nats/byte"
            )
        late = torch.tensor(float(time.monotonic() > deadline), device=device)
        dist.all_reduce(late)  # one process's clock decides for all
        if late or step % args.checkpoint_every == 0 or step == args.steps:
            save(args.out, args.keep, step, model, optimizer)
        if late:
            break
    if losses:
        say(
            f"step {step:5d} | loss {sum(losses[-10:]) / len(losses[-10:]):.3f}, held-out "
            f"{evaluate(model, text, args, device):.3f} nats/byte | checkpoint in {args.out}"
        )
    if args.sample:
        text_out = sample(model, b"def ", args.sample, args.context, device)
        say(f"--- a sample ---\n{text_out}\n----------------")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
