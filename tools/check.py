"""Run every check that needs no test: format, lint, types, layers, API reference.

    python tools/check.py          report
    python tools/check.py --fix    format, apply ruff's safe fixes and regenerate the API page first

Exits non-zero if any check fails; all of them run in any case.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fsdp", "tests", "tools", "examples")

CHECKS = {
    "format": ("-m", "ruff", "format", "--check", *FOLDERS),
    "lint": ("-m", "ruff", "check", "--output-format=concise", *FOLDERS),
    "types": ("-m", "mypy"),
    "layers": ("tools/layers.py",),
    "api reference": ("tools/docs.py", "--check"),
}
FIXES = (
    ("-m", "ruff", "check", "--fix-only", "--quiet", *FOLDERS),
    ("-m", "ruff", "format", "--quiet", *FOLDERS),
    ("tools/docs.py",),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fix", action="store_true", help="change files first")
    parser.add_argument("only", nargs="*", metavar="CHECK", help=f"some of: {', '.join(CHECKS)}")
    options = parser.parse_args()
    if unknown := set(options.only) - set(CHECKS):
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    if options.fix:
        for command in FIXES:
            _run(command)
    failed = []
    for name in options.only or CHECKS:
        print(f"== {name}", flush=True)
        if _run(CHECKS[name]) != 0:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks pass")
    return bool(failed)


def _run(arguments: tuple[str, ...]) -> int:
    return subprocess.run((sys.executable, *arguments), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
