"""Saved by one world, loaded by another: every tensor and every number comes back bitwise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import checkpoint
from fsdp.checkpoint.source import Source
from fsdp.cli.checkpoint import merge
from fsdp.wrap import ModuleWrapPolicy
from tests.checkpoint.support import STRATEGIES, assert_same, build, loaded, saved, step, whole
from tests.dist.test_state_dict_types import peak_growth
from tests.support.models import ENTRIES
from tests.support.oracles import WRAPPINGS, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks

SIDES = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "wrapping": st.sampled_from(WRAPPINGS),
        "orig": st.booleans(),
        "offload": st.booleans(),
    }
)
SAFE = sorted(name for name, item in ENTRIES.items() if not item.skips_parameters)


def check(name, saver, loader, worlds, how="save"):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "step-2")
        before = run_kept_ranks(saved, worlds[0], path, name, saver, how=how)
        after = run_kept_ranks(loaded, worlds[1], path, name, loader)
    state, optimizer_state, _ = before[0]
    for rank, (got, got_optimizer, numbers, extra, restored) in enumerate(after):
        assert_same(dict(state), dict(got), f"rank {rank}")
        assert_same(optimizer_state["state"], got_optimizer["state"], f"rank {rank}")
        assert extra == {"step": 2}
        assert restored == (rank < worlds[0])
        if restored:
            assert numbers == before[rank][2]


EXAMPLES = {"fast": 8, "ci": 20, "slow": 500}[os.environ.get("HYPOTHESIS_PROFILE", "fast")]


# Worlds take seconds: a failing one is shown as it was found.
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
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


# -- going on ----------------------------------------------------------------------------------------------------------


def goes_on(path):
    """Saved, trained on; loaded into another model, trained on alike: bitwise the same."""
    for orig in (False, True):
        here = path / str(orig)
        model, optimizer = build("gpt_tied", orig=orig)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for index in range(2):
            step("gpt_tied", model, optimizer, index)
            schedule.step()
        checkpoint.save(here, model, optimizer, {"schedule": schedule})
        other, other_optimizer = build("gpt_tied", orig=orig, seed=8)
        other_schedule = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5)
        checkpoint.load(here, other, other_optimizer, {"schedule": other_schedule})
        for index in range(2, 5):
            step("gpt_tied", model, optimizer, index)
            step("gpt_tied", other, other_optimizer, index)
            schedule.step()
            other_schedule.step()
        assert schedule.get_last_lr() == other_schedule.get_last_lr()
        assert_same(whole(model, optimizer), whole(other, other_optimizer))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_run_goes_on_bitwise(tmp_path, world_size):
    run_ranks(goes_on, world_size, tmp_path)


# -- other kinds of models ---------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Extra state, a buffer that is saved and one that is not, an ignored layer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 5)
        self.ignored = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.note = "start"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def variants(path):
    """A plain module around wrappers; checkpoint wrappers; a plain module; ignored parameters, extra state."""

    def inside_plain(seed):
        torch.manual_seed(seed)
        return nn.ModuleDict({"a": FSDP(nn.Linear(3, 4)), "b": nn.Linear(4, 2)})

    def recomputed(seed):
        item = ENTRIES["mlp"]
        plain = item.build(seed)
        plain.blocks[1] = checkpoint_wrapper(plain.blocks[1])
        return wrap_entry(item, plain, use_orig_params=True)

    def own(seed):
        torch.manual_seed(seed)
        model = Own()
        model.count += seed
        model.note = f"seed {seed}"
        return FSDP(model, ignored_modules=[model.ignored])

    def compiled(seed):
        plain = ENTRIES["mlp"].build(seed)
        plain.blocks[0] = torch.compile(plain.blocks[0], backend="eager")
        return FSDP(plain)

    for make in (inside_plain, recomputed, ENTRIES["mlp"].build, own, compiled):
        folder = path / make.__name__
        first, second = make(1), make(2)
        checkpoint.save(folder, first)
        assert not checkpoint.load(folder, second).missing_keys
        state = first.state_dict()
        assert_same(dict(state), dict(second.state_dict()))
        if dist.get_rank() == 0:
            names = {k.removeprefix("model/") for k in Source(folder).manifest.tensors}
            assert names == {k for k in state if not k.endswith("_extra_state")}
            assert not any("_checkpoint_wrapped" in name or "_orig_mod" in name for name in names)


@pytest.mark.parametrize("world_size", [1, 2])
def test_models_of_every_build_are_saved_under_clean_names(tmp_path, world_size):
    run_ranks(variants, world_size, tmp_path)


def test_no_process_group_is_needed(tmp_path):
    model, other = ENTRIES["gpt_tied"].build(1), ENTRIES["gpt_tied"].build(2)
    checkpoint.save(tmp_path / "a", model, extra={"step": 3})
    assert checkpoint.load(tmp_path / "a", other).extra == {"step": 3}
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert checkpoint.read_extra(tmp_path) == {"step": 3}


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(path, side):
    """Loading into shards, in units of one layer."""
    plain = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(6)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    expected = model.state_dict() if dist.get_rank() == 0 else model.state_dict() and None
    checkpoint.save(path, model)
    growth = peak_growth(lambda: checkpoint.load(path, model))
    got = model.state_dict()
    assert expected is None or all(torch.equal(got[key], expected[key]) for key in expected)
    return growth / (side * side * 4)


def test_loading_needs_less_memory_than_a_unit_and_merging_one_tensor(tmp_path):
    side = 1500
    assert all(units <= 1 for units in run_ranks(memory, 2, tmp_path / "big", side))
    tensors = run_ranks(merging, 1, tmp_path / "big", tmp_path / "out", side)[0]
    assert tensors <= 1.15  # one, and a block


def merging(path, out, side):
    peak_growth(lambda: merge(path, out))  # imports and allocator warm up
    return peak_growth(lambda: merge(path, out)) / (side * side * 4)
