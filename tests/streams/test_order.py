"""Streams and events order every pair of accesses that need it, whatever the model is put through.

Each wait is also left out, to see that the detector misses it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fsdp.runtime.reduction_queue
import fsdp.runtime.streams
from tests.streams.scenarios import (
    OPTIONS,
    SCENARIOS,
    Alternating,
    accumulate,
    beside_a_model_on_another_stream,
    fail_and_go_on,
    follow_others,
    train,
    world,
)
from tests.streams.simulator import Machine

STREAMS = Path(fsdp.runtime.streams.__file__)
# Functions with a wait, and below which callers it is to be left out.
WAITS = [
    ("shards_written", None),
    ("released", None),
    ("run_reduce", None),
    ("_after_reduce", None),
    ("use_after", None),
    ("reuse_after", None),
    ("end_step", None),  # of captures only: see test_capture
]


def watched(machine, scenario, **options):
    with world(machine, **options) as simulated, machine.watching():
        scenario(simulated)
    assert machine.operations > 100
    # A host that waits orders what streams do not; ranks that follow others read what these have used.
    assert scenario is follow_others or not machine.synchronisations
    return machine.races


@pytest.mark.parametrize("options", ["flat", "orig"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_two_accesses_to_the_same_memory_are_ordered(scenario, options):
    races = watched(Machine(), SCENARIOS[scenario], **OPTIONS[options]())
    assert not races, "\n".join(map(str, races))


@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_under_every_option(options):
    def several(simulated):
        train(simulated)
        accumulate(simulated)
        fail_and_go_on(simulated)

    races = watched(Machine(), several, **OPTIONS[options]())
    assert not races, "\n".join(map(str, races))


@pytest.mark.parametrize("options", ["orig", "bf16 sums", "hybrid", "replicated sums"])
def test_units_may_compute_on_several_streams(options, monkeypatch):
    """Whatever stream waits for a reduction, the stream that fills its memory again does too."""
    monkeypatch.setattr(
        fsdp.runtime.reduction_queue, "_SMALL_BYTES", 0
    )  # reductions are waited for early
    machine = Machine()
    model = Alternating(machine)
    with (
        world(machine, model=model, **OPTIONS[options]()) as w,
        machine.watching(),
        machine.autograd(),
    ):
        train(w)
    assert not machine.races, "\n".join(map(str, machine.races))


@pytest.mark.parametrize(
    "options",
    ["bf16 sums", "low precision gradients", "hooked", "hooked sums", "powersgd", "compressed"],
)
def test_models_on_streams_of_their_own_are_under_options_that_make_gradients_anew(options):
    races = watched(Machine(), beside_a_model_on_another_stream, **OPTIONS[options]())
    assert not races, "\n".join(map(str, races))


def test_a_step_in_the_backward_is_ordered_too():
    def steps(simulated):
        for seed in range(3):
            simulated.loss(seed).backward()

    assert not watched(Machine(), steps, in_backward=True)


def test_sums_over_replicas_that_are_left_to_a_later_backward_are_ordered():
    def steps(simulated):
        for seed in range(3):
            simulated.model.set_requires_all_reduce(False)
            simulated.loss(seed).backward()
            simulated.loss(seed + 1).backward()
            simulated.model.set_requires_all_reduce(True)
            simulated.step(seed + 2)

    assert not watched(Machine(), steps, **OPTIONS["hybrid"]())


@pytest.mark.parametrize(("function", "caller"), WAITS[:-1], ids=str)
def test_no_wait_can_be_left_out(function, caller):
    machine = Machine(STREAMS.name, (function, caller))
    assert watched(machine, train, **OPTIONS["hybrid"]()), f"nobody misses the wait in {function}"
    assert machine.drops


def test_the_list_of_waits_is_complete():
    tree = ast.parse(STREAMS.read_text())
    waiting = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in ("wait_event", "wait_stream")
    }
    assert waiting == {function for function, _ in WAITS}
