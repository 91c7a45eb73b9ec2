"""docs/reference/api.md is what the docstrings say, and every public name has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_api_page_is_what_the_docstrings_say() -> None:
    check = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert check.returncode == 0, check.stdout + check.stderr
