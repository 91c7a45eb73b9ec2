"""What is gathered ahead and then not used does not stay until the end of the forward."""

from __future__ import annotations

import pytest
from torch import nn

import fsdp.runtime.root
from fsdp.runtime.unit import Residency
from fsdp.schedule.order import ExecutionOrder
from tests.streams.scenarios import Model, world
from tests.streams.simulator import Machine


@pytest.mark.parametrize("kept", [range(8), range(0, 8, 2), (0, 3, 4, 5), (7, 6, 5, 4)])
def test_two_units_are_whole_besides_the_root_whatever_is_skipped(kept, monkeypatch):
    monkeypatch.setattr(fsdp.runtime.root, "_SMALL_BYTES", 0)
    machine = Machine()
    with world(machine, model=Model(8)) as w, machine.watching():
        blocks = list(w.model.module.blocks)
        w.step()
        whole: list[int] = []
        for block in blocks:
            block.register_forward_hook(
                lambda *_: whole.append(
                    sum(unit.residency is not Residency.SHARDED for unit in w.root.units[1:])
                )
            )
        w.model.module.blocks = nn.ModuleList(blocks[index] for index in kept)
        w.step()
        w.model.module.blocks = nn.ModuleList(blocks)
    assert len(whole) == len(kept)
    assert max(whole) <= 2, whole
    assert not machine.races


def test_units_that_were_foreseen_and_passed_over_are_named_once():
    order = ExecutionOrder()
    for unit in (1, 2, 3):
        order.foresee(unit)
    assert order.begin(0) == [1, 2, 3]
    order.foresee(1)
    order.foresee(2)
    order.foresee(3)
    assert order.begin(2) == [1]
    assert order.begin(2) == []  # again in one forward: it says nothing of what comes
    assert order.begin(3) == []


def test_a_unit_that_is_used_twice_does_not_pass_over_the_next_one():
    order = ExecutionOrder()
    order.begin(0)
    order.begin(1)
    order.foresee(2)
    assert order.begin(0) == []
    assert order.begin(2) == []
