"""State dicts, optimizer states and checkpoints of a mixture whose experts are spread: those of the dense mixture."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp import FullStateDictConfig, ShardedStateDictConfig, StateDictType, checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, FsdpWarning, UnsupportedError
from fsdp.state.elsewhere import merged_order
from tests.moe.support import build, loss_of, place, spread, wrap
from tests.support.compare import TRAINED, assert_bitwise, assert_close
from tests.support.ranks import run_kept_ranks, run_ranks


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(where, orig, steps=2, seed=0):
    """The wrapped model and its optimizer after some steps, and the dense ones."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dense, model = build(seed), wrap(spread(build(seed), where), where, use_orig_params=orig)
    optimizers = optimizer_of(dense), optimizer_of(model)
    for step in range(steps):
        for who in range(world):
            (loss_of(dense, who, step) / world).backward()
        loss_of(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dense, optimizers[0], model, optimizers[1]


def whole(orig, expert_ranks):
    where = place(expert_ranks)
    dense, _, model, _ = trained(where, orig)
    for wrapped in (model, model.module):
        state = wrapped.state_dict()
        assert list(state) == list(dense.state_dict())
        assert_close(dict(dense.state_dict()), dict(state), TRAINED)
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        first_only = model.state_dict()
    wanted = list(state) if dist.get_rank() == 0 else []
    assert list(first_only) == wanted, set(wanted) ^ set(first_only)
    if first_only:
        assert_bitwise(dict(state), dict(first_only))

    for from_first in (False, True):
        other = wrap(spread(build(1), where), where, use_orig_params=orig)
        given = {} if from_first and dist.get_rank() else state
        other.load_state_dict(given, broadcast_from_rank0=from_first)
        assert_bitwise(dict(state), dict(other.state_dict()))
    with pytest.raises(CheckpointError, match="unknown"):
        other.load_state_dict({**state, "unknown": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"Missing key.*blocks\.0\.experts\.each"):
        other.load_state_dict({k: v for k, v in state.items() if "blocks.0.experts" not in k})


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(("world", "expert_ranks"), [(4, 2), (2, 2)])
def test_a_full_state_dict_is_the_dense_models_and_loads_as_it(world, expert_ranks, orig):
    run_kept_ranks(whole, world, orig, expert_ranks)


def sharded(orig, folder):
    where = place(2)
    _, _, model, _ = trained(where, orig)
    state = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save(model.state_dict(), checkpoint_id=folder)
    other = wrap(spread(build(1), where), where, use_orig_params=orig)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        slices = other.state_dict()
        dcp.load(slices, checkpoint_id=folder)
        other.load_state_dict(slices)
    assert_bitwise(dict(state), dict(other.state_dict()))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(local)
    assert_bitwise(dict(state), dict(other.state_dict()))
    return state


def dense_load(folder):
    dense = build(2)
    state = dense.state_dict()
    dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("orig", [False, True])
def test_torchs_checkpoint_of_spread_experts_loads_into_the_dense_model(tmp_path, orig):
    saved = run_kept_ranks(sharded, 4, orig, tmp_path / "dcp")[0]
    assert_bitwise(dict(saved), dict(run_kept_ranks(dense_load, 1, tmp_path / "dcp")[0]))


def optimizer_states(orig):
    where = place(2)
    dense, dense_optimizer, model, optimizer = trained(where, orig)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    names = [name for name, _ in dense.named_parameters()]
    assert list(full["state"]) == names
    assert [group["params"] for group in full["param_groups"]] == [names]
    for number, name in enumerate(names):
        expected = dense_optimizer.state_dict()["state"][number]
        assert_close(dict(expected), full["state"][name], TRAINED)
    first_only = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank():
        assert first_only == {}
    else:
        for name in names:
            assert_bitwise(full["state"][name], first_only["state"][name])
    model2 = wrap(spread(build(), where), where, use_orig_params=orig)
    optimizer2 = optimizer_of(model2)
    optimizer2.load_state_dict(FSDP.optim_state_dict_to_load(model2, optimizer2, full))
    again = FSDP.full_optim_state_dict(model2, optimizer2, rank0_only=False)
    for name in names:
        assert_bitwise(full["state"][name], again["state"][name])
    with pytest.raises(UnsupportedError, match="units over fewer ranks"):
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        slices = FSDP.optim_state_dict(model, optimizer)
        assert [group["params"] for group in slices["param_groups"]] == [names]
        assert set(slices["state"]) < set(names)
    model3 = wrap(spread(build(), where), where, use_orig_params=orig)
    optimizer3 = optimizer_of(model3)
    optimizer3.load_state_dict(FSDP.optim_state_dict_to_load(model3, optimizer3, slices))
    again = FSDP.full_optim_state_dict(model3, optimizer3, rank0_only=False)
    for name in names:
        assert_bitwise(full["state"][name], again["state"][name])


@pytest.mark.parametrize("orig", [False, True])
def test_the_optimizers_state_is_the_dense_models_and_loads_as_it(orig):
    run_kept_ranks(optimizer_states, 4, orig)


def save_folder(folder, expert_ranks, orig):
    where = place(expert_ranks)
    _, _, model, optimizer = trained(where, orig)
    for block in model.module.blocks:
        block.experts.each[str(where.numbers[0])].calls.fill_(where.numbers[0] + 1.0)
    checkpoint.save(folder, model, optimizer)
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def load_folder(folder, expert_ranks, orig):
    where = place(expert_ranks)
    model = wrap(spread(build(1), where), where, use_orig_params=orig)
    optimizer = optimizer_of(model)
    checkpoint.load(folder, model, optimizer)
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


@pytest.mark.parametrize(
    ("saving", "loading"), [((4, 2), (2, 1)), ((2, 2), (4, 4)), ((2, 1), (4, 2)), ((4, 2), (4, 2))]
)
@pytest.mark.parametrize("orig", [False, True])
def test_a_checkpoint_loads_with_experts_over_other_ranks(tmp_path, saving, loading, orig):
    saved, saved_optimizer = run_kept_ranks(
        save_folder, saving[0], tmp_path / "c", saving[1], orig
    )[0]
    for model, optimizer in run_kept_ranks(
        load_folder, loading[0], tmp_path / "c", loading[1], not orig
    ):
        assert_bitwise(dict(saved), dict(model))
        for name, values in saved_optimizer["state"].items():
            assert_bitwise(values, optimizer["state"][name])


def with_same_names():
    """A model of which every rank calls its experts 0 and 1, after a backward."""
    where = place(2)
    model = build()
    for block in model.blocks:
        block.experts.keep(range(2), None)
    model = wrap(model, where)
    loss_of(model, dist.get_rank()).backward()
    return model


def same_names(kind, config):
    model = with_same_names()
    with (
        FSDP.state_dict_type(model, StateDictType[kind], config),
        pytest.raises(CheckpointError, match="different parameters on different ranks") as caught,
    ):
        model.state_dict()
    assert "global number" in str(caught.value)
    loss_of(model, dist.get_rank()).backward()  # nothing is left half open


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("FULL_STATE_DICT", FullStateDictConfig(rank0_only=True)),
        ("SHARDED_STATE_DICT", ShardedStateDictConfig()),
    ],
    ids=["full", "sharded"],
)
def test_a_name_that_means_different_experts_on_different_ranks_is_refused(kind, config):
    run_kept_ranks(same_names, 4, kind, config)


def own_experts():
    model = with_same_names()
    before = [value.clone() for value in model.parameters()]
    with pytest.warns(FsdpWarning, match="different parameters on different ranks"):
        state = model.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with pytest.warns(FsdpWarning, match="different parameters on different ranks"):
        model.load_state_dict(state)
    assert all(map(torch.equal, before, model.parameters()))


def test_whole_dicts_on_every_rank_hold_its_own_experts_where_names_clash_with_a_warning():
    run_ranks(own_experts, 4)


def frozen():
    """Frozen units over fewer ranks hold equal values everywhere: one of them is saved."""
    where = place(2)
    model = build()
    for block in model.blocks:
        block.experts.requires_grad_(False)
    model = wrap(model, where)
    assert_bitwise(dict(build().state_dict()), dict(model.state_dict()))


def test_frozen_units_over_fewer_ranks_are_copies():
    run_kept_ranks(frozen, 4)


def test_orders_of_ranks_are_merged_where_they_belong():
    first, second = ["a", "e0", "e1", "b"], ["a", "e2", "e3", "b", "c"]
    assert merged_order([first, second]) == ["a", "e0", "e1", "e2", "e3", "b", "c"]
    assert merged_order([["e0"], ["e1"], []]) == ["e0", "e1"]
    assert merged_order([]) == []
