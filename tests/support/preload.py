"""What the fork server imports once, so that the ranks of every test start with it already in memory.

Imported by the server only (see ``tests.support.ranks``).  A module that fails to import is left to the ranks, whose
traceback then reaches the test; a server that died of it would only show a closed socket.
"""

import contextlib
import gc
import importlib

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
    "tests.support.ranks",
    "fsdp",
)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# Frozen objects are skipped by the collector, so that its passes in the ranks do not touch (and copy) every page.
gc.collect()
gc.freeze()
