"""Local and sharded state dicts: keys, shapes, values, DCP, and that the setting is always put back."""

from __future__ import annotations

import ctypes
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm.entry import EntryGate
from fsdp.comm.process_group import PointToPointCollectives
from fsdp.errors import CheckpointError, ShardMismatchError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.models import ENTRIES
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks
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

    run_kept_ranks(sharded, world_size, Net, {Block}, strategy)
    run_kept_ranks(sharded, world_size, LoraNet, {Lora}, strategy)


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
    run_kept_ranks(local, 2)


def checkpointed(folder, seed, save, use_orig_params, strategy):
    model = wrap(
        build(seed=seed),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        if save:
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
    model(batch(dist.get_rank())).sum().backward()
    return model.state_dict()


@pytest.mark.parametrize(
    ("saver", "loader"),
    [((3, "FULL_SHARD"), (2, "NO_SHARD")), ((1, "NO_SHARD"), (2, "FULL_SHARD"))],
)
def test_sharded_state_dicts_go_through_torch_distributed_checkpoint_to_another_world(
    saver, loader
):
    with tempfile.TemporaryDirectory() as folder:
        saved = run_kept_ranks(checkpointed, saver[0], folder, 1, True, False, saver[1])[0]
        loaded = run_kept_ranks(checkpointed, loader[0], folder, 2, False, True, loader[1])[0]
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
    run_kept_ranks(settings, 2)


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
    run_kept_ranks(differentiated, 2)


# -- every model, strategy and world size ------------------------------------------------------------------------------

EXPOSURES = (False, True)


def all_types(name, strategy, offload=False):
    """Sharded and local dicts of every exposure hold the plain model's values and load into the other exposure."""
    item = ENTRIES[name]
    reference = item.build().state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(),
            "blocks",
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            cpu_offload=CPUOffload(offload_params=offload),
        )
        managed = {fqn for unit in model._unit.root.units for h in unit.handles for fqn in h.fqns}
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded_state = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), no_communication():
            local_state = model.state_dict()
        assert list(sharded_state) == list(reference)
        for key, value in sharded_state.items():
            assert isinstance(value, DTensor) or key not in managed
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert value.shape == reference[key].shape, key
            assert torch.equal(whole, reference[key]), key
        for state in (sharded_state, local_state):
            same = orig if state is local_state else not orig
            other = wrap_entry(
                item,
                item.build(seed=7),
                "blocks",
                use_orig_params=same,
                sharding_strategy=ShardingStrategy[strategy],
            )
            result = other.load_state_dict(dict(state))
            assert not result.unexpected_keys
            loaded = other.state_dict()
            assert all(torch.equal(loaded[key], reference[key]) for key in reference)
        pieces = {key for key in local_state if key.rpartition(".")[2].startswith("flat_param")}
        # A unit that several modules share has keys under each of its names, like any shared module.
        paths = [
            unit for _, unit in model.named_modules(remove_duplicate=False) if type(unit) is FSDP
        ]
        assert len(pieces) == sum(len(unit._unit.handles) for unit in paths)
        shard = local_state.get("flat_param")
        if shard is not None:
            assert isinstance(shard, DTensor)
            assert shard.to_local().data_ptr() == model._handle.shard.data_ptr()


@contextmanager
def no_communication():
    """Fail if anything is sent or waited for."""

    def refuse(*args, **kwargs):
        raise AssertionError("communication")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EntryGate, "_enter", refuse)
        for name in ("all_gather_object", "all_gather", "all_to_all_single", "broadcast"):
            patch.setattr(dist, name, refuse)
        for name in ("all_gather", "exchange", "broadcast", "all_reduce"):
            patch.setattr(PointToPointCollectives, name, refuse)
        yield


def test_cpu_offload_changes_no_state_dict():
    run_ranks(all_types, 2, "gpt_rope", "FULL_SHARD", True)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_model_goes_through_sharded_and_local_dicts(name):
    run_ranks(all_types, 3, name, "FULL_SHARD")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_world_size_one_and_no_shard_give_dtensors_too(world_size, strategy):
    run_ranks(all_types, world_size, "gpt_tied", strategy)


def hybrid(strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    item = ENTRIES["mlp"]
    reference = item.build().state_dict()
    for orig in EXPOSURES:
        kwargs = {"sharding_strategy": ShardingStrategy[strategy], "device_mesh": mesh}
        model = wrap_entry(item, item.build(), "blocks", use_orig_params=orig, **kwargs)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), no_communication():
            assert model.state_dict()["flat_param"].device_mesh.ndim == 1
        value = state["blocks.0.up.weight"]
        assert value.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert [type(placement) for placement in value.placements] == [Replicate, Shard]
        other = wrap_entry(item, item.build(3), "blocks", use_orig_params=not orig, **kwargs)
        other.load_state_dict(state)
        loaded = other.state_dict()
        for key in reference:
            assert torch.equal(loaded[key], reference[key])
            assert torch.equal(state[key].full_tensor(), reference[key])
        third = wrap_entry(item, item.build(4), "blocks", use_orig_params=orig, **kwargs)
        third.load_state_dict(reference if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
        loaded = third.state_dict()
        assert all(torch.equal(loaded[key], reference[key]) for key in reference)


def test_hybrid_sharding_gives_two_dimensional_dtensors():
    run_ranks(hybrid, 4, "HYBRID_SHARD")


def on_the_users_mesh(names):
    """``names``: of the dimensions of the mesh, two with hybrid sharding."""
    shape = (2, 2) if len(names) == 2 else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names if all(names) else None)
    strategy = ShardingStrategy.HYBRID_SHARD if len(names) == 2 else ShardingStrategy.FULL_SHARD
    item = ENTRIES["mlp"]
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(),
            use_orig_params=orig,
            device_mesh=mesh,
            sharding_strategy=strategy,
        )
        optimizer = torch.optim.Adam(model.parameters())
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        optimizer.step()
        whole, whole_optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            averages = {fqn: values["exp_avg"] for fqn, values in optim["state"].items()}
            for found, wanted in (
                (state, whole),
                (averages, {f: v["exp_avg"] for f, v in whole_optim["state"].items()}),
            ):
                for key, value in found.items():
                    assert value.device_mesh.mesh.equal(mesh.mesh)
                    assert value.device_mesh == mesh or names == ("replicate",)
                    assert isinstance(value.placements[-1], Shard)
                    assert all(isinstance(each, Replicate) for each in value.placements[:-1])
                    assert torch.equal(value.full_tensor(), wanted[key])
            model.load_state_dict(state)
            FSDP.optim_state_dict_to_load(model, optimizer, optim, load_directly=True)
        assert all(torch.equal(model.state_dict()[key], whole[key]) for key in whole)


@pytest.mark.parametrize(
    "names", [(None,), ("replicate",), (None, None), ("shard", "replicate")], ids=str
)
def test_sharded_dicts_lie_on_the_mesh_the_model_was_wrapped_with(names):
    run_kept_ranks(on_the_users_mesh, 4 if len(names) == 2 else 3, names)


def channels_last():
    """Parameters whose memory order is not row-major are cut along the dimension that is outermost in memory."""
    for orig in EXPOSURES:
        plain = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(4, 7, bias=False))
        plain[0].to(memory_format=torch.channels_last)
        plain[1].weight = torch.nn.Parameter(torch.randn(4, 7).t())
        plain.load_state_dict({k: torch.randn(v.shape) for k, v in plain.state_dict().items()})
        reference = {key: value.clone() for key, value in plain.state_dict().items()}
        model = FSDP(plain, use_orig_params=orig, sync_module_states=True)
        reference = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
        assert state["0.weight"].placements[0] == Shard(0)
        assert state["1.weight"].placements[0] == Shard(1)
        assert all(torch.equal(state[key].full_tensor(), reference[key]) for key in reference)
        model.load_state_dict({key: torch.zeros_like(value) for key, value in reference.items()})
        model.load_state_dict(state)
        loaded = model.state_dict()
        assert all(torch.equal(loaded[key], reference[key]) for key in reference)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_in_any_memory_order_keep_their_values(world_size):
    run_kept_ranks(channels_last, world_size)


def awkward():
    """Scalars, empty parameters, packed bytes, frozen ones, ignored parameters and modules, a buffer."""
    for orig in EXPOSURES:
        reference = Awkward().state_dict()
        plain = Awkward()
        ignored = [plain.ignored.weight, plain.ignored.bias, plain.loose]
        model = FSDP(plain, use_orig_params=orig, ignored_states=ignored)
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                state = model.state_dict()
            other = FSDP(
                zeroed := Awkward(),
                use_orig_params=orig,
                ignored_states=[zeroed.ignored.weight, zeroed.ignored.bias, zeroed.loose],
            )
            with torch.no_grad(), FSDP.summon_full_params(other):
                for param in zeroed.parameters():
                    param.zero_()
            other.load_state_dict(state)
            loaded = other.state_dict()
            for key, value in reference.items():
                assert loaded[key].dtype == value.dtype
                assert torch.equal(loaded[key], value), (kind, key)
            if kind is not StateDictType.LOCAL_STATE_DICT:
                assert list(state) == list(reference)
        state = model.state_dict()
        assert state["ignored.weight"].data_ptr() == plain.ignored.weight.data_ptr()
        assert state["loose"].data_ptr() == plain.loose.data_ptr()
        config = FullStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            kept = model.state_dict()
        assert list(kept) == (list(reference) if dist.get_rank() == 0 else [])
        other.load_state_dict(state if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)


class Awkward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.randn(3, 0))
        self.other_empty = torch.nn.Parameter(torch.randn(0, 2))
        self.packed = torch.nn.Parameter(
            torch.arange(11, dtype=torch.uint8).view(11, 1), requires_grad=False
        )
        self.frozen = torch.nn.Parameter(torch.randn(2, 3).bfloat16(), requires_grad=False)
        self.loose = torch.nn.Parameter(torch.randn(2))
        self.one = torch.nn.Parameter(torch.randn(1))
        self.ignored = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(4))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scalars_empty_packed_frozen_and_ignored_parameters_go_through_every_type(world_size):
    run_kept_ranks(awkward, world_size)


# -- no shard by accident ----------------------------------------------------------------------------------------------


def inside_summon():
    item = ENTRIES["mlp"]
    reference = item.build().state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), "blocks", use_orig_params=orig)
        with FSDP.summon_full_params(model):
            assert all(torch.equal(v, reference[k]) for k, v in model.state_dict().items())
            for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
                with (
                    FSDP.state_dict_type(model, kind),
                    pytest.raises(RuntimeError, match="summon_full_params"),
                ):
                    model.state_dict()
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            for part in (model, model.module, model.module.blocks[0].module.up):
                if dist.get_rank() == 0:
                    part.state_dict()
                else:
                    with pytest.raises(RuntimeError, match="expected the whole parameter"):
                        part.state_dict()
        assert all(torch.equal(v, reference[k]) for k, v in model.state_dict().items())


def test_a_shard_is_never_saved_for_a_parameter_inside_summon():
    run_kept_ranks(inside_summon, 2)


# -- loading -----------------------------------------------------------------------------------------------------------


def wrong_on_one_rank(how):
    """One rank's dict does not fit: every rank raises, naming it, and no rank has changed anything."""
    item = ENTRIES["gpt_tied"]
    before = item.build().state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), "blocks", use_orig_params=orig)
        state = {key: value + 1 for key, value in before.items()}
        if dist.get_rank() == how["rank"]:
            state["norm.weight"] = torch.zeros(9)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state, broadcast_from_rank0=how["broadcast"])
        for part in ("norm.weight", "[9]", "[6]"):
            assert part in str(caught.value)
        after = model.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)
        with pytest.raises(RuntimeError, match=r"norm\.weight"):
            model.module.load_state_dict({**before, "norm.weight": torch.zeros(9)})
        after = model.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(
    "how",
    [
        {"rank": 0, "broadcast": False},
        {"rank": 1, "broadcast": False},
        {"rank": 0, "broadcast": True},
    ],
)
def test_a_wrong_shape_on_one_rank_leaves_the_model_as_it_was_on_all(how):
    run_kept_ranks(wrong_on_one_rank, 2, how)


def wrong_buffer():
    item = ENTRIES[CONV]
    before = item.build().state_dict()
    key = next(key for key in before if key.endswith("running_mean"))
    model = wrap_entry(item, item.build(), "blocks")
    state = {name: value + 1 for name, value in before.items()} | {key: torch.zeros(99)}
    with pytest.raises(RuntimeError, match=key):
        model.load_state_dict(state)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


CONV = next(name for name in ENTRIES if "conv" in name)


def test_a_buffer_of_the_wrong_shape_leaves_the_model_as_it_was():
    run_kept_ranks(wrong_buffer, 2)


def from_rank_zero(name, strategy):
    item = ENTRIES[name]
    source = item.build(seed=5).state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(),
            "blocks",
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        mine = dict(source) if dist.get_rank() == 0 else {}
        result = model.load_state_dict(mine, broadcast_from_rank0=True)
        assert not result.missing_keys
        state = model.state_dict()
        assert all(torch.equal(state[key], source[key]) for key in source)
        key = next(key for key in source if "weight" in key)
        partial = {key: source[key] + 1, "stranger": torch.ones(2)}
        result = model.load_state_dict(
            partial if dist.get_rank() == 0 else None, strict=False, broadcast_from_rank0=True
        )
        assert result.unexpected_keys == ["stranger"]
        fills_in_itself = {name for name in source if name.endswith("num_batches_tracked")}
        assert set(result.missing_keys) | fills_in_itself == (set(source) - {key}) | fills_in_itself
        assert torch.equal(model.state_dict()[key], source[key] + 1)
        with pytest.raises(RuntimeError, match="stranger"):
            model.load_state_dict(
                mine | {"stranger": torch.ones(2)} if mine else {}, broadcast_from_rank0=True
            )


@pytest.mark.parametrize("name", ENTRIES)
def test_every_model_loads_what_only_rank_zero_has(name):
    run_kept_ranks(from_rank_zero, 2, name, "FULL_SHARD") if name != "gpt_tied" else run_kept_ranks(
        from_rank_zero_tied, 2
    )


def from_rank_zero_tied():
    item = ENTRIES["gpt_tied"]
    source = item.build(seed=5).state_dict()
    for orig in EXPOSURES:
        for missing in (None, "emb.weight", "head.weight"):
            model = wrap_entry(item, item.build(), "blocks", use_orig_params=orig)
            mine = {key: value for key, value in source.items() if key != missing}
            model.load_state_dict(
                mine if dist.get_rank() == 0 else {}, strict=False, broadcast_from_rank0=True
            )
            state = model.state_dict()
            assert all(torch.equal(state[key], source[key]) for key in source)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_strategy_loads_what_only_rank_zero_has(world_size, strategy):
    run_kept_ranks(from_rank_zero, world_size, "mlp", strategy)


def without_one(state):
    del state["blocks.0.up.weight"]


UNLIKE_KEYS = {
    "missing": (without_one, "Missing key.*blocks.0.up.weight"),
    "unexpected": (lambda state: state.update(more=torch.ones(2)), "Unexpected key.*more"),
}


def keys_of_one_rank(kind, orig):
    """The last rank's dict has other keys; then all have the same, and it is loaded."""
    model = wrap(build(), use_orig_params=orig)
    with FSDP.state_dict_type(model, StateDictType[kind]):
        source = model.state_dict()
    last = dist.get_rank() == dist.get_world_size() - 1
    for case, (change, told) in UNLIKE_KEYS.items():
        state = dict(source)
        if last:
            change(state)
        lacks_slice = kind == "SHARDED_STATE_DICT" and case == "missing"
        if dist.get_world_size() == 1 or not lacks_slice:
            who = f"rank {dist.get_world_size() - 1}: " if dist.get_world_size() > 1 else ""
            with pytest.raises(CheckpointError, match=f"(?s)^{who}Error.*{told}"):
                model.load_state_dict(state)
            continue
        told = f"rank {dist.get_world_size() - 1}: .* unit 'blocks.0' without 'up.weight'"
        for load in (model.load_state_dict, model.module.load_state_dict):
            with pytest.raises(ShardMismatchError, match=told):
                load(dict(state), strict=False)
    model.load_state_dict(source)
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_keys_that_one_rank_lacks_or_has_more_are_an_error_on_every_rank(world_size, kind, orig):
    run_kept_ranks(keys_of_one_rank, world_size, kind, orig)


def slices_of_rank_zero():
    model = wrap(build())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    with pytest.raises(CheckpointError, match=r"on rank 0: .* are slices \(DTensors\)"):
        model.load_state_dict(state, broadcast_from_rank0=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_slices_can_not_be_taken_from_rank_zero_alone(world_size):
    run_kept_ranks(slices_of_rank_zero, world_size)


def peak_growth(call):
    """By how many bytes the resident memory of this process grows at most during the call."""
    m_mmap_threshold = -3  # large blocks go back to the system when they are freed, as a fixed rule
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 17)
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1])
    call()
    return 1024 * (int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) - before)


def memory(kind):
    side = 1500
    unit = side * side * 4
    plain = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(6)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    reference = model.state_dict()
    source = reference
    if kind == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            source = model.state_dict()
    mine = source if kind == "sharded" or dist.get_rank() == 0 else {}
    broadcast = kind == "broadcast"
    model.load_state_dict(mine, broadcast_from_rank0=broadcast)  # the allocator warms up
    growth = peak_growth(lambda: model.load_state_dict(mine, broadcast_from_rank0=broadcast))
    again = model.state_dict()
    assert all(torch.equal(again[key], reference[key]) for key in reference)
    return growth / unit


@pytest.mark.parametrize("kind", ["broadcast", "sharded"])
def test_loading_costs_at_most_one_unit_of_memory_on_other_ranks(kind):
    first, *others = run_ranks(memory, 3, kind)
    assert all(units <= 1 for units in others), others
    assert first <= 2, first


def full_memory(rank0_only):
    side = 1500
    plain = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(6)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        peak_growth(model.state_dict)  # connections and allocator warm up
        return peak_growth(model.state_dict) / (side * side * 4)


def test_offload_streams_a_unit_at_a_time_from_the_cpu_too():
    first, other = run_ranks(full_memory, 2, True)
    assert other <= 1.1, other  # the unit that is being gathered
    assert first <= 6 + 1.1, first  # and the whole model, where it is kept
