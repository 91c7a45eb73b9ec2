"""The commands and their arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from . import checkpoint

__all__ = ["main"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(arguments: Sequence[str]) -> int:
    """Run ``python -m fsdp ARGUMENTS`` and return the exit status: 1 for an error, which is printed.

    Collective: none.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp", description="Tools for fsdp.")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    tool = tools.add_parser("checkpoint", help="look at, verify and convert checkpoints")
    commands = tool.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help_text, description=help_text)
        made.add_argument("dir", type=Path, metavar="DIR", help="a checkpoint, or a folder of some")
        return made

    inspect = command("inspect", "say what a checkpoint holds, from its manifest alone")
    inspect.add_argument("--chunks", action="store_true", help="also where each tensor's parts are")
    inspect.set_defaults(run=lambda o: checkpoint.inspect(o.dir, chunks=o.chunks))

    verify = command("verify", "read every byte and compare its checksum")
    verify.set_defaults(run=lambda o: checkpoint.verify(o.dir))

    merge = command("merge", "write the model's whole tensors, one at a time")
    merge.add_argument(
        "--safetensors",
        type=Path,
        metavar="OUT",
        required=True,
        help="the file to write, or the folder for several and their index",
    )
    merge.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="split into files of at most so much (5GB, 500MB); OUT is then a folder",
    )
    merge.set_defaults(
        run=lambda o: checkpoint.merge(o.dir, o.safetensors, max_shard_size=o.max_shard_size)
    )
    return parser


def size_in_bytes(text: str) -> int:
    """``"5GB"`` as a number of bytes.  Collective: none.

    Raises:
        argparse.ArgumentTypeError: If it is no positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write 5GB, 500MB or a number of bytes"
        )
    return size
