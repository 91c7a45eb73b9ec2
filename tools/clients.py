"""Run accelerate, transformers, PEFT, Lightning and torch's own tools over this package, and print what holds.

    python tools/clients.py                 # makes a virtual environment, then runs all: some minutes
    python tools/clients.py accelerate      # one client; a second word picks checks by name

Every check trains, saves or loads a small model on two CPU ranks through a client's public interface, with
``fsdp.compat.torch_fsdp.install()`` as the only change, and compares with the unwrapped model in one process.  No
model is downloaded.  The clients are not among this package's dependencies, so none of this is in the test suite: the
environment is kept in ``--venv`` and sees this interpreter's torch, which is never installed again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent / "clients"
CLIENTS = ("accelerate", "transformers", "peft", "lightning", "torch", "architectures")
PACKAGES = ("accelerate", "transformers", "peft", "lightning")
WORLD_SIZE = 2
WORLD_SECONDS = 900.0


def main() -> int:
    """Make the environment, run the checks, print a table; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", nargs="?", choices=CLIENTS, help="all if left out")
    parser.add_argument("pattern", nargs="?", default="", help="part of a check's name")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "fsdp-clients")
    arguments = parser.parse_args()
    python = make_environment(arguments.venv)
    failed = 0
    for client in [arguments.client] if arguments.client else CLIENTS:
        for result in run_checks(python, client, arguments.pattern):
            verdict = "FAILED" if result["problem"] else "ok"
            print(
                f"{client:13} {verdict:7} {result['seconds']:5.1f} s  {result['what']}", flush=True
            )
            if result["problem"]:
                failed += 1
                print(f"{result['check']}:\n{result['problem']}", flush=True)
    return int(failed > 0)


def make_environment(folder: Path) -> Path:
    """A virtual environment with the clients, over this interpreter's packages; the path of its Python."""
    python = folder / "bin" / "python"
    if (folder / "done").exists():
        return python
    venv.create(folder, with_pip=True)
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    Path(site.strip(), "base.pth").write_text(sysconfig.get_paths()["purelib"])
    torch_version = subprocess.check_output(
        [python, "-c", "import torch; print(torch.__version__)"], text=True
    )
    # Pinned to what is there, so that pip takes it as given.
    pinned = f"torch=={torch_version.strip()}"
    subprocess.check_call([python, "-m", "pip", "install", "-q", pinned, *PACKAGES])
    (folder / "done").touch()
    return python


def run_checks(python: Path, client: str, pattern: str) -> list[dict]:
    """Results of one client's checks, in order; a failure costs a new world."""
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        first = 0
        while True:
            code = run_world(python, [f"with_{client}", str(out), str(first), pattern], folder)
            lines = [_lines(Path(f"{out}.{rank}")) for rank in range(WORLD_SIZE)]
            found = _merged([line for each in lines for line in each if line["number"] >= first])
            results += found
            if code == 0:
                return results
            if not found or not found[-1]["problem"]:
                log = "".join(
                    (Path(folder) / f"log.{rank}").read_text()[-3000:] for rank in range(WORLD_SIZE)
                )
                number = found[-1]["number"] + 1 if found else first
                results.append(
                    {"number": number, "check": "?", "what": "died", "problem": log, "seconds": 0.0}
                )
                return results
            first = found[-1]["number"] + 1


def run_world(python: Path, arguments: list[str], folder: str) -> int:
    """Start the ranks, and end all when one fails or time is up; the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
    }
    ranks = []
    for rank in range(WORLD_SIZE):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (Path(folder) / f"log.{rank}").open("a") as log:
            ranks.append(
                subprocess.Popen(
                    [python, HERE / "run.py", *arguments],
                    env={**os.environ, **settings, **own},
                    stdout=log,
                    stderr=log,
                )
            )
    deadline = time.monotonic() + WORLD_SECONDS
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
    time.sleep(1.0 if any(codes) else 0.0)  # another rank may be writing its own reason
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    return next((code for code in (rank.wait() for rank in ranks) if code), 0)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _merged(lines: list[dict]) -> list[dict]:
    """One result a check: the slowest rank's time, the first problem."""
    merged: dict[int, dict] = {}
    for line in sorted(lines, key=lambda line: line["number"]):
        one = merged.setdefault(line["number"], line)
        one["seconds"] = max(one["seconds"], line["seconds"])
        one["problem"] = one["problem"] or line["problem"]
    return list(merged.values())


if __name__ == "__main__":
    sys.exit(main())
