"""Saved by one world, loaded by another: every tensor and every number comes back bitwise."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.support import STRATEGIES, assert_same, loaded, saved
from tests.support.models import ENTRIES
from tests.support.oracles import WRAPPINGS
from tests.support.ranks import run_ranks

SIDES = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "wrapping": st.sampled_from(WRAPPINGS),
        "orig": st.booleans(),
    }
)
SAFE = sorted(name for name, item in ENTRIES.items() if not item.skips_parameters)


def check(name, saver, loader, worlds, how="save"):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "step-2")
        before = run_ranks(saved, worlds[0], path, name, saver, how=how)
        after = run_ranks(loaded, worlds[1], path, name, loader)
    state, optimizer_state, _ = before[0]
    for rank, (got, got_optimizer, numbers, extra, restored) in enumerate(after):
        assert_same(dict(state), dict(got), f"rank {rank}")
        assert_same(optimizer_state["state"], got_optimizer["state"], f"rank {rank}")
        assert extra == {"step": 2}
        assert restored == (rank < worlds[0])
        if restored:
            assert numbers == before[rank][2]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(SAFE),
    SIDES,
    SIDES,
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["save", "async_save"]),
)
def test_any_world_loads_what_any_other_has_saved(name, saver, loader, worlds, how):
    check(name, saver, loader, worlds, how)


@pytest.mark.parametrize("name", SAFE)
def test_every_model_comes_back_at_another_world_size(name):
    flat = {"strategy": "FULL_SHARD", "wrapping": "blocks", "orig": False}
    check(name, {**flat, "orig": True}, flat, (3, 2))
