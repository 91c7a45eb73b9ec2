"""Sixty architectures and loops train, save and resume as in one process.

Oracle: the dense model on the rows of all ranks, in float64: losses, gradient norms, every parameter and every
optimizer state after three steps on 2 ranks, and after two more steps of a run on 3 ranks in the other exposure that
was resumed from them.  Strategy, wrapping, optimizer, accumulation, clipping, prefetch and offloading are drawn by
name; the dense model loads the wrapped one's state, too.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity import zoo as tables
from tests.support.ranks import run_ranks
from tests.support.zoo import (
    ARCHITECTURES,
    Case,
    Trained,
    differences,
    draw_variants,
    train_dense,
    train_wrapped_cases,
)

assert tables
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch, of norm_first
NAMES = list(ARCHITECTURES)
WORLD = 12  # architectures that share one


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zoo-")


def _cases(name: str) -> tuple[Case, Case]:
    """On 2 ranks from the start, and on 3 from there."""
    architecture = ARCHITECTURES[name]
    turn = NAMES.index(name) % 2
    first = draw_variants(architecture, 2, 1)[turn]
    second = replace(
        draw_variants(architecture, 3, 1)[1 - turn], optimizer=first.optimizer, sync_states=False
    )
    saved = str(Path(_folder().name, f"{name}.pt"))
    return (
        Case(architecture, first, 2, save_to=saved),
        Case(architecture, second, 3, (3, 5), resume_from=saved),
    )


@functools.cache
def _trained(world: int, resumed: bool) -> dict[str, Trained]:
    names = NAMES[world * WORLD : (world + 1) * WORLD]
    if resumed:
        _trained(world, False)
    cases = [_cases(name)[resumed] for name in names]
    return dict(
        zip(names, run_ranks(train_wrapped_cases, 2 + resumed, cases, timeout=50)[0], strict=True)
    )


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_trains_as_in_one_process(name, resumed):
    case = _cases(name)[resumed]
    got = _trained(NAMES.index(name) // WORLD, resumed)[name]
    wrong = differences(train_dense(case), got, case.architecture.tolerance)
    assert not wrong, f"{case}:\n" + "\n".join(wrong[:8])
