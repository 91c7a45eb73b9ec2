"""Check that imports inside ``fsdp/`` run to a lower floor, or within one room without a circle.

    python tools/layers.py

It also checks that non-public torch is used in ``fsdp/_torch.py`` only.

Floors and rooms are those of docs/design.md.  A module that is in no room fails: give it one here, and in the design.
Imports under ``if TYPE_CHECKING`` are not counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Floor by floor; each entry is a room, named by the modules or the folder in it.
FLOORS: tuple[tuple[frozenset[str], ...], ...] = (
    (frozenset({"errors", "config", "names", "_torch", "_pytree"}),),
    tuple(frozenset({name}) for name in ("plan", "flat", "comm", "schedule", "adapters")),
    tuple(frozenset({name}) for name in ("runtime", "wrap")),
    tuple(frozenset({name}) for name in ("init", "state", "optim", "report")),
    (frozenset({"wrapper", "properties", "assembly", "copies", "joined", "training"}),),
    (frozenset({"checkpoint"}),),
    tuple(frozenset({name}) for name in ("cli", "compat")),
    (frozenset({"__main__"}),),
)
# Re-export files under the reference's module paths: may import everything, imported by nothing.
REEXPORTS = frozenset(
    {
        "__init__",
        "_common_utils",
        "_flat_param",
        "_init_utils",
        "_runtime_utils",
        "_traversal_utils",
        "api",
        "flat_param",
        "fully_sharded_data_parallel",
        "sharded_grad_scaler",
    }
)


def check(package: Path = ROOT / "fsdp") -> list[str]:
    """Return one line a violation; empty when the house stands."""
    problems: list[str] = []
    graph: dict[str, set[str]] = {}
    modules = {_module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    for module, path in modules.items():
        room = module.split(".")[0]
        place = _place(room)
        if place is None and room not in REEXPORTS:
            problems.append(f"fsdp.{module}: in no room; add it to FLOORS in tools/layers.py")
        for target, line, at_top in _imports(path, module, package.name):
            if (found := _resolve(target, modules)) is None:
                continue
            problem = _judge(room, found.split(".")[0])
            if problem:
                problems.append(f"{path.relative_to(package.parent)}:{line}: {problem}")
            if at_top and found != module:
                graph.setdefault(module, set()).add(found)
        if module != "_torch":
            problems += [
                f"{path.relative_to(package.parent)}:{use}" for use in _private_torch(path)
            ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("circle: " + " <- ".join(error.args[1]))
    return problems


def _judge(source: str, target: str) -> str | None:
    """Say what is wrong with a module of room ``source`` importing one of ``target``, if anything."""
    if source in REEXPORTS or source == target:
        return None
    if target in REEXPORTS:
        return (
            f"imports fsdp.{target}, which only re-exports; import from where the name is defined"
        )
    here, there = _place(source), _place(target)
    if here is None or there is None or there[0] < here[0] or here == there:
        return None
    return f"{source} (floor {here[0]}) imports {target} (floor {there[0]})"


def _place(room: str) -> tuple[int, int] | None:
    for number, floor in enumerate(FLOORS):
        for index, names in enumerate(floor):
            if room in names:
                return number, index
    return None


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imports(path: Path, module: str, package: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the package's modules (or names) that a file imports, the line, and whether at module level."""
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in tree.body}
    is_package = path.name == "__init__.py"
    base = (
        [] if module == "__init__" else module.split(".") if is_package else module.split(".")[:-1]
    )
    for node in _nodes_at_run_time(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            prefix = package + "."
            targets = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        elif isinstance(node, ast.ImportFrom):
            targets = _from_targets(node, base, package)
        else:
            continue
        for target in targets:
            yield target, node.lineno, id(node) in top


def _from_targets(node: ast.ImportFrom, base: list[str], package: str) -> list[str]:
    if node.level:
        start = base[: len(base) - node.level + 1]
        stem = [*start, *(node.module.split(".") if node.module else [])]
    elif node.module == package or (node.module or "").startswith(package + "."):
        stem = (node.module or "").split(".")[1:]
    else:
        return []
    return [".".join([*stem, alias.name]) for alias in node.names]


def _resolve(target: str, modules: dict[str, Path]) -> str | None:
    """The module that ``target`` names, or that defines the name at its end."""
    if target in modules:
        return target
    parent = target.rpartition(".")[0] or "__init__"
    return parent if parent in modules else None


def _private_torch(path: Path) -> Iterator[str]:
    """Yield ``line: what`` for each non-public name of torch that a file imports or reaches."""
    for node in _nodes_at_run_time(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _private_parts(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in targets if _private_parts(name)]
        elif isinstance(node, ast.Attribute):
            # The innermost attribute alone: `torch._C._x` is one use, not two.
            name = ast.unparse(node)
            names = [name] if _private_parts(name)[:1] == [node.attr] else []
        else:
            continue
        for name in names:
            yield f"{node.lineno}: {name} is not public torch; wrap it in fsdp/_torch.py"


def _private_parts(name: str) -> list[str]:
    """The private parts of a dotted name of torch (or ``dist``, as torch.distributed is imported)."""
    first, *rest = name.split(".")
    if first not in ("torch", "dist"):
        return []
    return [part for part in rest if part.startswith("_") and not part.startswith("__")]


def _nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a file but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes_at_run_time(node)


if __name__ == "__main__":
    found = check()
    print("\n".join(found) or "layers: ok")
    sys.exit(bool(found))
