"""Kill a rank with SIGKILL at a random moment of a save, again and again; nothing may be lost.

    python tools/stress_checkpoint.py               50 rounds, about two minutes
    python tools/stress_checkpoint.py --rounds 500 --seed 7 --world-size 4

Each round starts fresh ranks that resume from the newest checkpoint of a folder, train, and save over and over, half of
the time in the background.  One rank kills itself at a random point of the save (in the plan, after a random number of
bytes, before or after the manifest, at a rename, while old checkpoints are removed) or is killed from outside after a
random time.  Then the folder is checked: the newest checkpoint loads, bitwise as the ranks had it (each writes a digest
of its whole state before it saves), it is not older than the last one whose save had returned, and every folder that is
not whole says so by its name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import checkpoint
from fsdp.checkpoint import folder as folders
from fsdp.checkpoint import raw, storage

SAVES = 4
POINTS = ("prepare", "write", "commit", "manifest", "rename", "after rename", "remove", "outside")


def digest(model, optimizer) -> str:
    """Of the whole model and optimizer, on every rank alike."""
    found = hashlib.sha256()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    values = dict(model.state_dict())
    values |= {f"{fqn}/{name}": v for fqn, s in state.items() for name, v in s.items()}
    for name in sorted(values):
        found.update(name.encode())
        found.update(bytes(raw.memory_of(values[name].contiguous())))
    return found.hexdigest()


def build(orig: bool):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(61, 61) for _ in range(4)))
    model = FSDP(plain, auto_wrap_policy={torch.nn.Linear}, use_orig_params=orig)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(3, 61, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def die_at(point: str, count: int) -> None:
    """Arrange for this process to be killed at the ``count``-th passage of a point."""
    left = [count]

    def killing(function, *, after=False):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    owner, name, after = {
        "prepare": (folders.Place, "prepare", False),
        "write": (storage, "write_run", False),
        "commit": (folders.Place, "commit", False),
        "manifest": (folders.Manifest, "write", True),
        "rename": (Path, "rename", False),
        "after rename": (Path, "rename", True),
        "remove": (shutil, "rmtree", False),
    }[point]
    setattr(owner, name, killing(getattr(owner, name), after=after))


def job(parent: str, log: str, victim: int, point: str, count: int, orig: bool) -> None:
    """What one rank does until it is killed, or the other is."""
    model, optimizer = build(orig)
    rank = dist.get_rank()
    step = 0
    if folders.latest(parent) is not None:
        step = checkpoint.load(parent, model, optimizer).extra["step"]
    if rank == victim and point != "outside":
        die_at(point, count)
    for number in range(SAVES):
        step += 1
        train(model, optimizer, step)
        entry = {"step": step, "digest": digest(model, optimizer)}
        if rank == 0:
            note(log, entry | {"event": "begun"})
        path = Path(parent) / f"step-{step:06d}"
        how = checkpoint.async_save if number % 2 else checkpoint.save
        how(path, model, optimizer, {"step": step}, keep_last=2, overwrite=True)
        checkpoint.saving.settle()
        if rank == 0:
            note(log, entry | {"event": "done"})


def note(log: str, entry: dict) -> None:
    with Path(log).open("a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def check(parent: Path, log: Path) -> int:
    """Raise unless nothing was lost; the newest step."""
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {entry["step"]: entry["digest"] for entry in entries}
    done = max((entry["step"] for entry in entries if entry["event"] == "done"), default=0)
    newest = checkpoint.latest(parent)
    if newest is None:
        assert not done, f"step {done} was saved and is gone"
        return 0
    model = torch.nn.Sequential(*(torch.nn.Linear(61, 61) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = checkpoint.load(newest, model, optimizer).extra["step"]
    assert step >= done, f"the newest checkpoint is of step {step}, but {done} was saved"
    checkpoint.verify(newest)
    assert plain_digest(model, optimizer) == known[step], (
        f"step {step} holds other values than were saved"
    )
    for path in parent.iterdir():
        whole = (path / "manifest.json").exists()
        marked = path.suffix in (".incomplete", ".removing", ".replaced")
        assert whole or marked, f"{path} is not whole and does not say so"
        if whole and not marked:
            checkpoint.verify(path)
    return step


def plain_digest(model, optimizer) -> str:
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    values = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"{names[number]}/{name}": value for name, value in state.items()}
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(name.encode())
        found.update(bytes(raw.memory_of(values[name].contiguous())))
    return found.hexdigest()


def one_round(parent: Path, log: Path, dice: random.Random, world_size: int) -> str:
    """Run ranks, kill one, check."""
    from tests.support.ranks import run_ranks_outcomes

    point = dice.choice(POINTS)
    victim = dice.randrange(world_size) if point in ("write", "outside") else 0
    # Some kinds of points are passed more than once a save: each item is written, each old one removed.
    count = dice.randint(
        1, {"write": 30 * SAVES, "rename": 6, "after rename": 6, "remove": 12}.get(point, SAVES)
    )
    arguments = (str(parent), str(log), victim, point, count, dice.random() < 0.5)
    delay = dice.uniform(0.05, 1.2) if point == "outside" else None
    outcomes = run_ranks_outcomes(guarded, world_size, arguments, victim, delay, timeout=120)
    died = [outcome.rank for outcome in outcomes if outcome.exit_code is not None]
    odd = [
        o.message
        for o in outcomes
        if not o.ok and o.exit_code is None and not o.raised(RuntimeError)
    ]
    assert not odd, odd
    return f"{point}{'' if died else ' (not reached)'}"


def guarded(arguments, victim, delay) -> None:
    os.environ["FSDP_ENTRY_TIMEOUT"] = "5"  # how long ranks wait for one that died before it came
    if delay is not None and dist.get_rank() == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay)
    job(*arguments)


def stress(rounds: int, seed: int, world_size: int, out=sys.stdout) -> Counter:
    """Run so many rounds over one folder; how often each point was met."""
    dice = random.Random(seed)
    met: Counter = Counter()
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        parent, log = Path(folder) / "checkpoints", Path(folder) / "log"
        parent.mkdir()
        for number in range(rounds):
            started = time.monotonic()
            point = one_round(parent, log, dice, world_size)
            step = check(parent, log)
            met[point] += 1
            took = time.monotonic() - started
            print(
                f"round {number + 1}/{rounds}: killed at {point}; newest step {step}; {took:.1f} s",
                file=out,
            )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    met = stress(options.rounds, options.seed, options.world_size)
    print(
        f"{options.rounds} rounds, nothing lost: "
        + ", ".join(f"{n} x {p}" for p, n in met.most_common())
    )


if __name__ == "__main__":
    main()
