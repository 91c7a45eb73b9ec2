"""The entry point of all benchmarks: ``python -m tools.bench NAME [--quick] [--json FILE]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .registry import BENCHMARKS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that ``argv`` names; return the exit status."""
    arguments = parse(argv)
    report = BENCHMARKS[arguments.name].load().run(arguments)
    print(report.text())
    if arguments.json is not None:
        arguments.json.write_text(report.json(), encoding="ascii")
        print(f"\nall samples: {arguments.json}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line: the options that all benchmarks share and the named one's own."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Benchmarks beside torch's DDP, FSDP1 and FSDP2: interleaved rounds, medians, ratios.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for benchmark in BENCHMARKS.values():
        command = commands.add_parser(benchmark.name, help=benchmark.help)
        command.add_argument("--quick", action="store_true", help="under a minute, wider spread")
        command.add_argument("--json", type=Path, metavar="FILE", help="write every sample here")
        command.add_argument("--seed", type=int, default=0, help="of weights, data and order (0)")
        benchmark.load().add_arguments(command)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
