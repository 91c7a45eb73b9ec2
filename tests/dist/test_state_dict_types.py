"""Local and sharded state dicts: keys, shapes, values, DCP, and that the setting is always put back."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from fsdp import (
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from tests.support.ranks import run_ranks
from tests.support.scripts import Block, batch, build, wrap


def sharded(cls, classes, strategy):
    reference = build(cls).state_dict()
    for use_orig_params in (False, True):
        model = wrap(
            build(cls),
            classes,
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
        )
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
        assert sorted(state) == sorted(reference)
        for name, value in state.items():
            whole = value
            if isinstance(value, DTensor):
                assert value.shape == reference[name].shape
                whole = value.full_tensor()
            assert torch.equal(whole, reference[name]), name
        other = wrap(build(cls, 5), classes, use_orig_params=use_orig_params)
        other.load_state_dict(state)
        again = other.state_dict()
        assert all(torch.equal(again[name], reference[name]) for name in reference)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_sharded_state_dicts_hold_each_parameter_by_rows(world_size, strategy):
    from tests.dist.test_engine_features import Lora, LoraNet
    from tests.support.scripts import Net

    run_ranks(sharded, world_size, Net, {Block}, strategy)
    run_ranks(sharded, world_size, LoraNet, {Lora}, strategy)


def local():
    for use_orig_params in (False, True):
        model = wrap(build(), use_orig_params=use_orig_params)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
        assert sorted(state) == [
            "blocks.0.flat_param",
            "blocks.1.flat_param",
            "blocks.2.flat_param",
            "flat_param",
        ]
        shard = state["flat_param"]
        assert shard.to_local().data_ptr() == model._handle.shard.data_ptr()
        assert shard.numel() == model._handle.layout.padded_numel
        other = wrap(build(seed=5), use_orig_params=use_orig_params)
        other.load_state_dict(state)
        again = other.state_dict()
        reference = build().state_dict()
        assert all(torch.equal(again[name], reference[name]) for name in reference)


def test_local_state_dicts_are_the_flat_shards_themselves():
    run_ranks(local, 2)


def checkpointed(folder, seed, save, use_orig_params):
    model = wrap(build(seed=seed), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        if save:
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
    model(batch(dist.get_rank())).sum().backward()
    return model.state_dict()


def test_sharded_state_dicts_go_through_torch_distributed_checkpoint_to_another_world_size():
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(checkpointed, 3, folder, 1, True, False)[0]
        loaded = run_ranks(checkpointed, 2, folder, 2, False, True)[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def settings():
    model = wrap(build())
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    with pytest.raises(KeyError), FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        raise KeyError
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    with pytest.raises(RuntimeError, match="FullStateDictConfig"):
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())
    FSDP.set_state_dict_type(
        model.module.blocks[0], StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    )
    with pytest.raises(RuntimeError, match="same"):
        FSDP.get_state_dict_type(model)
    FSDP.set_state_dict_type(model.module.blocks[0], StateDictType.FULL_STATE_DICT)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert list(state) == (list(build().state_dict()) if dist.get_rank() == 0 else [])


def test_settings_are_checked_and_always_put_back():
    run_ranks(settings, 2)


def differentiated():
    for use_orig_params in (False, True):
        model = wrap(build(), use_orig_params=use_orig_params)
        loss = model(batch(0)).square().sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)
        model.zero_grad()
        model(batch(0)).square().sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused_by_name():
    run_ranks(differentiated, 2)
