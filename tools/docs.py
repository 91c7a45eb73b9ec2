"""Generate docs/reference/api.md from the docstrings of the public names.

    python tools/docs.py            write the page
    python tools/docs.py --check    fail if the committed page is stale

Either form fails, naming them, if public names have no docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
# The page's sections.  A name is documented where it is first met.
MODULES = (
    "fsdp",
    "fsdp.wrap",
    "fsdp.checkpoint",
    "fsdp.init",
    "fsdp.comm.hooks",
    "fsdp.comm.compression",
    "fsdp.optim",
    "fsdp.errors",
)
# Methods of torch classes that ours override are documented there; these say something of their own.
WRAPPER_CLASSES = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer", "ShardedGradScaler")


@dataclass(frozen=True)
class Entry:
    """A public name: its heading (``name(signature)``), its docstring, and the entries under it."""

    name: str
    heading: str
    doc: str
    members: tuple[Entry, ...] = ()


def build_page() -> tuple[str, list[str]]:
    """Return the page's text and the public names that have no docstring."""
    seen: set[int] = set()
    lines = [
        "# API reference",
        "",
        "Generated from the docstrings by `python tools/docs.py`; do not edit by hand.",
        "",
    ]
    missing: list[str] = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        entries = list(_entries(module, seen))
        lines += [f"## `{module_name}`", "", _first_paragraph(module), ""]
        for entry in entries:
            lines += _render(entry, level=3)
            missing += [f"{module_name}.{name}" for name in _undocumented(entry)]
    return "\n".join(lines).rstrip() + "\n", missing


def _entries(module: ModuleType, seen: set[int]) -> Iterator[Entry]:
    for name in _public_names(module):
        value = getattr(module, name)
        if id(value) in seen or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        seen.add(id(value))
        if inspect.isclass(value):
            yield _class_entry(name, value)
        else:
            yield Entry(name, f"{name}{_signature(value)}", _own_doc(value))


def _public_names(module: ModuleType) -> list[str]:
    """The names of ``__all__``, or what the module itself defines under a public name."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _class_entry(name: str, cls: type) -> Entry:
    members = tuple(_members(cls)) if name in WRAPPER_CLASSES else ()
    if issubclass(cls, BaseException):
        heading = f"{name}({', '.join(base.__name__ for base in cls.__bases__)})"
    elif issubclass(cls, enum.Enum):
        heading = f"{name}: {', '.join(cls.__members__)}"
    else:
        heading = f"{name}{_signature(cls)}"
    return Entry(name, heading, _own_doc(cls), members)


def _members(cls: type) -> Iterator[Entry]:
    """Public methods and properties that the class, or a base of ours, defines."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "fsdp":
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in found.items():
        if isinstance(value, property):
            yield Entry(name, name, _clean(value.__doc__))
        elif callable(getattr(cls, name)):
            kind = "static " if isinstance(value, (staticmethod, classmethod)) else ""
            function = getattr(value, "__func__", value)
            doc = _own_doc(function) or _clean(getattr(_inherited(cls, name), "__doc__", None))
            yield Entry(name, f"{kind}{name}{_signature(getattr(cls, name), method=not kind)}", doc)


def _inherited(cls: type, name: str) -> object:
    """What a class that is not ours calls by this name: an override may leave the words to it."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "fsdp" and name in vars(base):
            return vars(base)[name]
    return None


def _own_doc(value: object) -> str:
    doc = getattr(value, "__doc__", None)
    # A dataclass without docstring gets its signature for one; that says nothing.
    if dataclasses.is_dataclass(value) and (doc or "").startswith(
        f"{getattr(value, '__name__', '')}("
    ):
        return ""
    if inspect.isclass(value) and "__doc__" in vars(value):
        return _clean(vars(value)["__doc__"])
    return "" if inspect.isclass(value) else _clean(doc)


def _clean(doc: str | None) -> str:
    return inspect.cleandoc(doc) if doc else ""


def _signature(value: object, *, method: bool = False) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    parameters = list(signature.parameters.values())
    if method and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    plain = [p.replace(annotation=p.empty, default=_plain(p.default)) for p in parameters]
    return str(inspect.Signature(plain))


class _Plain:
    """A default value whose repr is the same on every run and every Python."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _plain(default: object) -> object:
    if default is inspect.Parameter.empty:
        return default
    if isinstance(default, enum.Enum):
        return _Plain(f"{type(default).__name__}.{default.name}")
    if inspect.isclass(default) or inspect.isroutine(default):
        return _Plain(default.__name__)
    return _Plain(re.sub(r" at 0x[0-9a-f]+", "", repr(default)))


def _first_paragraph(module: ModuleType) -> str:
    return _clean(module.__doc__).split("\n\n")[0]


def _render(entry: Entry, *, level: int) -> list[str]:
    lines = [f"{'#' * level} `{entry.name}`", "", "```text", entry.heading, "```", ""]
    lines += [*_markdown(entry.doc), ""] if entry.doc else []
    for member in entry.members:
        lines += _render(member, level=level + 1)
    return lines


SECTION = re.compile(
    r"(Args|Attributes|Members|Returns|Yields|Raises|Example|Examples|Source|See|Note|References):\s*$"
)
ITEM = re.compile(r"    (\*{0,2}[\w.`, ]+?)(?: \([^)]*\))?: (.*)$")


def _markdown(doc: str) -> list[str]:
    """Google sections as bold headings, their items as lists; everything else as it stands."""
    lines: list[str] = []
    in_items = False
    for line in doc.splitlines():
        if section := SECTION.match(line):
            in_items = section[1] in ("Args", "Attributes", "Members", "Raises")
            lines += [f"**{section[1]}**", ""]
        elif in_items and (item := ITEM.match(line)):
            lines.append(f"- `{item[1].strip('`')}`: {_code(item[2])}")
        elif in_items and line.startswith("     "):
            lines.append(f"  {_code(line.strip())}")
        elif not in_items or not line.strip():
            lines.append(_code(line))
        else:
            in_items = in_items and line.startswith(" ")
            lines.append(_code(line))
    return lines


def _code(line: str) -> str:
    line = re.sub(r":(?:class|func|meth|attr|mod):`~?([^`]+)`", r"`\1`", line)
    return line.replace("``", "`")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is stale"
    )
    options = parser.parse_args()
    page, missing = build_page()
    if missing:
        print("public names without a docstring:", *missing, sep="\n  ")
        return 1
    if options.check:
        return _compare(PAGE.read_text() if PAGE.exists() else "", page)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page)
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def _compare(committed: str, page: str) -> int:
    if committed == page:
        print(f"{PAGE.relative_to(ROOT)} is up to date")
        return 0
    difference = difflib.unified_diff(
        committed.splitlines(), page.splitlines(), "committed", "generated", "", "", 1
    )
    print(*list(difference)[:40], sep="\n")
    print(f"{PAGE.relative_to(ROOT)} is stale: run python tools/docs.py")
    return 1


def _undocumented(entry: Entry) -> Iterator[str]:
    if not entry.doc:
        yield entry.name
    for member in entry.members:
        yield from (f"{entry.name}.{name}" for name in _undocumented(member))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
