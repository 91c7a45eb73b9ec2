"""What the fork server imports once, so that the ranks of every test start with it already in memory.

Imported by the server only (see ``tests.support.ranks``).  A module that fails to import is left to the ranks, whose
traceback then reaches the test; a server that died of it would only show a closed socket.
"""

import contextlib
import ctypes
import gc
import importlib
import re
import sys
from pathlib import Path

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.testing",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "hypothesis",
    "pytest",
    "fsdp",
    "fsdp.checkpoint",
    "fsdp.comm.hooks",
    "fsdp.comm.recording",
    "fsdp.optim",
    "tests.support.compare",
    "tests.support.models",
    "tests.support.oracles",
    "tests.support.ranks",
    "tests.support.scripts",
)

HUGE_PAGE = 2**21
MADV_COLLAPSE = 25  # Linux 6.1 and later


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, where the system knows how.

    A fork copies the table of pages and an exit takes the copy apart.  For 240 MB in small pages that is 20 ms of
    processor time a rank; in huge ones next to nothing, but for the few that the rank writes to.
    """
    table = Path("/proc/self/maps")
    if not table.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    own_memory = re.compile(r"^(\w+)-(\w+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)
    for bounds in own_memory.findall(table.read_text()):
        start, end = (int(bound, 16) for bound in bounds)
        start = -(-start // HUGE_PAGE) * HUGE_PAGE
        if (size := (end - start) // HUGE_PAGE * HUGE_PAGE) > 0:
            madvise(start, size, MADV_COLLAPSE)  # a refusal leaves the pages as they are


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

use_huge_pages()
