"""One rank of a world that runs the checks of one module: ``RANK=0 ... python run.py MODULE OUT FIRST [PATTERN]``.

A rank whose check fails writes why and leaves; ``tools/clients.py`` ends its peers and starts a new world at the next
check.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


def main(module: str, out: str, first: str, pattern: str = "") -> None:
    """Run the checks from number ``first`` on; each result is a line of JSON in ``OUT.RANK``."""
    torch.set_num_threads(1)
    common = importlib.import_module("common")
    common.use_ours()
    importlib.import_module(module)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with Path(f"{out}.{dist.get_rank()}").open("a") as file:
        for number, function in enumerate(common.CHECKS):
            wanted = function.__module__ == module and pattern in function.__name__
            if number < int(first) or not wanted:
                continue
            started, problem = time.perf_counter(), None
            try:
                function()
            except Exception:  # noqa: BLE001 whatever it is, it is reported
                problem = traceback.format_exc()
            line = {
                "number": number,
                "check": function.__name__,
                "what": (function.__doc__ or "").strip().splitlines()[0],
                "problem": problem,
                "seconds": time.perf_counter() - started,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            if problem:
                os._exit(1)
            dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
