"""How long ranks wait for each other before something is said."""

from __future__ import annotations

import os

__all__ = ["entry_timeout"]


def entry_timeout() -> float:
    """Seconds to wait for the other ranks: ``FSDP_ENTRY_TIMEOUT``, 60 by default.  Collective: none."""
    return float(os.environ.get("FSDP_ENTRY_TIMEOUT", "60"))
