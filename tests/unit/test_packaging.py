"""Metadata, pins and the shape of the repository agree with each other, and the house of the package stands."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fsdp
from tools import layers

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "docs",
    "examples",
    "fsdp",
    "pyproject.toml",
    "setup.cfg",
    "tests",
    "tools",
}


def test_the_version_is_the_same_in_the_package_and_in_its_metadata() -> None:
    assert PROJECT["project"]["version"] == fsdp.__version__


def test_torch_is_the_only_dependency() -> None:
    assert ["torch>=2.11"] == PROJECT["project"]["dependencies"]


def test_the_package_declares_its_types() -> None:
    assert (ROOT / "fsdp" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["fsdp"]


def test_setup_cfg_repeats_nothing_of_pyproject() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")

    assert {"build"} == set(config.sections())


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "fsdp").rglob("*.py")}

    assert [] == sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())


def test_every_declared_requirement_is_pinned_exactly() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"]]
    names = {_normal(re.split(r"[<>=\[]", requirement)[0]) for requirement in declared}
    pins = [line for line in _constraints() if "==" in line]

    assert pins == _constraints()
    assert set() == names - {_normal(pin.split("==")[0]) for pin in pins} - {"fsdp"}
    assert "torch==2.13.0" in pins


def test_the_top_level_holds_nothing_else() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")

    tracked = {line.split("/")[0].strip('"') for line in listing.stdout.splitlines()}

    assert set() == tracked - TOP_LEVEL


@pytest.mark.parametrize("script", [".ci/run", "tools/demo", "tools/test"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / script

    assert os.access(path, os.X_OK)
    assert 0 == subprocess.run(["bash", "-n", str(path)], check=False).returncode


def test_scripts_refuse_an_environment_that_cannot_work(tmp_path: Path) -> None:
    environment = os.environ | {"FSDP_PYTHON": str(tmp_path / "no-python")}
    run = subprocess.run(
        ["bash", str(ROOT / "tools" / "test")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 2 == run.returncode
    assert "is not a Python >= 3.11" in run.stderr


def test_imports_run_to_a_lower_floor_without_circles() -> None:
    assert [] == layers.check()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"flat/a.py": "from ..runtime import unit", "runtime/unit.py": ""}, "flat (floor 1)"),
        ({"flat/a.py": "from ..comm.b import c", "comm/b.py": "c = 1"}, "flat (floor 1)"),
        ({"flat/a.py": "from fsdp.wrapper import w", "wrapper.py": "w = 1"}, "flat (floor 1)"),
        ({"flat/a.py": "def f():\n    from .. import wrapper", "wrapper.py": ""}, "flat (floor 1)"),
        ({"flat/a.py": "from . import b", "flat/b.py": "from . import a"}, "circle"),
        ({"wrapper.py": "from . import FsdpError"}, "which only re-exports"),
        ({"helpers.py": ""}, "in no room"),
        ({"flat/a.py": "import torch\ntorch._C.x()"}, "torch._C is not public torch"),
        ({"flat/a.py": "from torch._utils import x"}, "torch._utils"),
    ],
)
def test_the_layer_check_finds(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    package = tmp_path / "fsdp"
    for name in ["__init__.py", *{f"{Path(file).parent}/__init__.py" for file in files}]:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    for name, text in files.items():
        (package / name).write_text(text)

    found = layers.check(package)

    assert any(problem in line for line in found), found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
