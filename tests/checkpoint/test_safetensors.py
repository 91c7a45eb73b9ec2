"""Pretrained files into shards: values of ``nn.Module.load_state_dict``, own bytes only, less memory than a unit."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fsdp.init
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.init import streaming
from fsdp.wrap import ModuleWrapPolicy
from tests.dist.test_state_dict_types import peak_growth
from tests.support.models import ENTRIES
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_ranks

TIED = {"gpt_tied": "head.weight"}


def write(folder, name, files=1, seed=6):
    """The model's state as safetensors, one file or an index of several; a tied parameter under one name."""
    state = ENTRIES[name].build(seed).state_dict()
    state = {key: value.contiguous() for key, value in state.items() if key != TIED.get(name)}
    seen = {}
    for key, value in state.items():  # safetensors refuses shared memory
        state[key] = value.clone() if value.data_ptr() in seen else value
        seen[value.data_ptr()] = key
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    keys = list(state)
    weight_map = {}
    for number in range(files):
        part = {key: state[key] for key in keys[number::files]}
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def loads(path, name, strategy):
    item = ENTRIES[name]
    expected = item.build(6).state_dict()
    for orig in (False, True):
        with torch.device("meta"):
            plain = item.build()
        model = wrap_entry(
            item,
            plain,
            "blocks",
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            param_init_fn=materialize,
        )
        fsdp.init.load_safetensors(model, path)
        state = model.state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def materialize(module):
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.zero_()


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_rope", "conv", "mlp", "odd"])
def test_a_model_built_on_meta_gets_the_values_of_the_files(tmp_path, name):
    run_ranks(
        loads, 2, write(tmp_path, name, files=2 if name == "gpt_tied" else 1), name, "FULL_SHARD"
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_world_size_and_no_shard_load_from_a_folder(tmp_path, world_size):
    write(tmp_path, "gpt_tied", files=3)
    run_ranks(loads, world_size, tmp_path, "gpt_tied", "NO_SHARD")


def counted(path):
    model = wrap_entry(ENTRIES["mlp"], ENTRIES["mlp"].build(), "blocks")
    files = streaming.open_all(path)
    original, streaming.open_all = streaming.open_all, lambda _: files
    fsdp.init.load_safetensors(model, path)
    streaming.open_all = original
    own = sum(
        piece.in_slot.numel * handle.dtype.itemsize
        for unit in model._unit.root.units
        for handle in unit.handles
        for piece in handle.pieces
    )
    return next(iter(files.values())).bytes_read, own


def test_every_rank_reads_the_bytes_of_its_own_pieces_only(tmp_path):
    counts = run_ranks(counted, 3, write(tmp_path, "mlp"))
    assert all(read == own for read, own in counts)
    assert sum(own for _, own in counts) == sum(
        value.nbytes for value in ENTRIES["mlp"].build().state_dict().values()
    )


def memory(path, side):
    with torch.device("meta"):
        plain = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(6)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    growth = peak_growth(lambda: fsdp.init.load_safetensors(model, path))
    return growth / (side * side * 4)


def test_loading_grows_host_memory_by_less_than_the_largest_unit(tmp_path):
    side = 1500
    state = {f"{i}.weight": torch.randn(side, side) for i in range(6)}
    save_file(state, tmp_path / "model.safetensors")
    assert all(units <= 1 for units in run_ranks(memory, 2, tmp_path, side))


def refused(path, what):
    model = wrap_entry(ENTRIES["mlp"], ENTRIES["mlp"].build(), "blocks")
    before = model.state_dict()
    if dist.get_rank() == 0:
        path = path.with_name("broken") if what == "missing on one rank" else path
    with pytest.raises(RuntimeError) as caught:
        fsdp.init.load_safetensors(model, path)
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    return str(caught.value)


def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing(tmp_path):
    state = ENTRIES["mlp"].build(6).state_dict()
    path = tmp_path / "model.safetensors"
    cases = {
        "shape": ({**state, "inp.weight": torch.zeros(2, 2)}, ["inp.weight", "(2, 2)", "(7, 5)"]),
        "missing": ({k: v for k, v in state.items() if k != "out.bias"}, ["missing", "out.bias"]),
        "unexpected": ({**state, "stranger": torch.zeros(1)}, ["unexpected", "stranger"]),
        "missing on one rank": (state, ["rank 0", "broken"]),
    }
    for what, (values, words) in cases.items():
        save_file(values, path)
        for message in run_ranks(refused, 2, path, what):
            assert all(word in message for word in words), (what, message)


@pytest.mark.parametrize("keep", [0, 5, 40, 700])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = write(tmp_path, "mlp")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RuntimeError, match=r"model\.safetensors"):
        streaming.open_all(path)


def renamed(path):
    model = wrap_entry(ENTRIES["mlp"], ENTRIES["mlp"].build(), "blocks")
    found = fsdp.init.load_safetensors(model, path, rename=lambda name: f"net.{name}", strict=False)
    expected = ENTRIES["mlp"].build(6).state_dict()
    state = model.state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected if key != "out.bias")
    return found.missing_keys, found.unexpected_keys


def test_names_can_be_translated_and_the_rest_left_out(tmp_path):
    state = {f"net.{k}": v for k, v in ENTRIES["mlp"].build(6).state_dict().items()}
    state["net.stranger"] = state.pop("net.out.bias")
    save_file(state, tmp_path / "model.safetensors")
    assert run_ranks(renamed, 2, tmp_path) == [(["out.bias"], ["net.stranger"])] * 2
