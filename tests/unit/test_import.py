"""``import fsdp`` has no side effects: it costs little beyond torch and starts nothing.

Each test looks at a fresh interpreter that imports torch first and the package second.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PROBE = """
import json, logging, os, signal, sys, warnings
import torch, torch.distributed as dist

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

modules, before, environment = set(sys.modules), threads(), dict(os.environ)
filters, handlers = list(warnings.filters), list(logging.getLogger().handlers)
dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
import fsdp
print(json.dumps({
    "modules": sorted(set(sys.modules) - modules),
    "threads": [before, threads()],
    "cuda": torch.cuda.is_initialized(),
    "group": dist.is_initialized(),
    "unchanged": {
        "environment": environment == dict(os.environ),
        "warning filters": filters == list(warnings.filters),
        "log handlers": handlers == list(logging.getLogger().handlers),
        "torch defaults": (dtype, grad) == (torch.get_default_dtype(), torch.is_grad_enabled()),
    },
}))
"""


@functools.cache
def _facts() -> dict[str, object]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout.splitlines()[-1])


def test_import_starts_no_thread() -> None:
    before, after = _facts()["threads"]

    assert before == after


def test_import_initialises_no_cuda() -> None:
    assert _facts()["cuda"] is False


def test_import_initialises_no_process_group() -> None:
    assert _facts()["group"] is False


@pytest.mark.parametrize(
    "module",
    [
        "torch.distributed.fsdp",
        "torch.testing._internal",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
    ],
)
def test_import_does_not_pull_in(module: str) -> None:
    found = [name for name in _facts()["modules"] if (name + ".").startswith(module + ".")]

    assert [] == found


def test_import_loads_a_handful_of_modules_that_are_not_ours() -> None:
    foreign = [name for name in _facts()["modules"] if name.split(".")[0] != "fsdp"]

    assert len(foreign) <= 20, foreign


def test_import_changes_no_global_state() -> None:
    unchanged = _facts()["unchanged"]

    assert dict.fromkeys(unchanged, True) == unchanged


def test_every_public_name_exists_once() -> None:
    import fsdp

    assert [] == [name for name in fsdp.__all__ if not hasattr(fsdp, name)]
    assert len(set(fsdp.__all__)) == len(fsdp.__all__)
    assert "FullyShardedDataParallel" in fsdp.__all__
