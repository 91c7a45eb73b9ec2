"""What the fork server imports once, so that the ranks of every test start with it already in memory.

Imported by the server only (see ``tests.support.ranks``).  A module that fails to import is left to the ranks, whose
traceback then reaches the test; a server that died of it would only show a closed socket.
"""

import contextlib
import gc
import importlib
import sys
from pathlib import Path

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.testing",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "fsdp",
    "tests.support.compare",
    "tests.support.models",
    "tests.support.oracles",
    "tests.support.ranks",
    "tests.support.scripts",
)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# What a rank still imports is its test's own module.  Where Python may write no bytecode beside it (containers set
# PYTHONDONTWRITEBYTECODE), every rank would compile it again: pytest's folder keeps it instead.
if sys.dont_write_bytecode:
    sys.pycache_prefix = str(Path(__file__).resolve().parents[2] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False

# Frozen objects are skipped by the collector, so that its passes in the ranks do not touch (and copy) every page.
gc.collect()
gc.freeze()
