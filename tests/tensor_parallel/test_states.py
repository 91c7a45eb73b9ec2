"""States of tensor-parallel parameters: whole, or slices on two axes; for any other division of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from fsdp import FullStateDictConfig, StateDictType, checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, UnsupportedError
from fsdp.optim import WholeParamOptimizer, apply_optimizer_in_backward
from tests.support.compare import TRAINED, assert_bitwise, assert_close
from tests.support.ranks import run_kept_ranks
from tests.tensor_parallel.support import (
    Shape,
    build,
    loss_of,
    mesh_of,
    my_row,
    parallelised,
    whole,
    wrap,
)

SHAPES = [Shape(2, 2), Shape(1, 2), Shape(1, 4), Shape(2, 1)]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(shape, orig):
    """The dense model and the divided one with their optimizers, after two steps."""
    mesh = mesh_of(shape)
    dense, model = build(), wrap(parallelised(build(), mesh), mesh, use_orig_params=orig)
    optimizers = optimizer_of(dense), optimizer_of(model)
    for step in range(2):
        for row in range(shape.dp):
            (loss_of(dense, row, step) / shape.dp).backward()
        loss_of(model, my_row(mesh), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return mesh, dense, optimizers[0], model, optimizers[1]


def models(shape, orig, folder):
    mesh, dense, _, model, _ = trained(shape, orig)
    full = model.state_dict()
    assert list(full) == list(dense.state_dict())
    assert not any(isinstance(value, DTensor) for value in full.values())
    assert_close(dict(dense.state_dict()), dict(full), TRAINED)
    config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        first_only = model.state_dict()
    assert list(first_only) == (list(full) if dist.get_rank() == 0 else [])

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        slices = model.state_dict()
        weight = slices["blocks.0.up.weight"]
        assert weight.device_mesh.mesh_dim_names == ("tensor", "shard")
        assert tuple(weight.placements) == (Shard(0), Shard(0))
        assert tuple(slices["blocks.0.down.weight"].placements) == (Shard(1), Shard(0))
        assert weight.shape == (12, 6)
        assert_bitwise(dict(full), whole(slices))
        dcp.save(slices, checkpoint_id=folder)

    fresh = [wrap(parallelised(build(1), mesh), mesh, use_orig_params=orig) for _ in range(3)]
    fresh[0].load_state_dict(full)
    fresh[1].load_state_dict(slices)
    with FSDP.state_dict_type(fresh[2], StateDictType.SHARDED_STATE_DICT):
        loaded = fresh[2].state_dict()
        dcp.load(loaded, checkpoint_id=folder)
        fresh[2].load_state_dict(loaded)
    for other in fresh:
        assert_bitwise(dict(full), dict(other.state_dict()))
    with pytest.raises(CheckpointError, match=r"size mismatch for blocks\.0\.up\.weight"):
        model.load_state_dict({**full, "blocks.0.up.weight": torch.zeros(5, 6)})
    with (
        FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(UnsupportedError, match="SHARDED_STATE_DICT"),
    ):
        model.state_dict()
    with pytest.raises(UnsupportedError, match="mmap=True"):
        model.load_state_dict(full, broadcast_from_rank0=True)
    return full


def dense_load(folder):
    state = build(2).state_dict()
    dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(1, 2)], ids=str)
def test_model_states_are_the_dense_models_whole_or_in_slices(tmp_path, shape, orig):
    saved = run_kept_ranks(models, shape.world, shape, orig, tmp_path / "dcp")[0]
    assert_bitwise(dict(saved), dict(run_kept_ranks(dense_load, 1, tmp_path / "dcp")[0]))


def optimizers(orig):
    mesh, dense, dense_optimizer, model, optimizer = trained(Shape(2, 2), orig)
    names = [name for name, _ in dense.named_parameters()]
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    for number, name in enumerate(names):
        expected = dense_optimizer.state_dict()["state"][number]
        assert_close(dict(expected), full["state"][name], TRAINED)
    first_only = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(first_only) == (dist.get_rank() == 0)
    slices = FSDP.sharded_optim_state_dict(model, optimizer)
    assert tuple(slices["state"]["blocks.0.up.weight"]["exp_avg"].placements) == (
        Shard(0),
        Shard(0),
    )
    for saved in (full, slices):
        other = wrap(parallelised(build(), mesh), mesh, use_orig_params=not orig)
        new = optimizer_of(other)
        new.load_state_dict(FSDP.optim_state_dict_to_load(other, new, saved))
        again = FSDP.full_optim_state_dict(other, new, rank0_only=False)
        for name in names:
            assert_bitwise(full["state"][name], again["state"][name])
    with pytest.raises(UnsupportedError, match="on every rank"):
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    with pytest.raises(UnsupportedError, match="tensor-parallel"):
        WholeParamOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(UnsupportedError, match="tensor-parallel"):
        apply_optimizer_in_backward(model, optimizer, max_norm=1.0)


@pytest.mark.parametrize("orig", [False, True])
def test_optimizer_states_are_the_dense_models(orig):
    run_kept_ranks(optimizers, 4, orig)


def save_folder(folder, shape, orig):
    _, _, _, model, optimizer = trained(shape, orig)
    checkpoint.save(folder, model, optimizer)
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def load_folder(folder, shape, orig):
    mesh = mesh_of(shape)
    model = wrap(parallelised(build(1), mesh), mesh, use_orig_params=orig)
    optimizer = optimizer_of(model)
    checkpoint.load(folder, model, optimizer)
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (SHAPES[0], SHAPES[1]),
        (SHAPES[1], SHAPES[2]),
        (SHAPES[3], SHAPES[0]),
        (SHAPES[2], SHAPES[3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("orig", [False, True])
def test_a_checkpoint_loads_at_any_division_of_ranks(tmp_path, saving, loading, orig):
    folder = tmp_path / "c"
    saved, saved_optimizer = run_kept_ranks(save_folder, saving.world, folder, saving, orig)[0]
    for model, optimizer in run_kept_ranks(load_folder, loading.world, folder, loading, not orig):
        assert_bitwise(dict(saved), dict(model))
        for name, values in saved_optimizer["state"].items():
            assert_bitwise(values, optimizer["state"][name])
