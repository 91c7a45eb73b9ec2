"""A checkpoint is whole or absent, old ones outlive failures, damage is named, errors reach every rank."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import checkpoint
from fsdp.checkpoint import folder as folders
from fsdp.checkpoint import storage
from fsdp.checkpoint.manifest import MANIFEST, Manifest
from fsdp.cli.main import main
from fsdp.errors import CheckpointError, ConfigError
from tests.checkpoint.support import assert_same, build, step, whole
from tests.support.ranks import run_ranks, run_ranks_outcomes

NAME = "mlp"


def series(parent, steps, keep_last=None, how="save"):
    model, optimizer = build(NAME)
    for index in range(steps):
        step(NAME, model, optimizer, index)
        getattr(checkpoint, how)(
            Path(parent) / f"step-{index}", model, optimizer, {"step": index}, keep_last=keep_last
        )
    if how == "async_save":
        checkpoint.saving.settle()
    return whole(model, optimizer)


def resumed(path):
    model, optimizer = build(NAME, orig=True, seed=9)
    found = checkpoint.load(path, model, optimizer)
    return found.path.name, found.extra["step"], *whole(model, optimizer)


# -- commit ------------------------------------------------------------------------------------------------------------


def dies(parent, moment, rank):
    """The rank dies at a moment of its second save."""
    model, optimizer = build(NAME)
    checkpoint.save(Path(parent) / "step-0", model, optimizer, {"step": 0})
    before = whole(model, optimizer)
    step(NAME, model, optimizer)
    if dist.get_rank() == rank:
        owner, name = MOMENTS[moment]

        def leave(*args, **kwargs):
            os._exit(9)

        setattr(owner, name, leave)
    dist.barrier()
    try:
        checkpoint.save(Path(parent) / "step-1", model, optimizer, {"step": 1})
    except CheckpointError as error:
        return before, str(error)
    return before, None


MOMENTS = {
    "making the folder": (folders.Place, "prepare"),
    "writing": (storage, "write_run"),
    "committing": (folders.Place, "commit"),
    "writing the manifest": (folders.Manifest, "write"),
    "renaming": (Path, "rename"),
}


@pytest.mark.parametrize(("moment", "rank"), [*((name, 0) for name in MOMENTS), ("writing", 1)])
def test_a_rank_that_dies_leaves_the_earlier_checkpoint_and_a_plainly_incomplete_one(
    tmp_path, moment, rank
):
    outcomes = run_ranks_outcomes(dies, 2, tmp_path, moment, rank)
    assert outcomes[rank].exit_code == 9
    survivor = outcomes[1 - rank].value
    assert "step-1" in survivor[1]
    assert not (tmp_path / "step-1").exists()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        folders.find(tmp_path / "step-1")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-0"
    name, at, *state = run_ranks(resumed, 1, tmp_path)[0]
    assert (name, at) == ("step-0", 0)
    assert_same(dict(survivor[0][0]), dict(state[0]))
    run_ranks(series, 1, tmp_path / "again", 1)  # and another save of the name goes through
    shutil.rmtree(tmp_path / "step-0")


def fails(parent, rank, how):
    model, optimizer = build(NAME)
    if dist.get_rank() == rank:

        def full(*args):
            raise OSError(28, "No space left on device")

        storage.write_run = full
    started = time.monotonic()
    path = Path(parent) / "new"
    if how == "async_save":
        checkpoint.async_save(path, model, optimizer)
    with pytest.raises(CheckpointError) as caught:  # the next call
        checkpoint.save(path.with_name("next"), model, optimizer)
    assert time.monotonic() - started < 20
    return str(caught.value)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_not_write_is_named_on_every_rank_and_leaves_nothing(tmp_path, rank, how):
    for message in run_ranks(fails, 2, tmp_path, rank, how):
        assert f"rank {rank}" in message
        assert "No space left" in message
    assert not list(tmp_path.iterdir())


class Stubborn(torch.nn.Linear):
    """Its state can not be had on rank 1."""

    def get_extra_state(self):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("not from me")
        return {}

    def set_extra_state(self, state):
        pass


def fails_before_writing(parent, what):
    started = time.monotonic()
    extra = {"step": lambda: 1} if what == "extra" else {"step": 1}
    model = FSDP(Stubborn(2, 2) if what == "model" else torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if what == "optimizer" and dist.get_rank() == 1:
        optimizer.state.clear()
    with pytest.raises(Exception, match=r"rank|pickle|not from me") as caught:
        checkpoint.save(Path(parent) / "new", model, optimizer, extra)
    assert time.monotonic() - started < 20
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("extra", "lambda"),
        ("model", "not from me"),
        ("optimizer", "ranks differ in what optimizer state"),
    ],
)
def test_what_can_not_be_saved_is_an_error_on_every_rank(tmp_path, what, reason):
    for message in run_ranks(fails_before_writing, 2, tmp_path, what):
        assert reason in message
    assert not list(tmp_path.iterdir())


def twice(parent):
    model, optimizer = build(NAME)
    path = Path(parent) / "last"
    checkpoint.save(path, model, optimizer, {"step": 0})
    with pytest.raises(CheckpointError, match="overwrite=True"):
        checkpoint.save(path, model, optimizer, {"step": 1})
    assert checkpoint.load(path, model).extra == {"step": 0}
    checkpoint.save(path, model, optimizer, {"step": 2}, overwrite=True)
    return checkpoint.load(path, model).extra


def test_a_checkpoint_is_replaced_only_on_request(tmp_path):
    assert run_ranks(twice, 2, tmp_path) == [{"step": 2}] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_what_is_no_checkpoint_is_never_replaced_or_removed(tmp_path):
    model = torch.nn.Linear(1, 1)
    for name in ("home", "data.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / "file.incomplete").write_text("a download")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.save(tmp_path / "home", model, overwrite=True)
    for number in range(3):
        checkpoint.save(tmp_path / f"step-{number}", model, keep_last=1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"home", "data.incomplete", "file.incomplete", "step-2"}
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    run_ranks(series, 1, tmp_path, 1)
    (tmp_path / "step-0").rename(tmp_path / "step-0.replaced")
    assert folders.find(tmp_path / "step-0").name == "step-0.replaced"
    assert checkpoint.latest(tmp_path).name == "step-0.replaced"


# -- retention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_old_checkpoints_go_and_the_newest_stay(tmp_path, how):
    run_ranks(series, 2, tmp_path, 4, keep_last=2, how=how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_what_was_saved_without_keep_last_stays(tmp_path):
    run_ranks(series, 1, tmp_path / "a", 1)
    (tmp_path / "a" / "step-0").rename(tmp_path / "best")
    run_ranks(series, 1, tmp_path, 3, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "best", "step-2"]


def test_a_chosen_part_is_saved_by_name(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    kept = other[1].weight.clone()
    checkpoint.save(tmp_path / "part", model, filter=lambda name: name.startswith("0."))
    checkpoint.load(tmp_path / "part", other)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, kept)


def test_a_damaged_newer_one_does_not_count_as_kept(tmp_path):
    run_ranks(series, 1, tmp_path, 2, keep_last=2)
    newest = tmp_path / "step-1"
    (newest / "rank-00000.bin").write_bytes(b"short")
    place = folders.Place(tmp_path / "step-2", overwrite=False, keep_last=1)
    place._remove_old(1)
    assert (tmp_path / "step-0").exists()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-0"


def test_keep_last_must_keep_one(tmp_path):
    with pytest.raises(ConfigError, match="keep_last is 0"):
        checkpoint.save(tmp_path / "x", torch.nn.Linear(1, 1), keep_last=0)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    parent = tmp_path_factory.mktemp("good")
    run_ranks(series, 2, parent, 1)
    return parent / "step-0"


def load_plain(path):
    """Load everything without ranks; the values come back."""
    from tests.support.models import ENTRIES

    model = ENTRIES[NAME].build(3)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(path, model, optimizer)
    return model.state_dict(), optimizer.state_dict()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damage_is_an_error_that_names_the_file(good, data):
    victim = data.draw(st.sampled_from(sorted(path.name for path in good.iterdir())))
    content = bytearray((good / victim).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "remove", "swap", "zero"]))
    place = data.draw(st.integers(0, len(content) - 1))
    copy = good.with_name("damaged")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(good, copy)
    if kind == "remove":
        (copy / victim).unlink()
    else:
        damaged = bytearray(content)
        if kind == "flip":
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[place:]
        elif kind == "grow":
            damaged += b"x"
        elif kind == "swap":
            damaged[place:] = damaged[place:][::-1]
        else:
            damaged[place : place + 64] = bytes(len(damaged[place : place + 64]))
        if damaged == content:
            return
        (copy / victim).write_bytes(damaged)
    for check in (lambda: load_plain(copy), lambda: checkpoint.verify(copy)):
        with pytest.raises(CheckpointError, match=re.escape(victim)):
            check()


def damaged_for_one(path):
    """One rank's bytes are damaged: every rank raises, and the optimizer is as it was."""
    model, optimizer = build(NAME)
    step(NAME, model, optimizer)
    before = {k: v.clone() for k, v in optimizer.state[next(iter(optimizer.state))].items()}
    with pytest.raises(CheckpointError, match=r"rank-0000\d\.bin"):
        checkpoint.load(path, model, optimizer)
    after = optimizer.state[next(iter(optimizer.state))]
    assert_same(before, dict(after))


def test_damage_that_one_rank_meets_is_an_error_on_every_rank(good, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    path = copy / "rank-00001.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    run_ranks(damaged_for_one, 2, copy)


# -- names and shapes --------------------------------------------------------------------------------------------------


def misfits(path):
    from tests.support.models import ENTRIES

    for name in ("gpt_tied", "odd"):
        model, optimizer = build(name)
        before = model.state_dict()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path, model, optimizer)
        assert "missing" in str(caught.value)
        assert_same(dict(before), dict(model.state_dict()))
    model, _ = build(NAME)
    plain = ENTRIES[NAME].build()
    plain.inp = torch.nn.Linear(5, 8)
    with pytest.raises(CheckpointError, match=r"inp\.weight.*\(7, 5\).*\(8, 5\)"):
        checkpoint.load(path, plain)


def test_other_models_are_refused_by_name_before_anything_is_changed(good):
    run_ranks(misfits, 2, good)


# -- parts of a model --------------------------------------------------------------------------------------------------


def adapters(parent, orig):
    model, optimizer = build("lora", orig=orig)
    step("lora", model, optimizer)
    handles = [handle for unit in model._unit.root.units for handle in unit.handles]
    trainable = {fqn for handle in handles if handle.requires_grad for fqn in handle.fqns}
    bytes_of = {
        fqn: piece.in_slot.numel * handle.dtype.itemsize
        for handle in handles
        for fqn, piece in zip(handle.fqns, handle.pieces, strict=True)
    }
    written = {}
    for kind, kwargs in {"all": {}, "adapters": {"trainable_only": True}}.items():
        checkpoint.save(Path(parent) / kind, model, **kwargs)
        mine = f"rank-{dist.get_rank():05d}.bin"
        written[kind] = sum(
            chunk.stored.nbytes
            for entry in Manifest.read(Path(parent) / kind).tensors.values()
            for chunk in entry.chunks
            if chunk.stored.file == mine
        )
    expected = model.state_dict()
    other, _ = build("lora", seed=4)
    kept = other.state_dict()
    checkpoint.load(Path(parent) / "adapters", other)
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name] if name in trainable else kept[name]), name
    return written, sum(bytes_of[name] for name in trainable)


@pytest.mark.parametrize("orig", [False, True])
def test_trainable_only_writes_and_loads_adapters_alone(tmp_path, orig):
    for written, own in run_ranks(adapters, 2, tmp_path, orig):
        assert written["adapters"] == own < written["all"]


# -- in the background -------------------------------------------------------------------------------------------------


def in_background(parent):
    """What is saved is what was there at the call, whatever happens to the model while the thread writes."""
    model, optimizer = build(NAME)
    step(NAME, model, optimizer)
    release = []
    original = storage.write_run

    def slow(*args):
        while not release:
            time.sleep(0.01)
        return original(*args)

    storage.write_run = slow
    expected = whole(model, optimizer)
    pending = checkpoint.async_save(Path(parent) / "one", model, optimizer)
    assert not pending.done()
    for index in range(3):
        step(NAME, model, optimizer, index)
    release.append(True)
    assert pending.wait() == Path(parent) / "one"
    buffers = checkpoint.saving._BUFFERS[model]
    first = {key: value.data_ptr() for key, value in buffers._buffers.items()}
    checkpoint.async_save(Path(parent) / "two", model, optimizer).wait()
    assert {key: value.data_ptr() for key, value in buffers._buffers.items()} == first
    checkpoint.load(Path(parent) / "one", model, optimizer)
    assert_same(expected, whole(model, optimizer))


def test_a_save_in_the_background_holds_the_values_of_the_call_in_buffers_used_again(tmp_path):
    run_ranks(in_background, 2, tmp_path)


# -- command line ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, "500", "1GB"])
def test_merge_is_the_state_dict_bitwise(tmp_path, size):
    from safetensors.torch import load_file

    state, _ = run_ranks(series, 3, tmp_path, 2)[0]
    out = tmp_path / "out" if size else tmp_path / "model.safetensors"
    arguments = ["checkpoint", "merge", str(tmp_path), "--safetensors", str(out)]
    assert main([*arguments, *(["--max-shard-size", size] if size else [])]) == 0
    files = sorted(out.glob("*.safetensors")) if size else [out]
    merged = {name: value for file in files for name, value in load_file(file).items()}
    assert len(files) == (1 if size != "500" else len(files))
    assert (len(files) > 3) == (size == "500")
    assert_same(dict(sorted(state.items())), dict(sorted(merged.items())))


def test_inspect_and_verify_speak_and_fail_by_exit_status(good, tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(good), "--chunks"]) == 0
    said = capsys.readouterr().out
    assert "saved by 2 ranks" in said
    assert "model/blocks.0.up.weight  float32 [15, 7]" in said
    assert main(["checkpoint", "verify", str(good)]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    (copy / MANIFEST).unlink()
    assert main(["checkpoint", "verify", str(copy)]) == 1
    assert MANIFEST in capsys.readouterr().err


# -- torch's own driver ------------------------------------------------------------------------------------------------


def through_torch(path):
    import torch.distributed.checkpoint as dcp

    from fsdp import FullyShardedDataParallel as FSDP
    from fsdp import StateDictType

    model, _ = build(NAME, seed=8)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        state = {f"model/{name}": value for name, value in sharded.items()}
        dcp.load(state, storage_reader=checkpoint.CheckpointReader(path))
        model.load_state_dict(sharded)
    expected, optimizer = build(NAME, seed=9)
    checkpoint.load(path, expected, optimizer)
    assert_same(dict(expected.state_dict()), dict(model.state_dict()))


def test_torchs_own_load_reads_our_folders(good):
    run_ranks(through_torch, 3, good)


# -- killed ------------------------------------------------------------------------------------------------------------


def test_a_few_rounds_of_the_stress_tool_lose_nothing(capsys):
    from tools.stress_checkpoint import stress

    assert stress(6, seed=3, world_size=2).total() == 6
