"""Construction: meta modules, ``param_init_fn``, ``sync_module_states``, devices; values are right on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import FsdpError
from tests.support.compare import assert_bitwise
from tests.support.models import ENTRIES, RopeTable, entry
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)
# Models all of whose modules know how to initialise themselves.
RESETTABLE = ("mlp", "lstm", "conv", "experts", "gan")


def on_meta(item):
    with torch.device("meta"):
        return item.build()


def by_reset_parameters(name, orig):
    item = ENTRIES[name]
    model = wrap_entry(item, on_meta(item), use_orig_params=orig, sync_module_states=True)
    state = model.state_dict()
    assert list(state) == list(item.build().state_dict())
    for key, value in state.items():
        assert not value.is_meta, key
        assert not value.isnan().any(), key
        if "bias" not in key and "running" not in key and value.dim() > 1:
            assert 0 < value.std() < 3, key
    item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
    return dict(state)


@pytest.mark.parametrize("name", RESETTABLE)
@pytest.mark.parametrize("orig", EXPOSURES, ids=["flat", "orig"])
def test_meta_modules_initialise_themselves_and_ranks_agree(name, orig):
    first, second = run_kept_ranks(by_reset_parameters, 2, name, orig)
    assert_bitwise(first, second)


def by_function():
    """Called once for each module that holds meta tensors, with that module only; tied weights stay tied."""
    item = entry("gpt_tied")
    source = dict(item.build(seed=5).named_parameters())
    for orig in EXPOSURES:
        plain = on_meta(item)
        names = {module: name for name, module in plain.named_modules()}
        called = []

        def init(module, names=names, called=called):
            called.append(names[module])
            module.to_empty(device="cpu", recurse=False)
            for key, param in module.named_parameters(recurse=False):
                name = f"{names[module]}.{key}".lstrip(".")
                with torch.no_grad():
                    param.copy_(source.get(name, source["emb.weight"]))

        model = wrap_entry(item, plain, param_init_fn=init, use_orig_params=orig)
        assert len(called) == len(set(called)), called
        assert_bitwise(dict(item.build(seed=5).state_dict()), dict(model.state_dict()))
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_param_init_fn_is_called_once_a_module_and_decides_the_values(world_size):
    run_kept_ranks(by_function, world_size)


def from_rank_0():
    """The usual way to start a large model: real weights on rank 0 only, meta elsewhere, one broadcast."""
    for name in ("gpt_rope", "conv", "odd", "lora"):
        item = entry(name)
        for orig in EXPOSURES:
            plain = item.build(seed=4) if dist.get_rank() == 0 else on_meta(item)
            model = wrap_entry(item, plain, sync_module_states=True, use_orig_params=orig)
            assert_bitwise(dict(item.build(seed=4).state_dict()), dict(model.state_dict()))
            if name == "gpt_rope":
                expected = RopeTable().angles
                assert torch.equal(model.module.table.angles, expected)
            item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0_alone_may_hold_the_weights(world_size):
    run_kept_ranks(from_rank_0, world_size)


def synchronised(strategy):
    for name in ENTRIES:
        item = ENTRIES[name]
        plain = item.build(seed=10 + dist.get_rank())
        for buffer in plain.buffers():
            if buffer.is_floating_point():
                buffer.add_(dist.get_rank())
        kept = [buffer.clone() for buffer in item.build(seed=10).buffers()]
        model = wrap_entry(
            item, plain, sync_module_states=True, sharding_strategy=ShardingStrategy[strategy]
        )
        expected = dict(item.build(seed=10).state_dict())
        assert_bitwise(expected, dict(model.state_dict()))
        for want, got in zip(kept, model.buffers(), strict=True):
            assert torch.equal(want, got)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sync_module_states_gives_every_rank_the_parameters_and_buffers_of_the_first(
    strategy, world_size
):
    run_kept_ranks(synchronised, world_size, strategy)


def unsynchronised():
    """Without it each rank keeps its own piece of what it had."""
    item = entry("mlp")
    model = wrap_entry(item, item.build(seed=10 + dist.get_rank()))
    ours = dict(item.build(seed=10 + dist.get_rank()).named_parameters())
    with FSDP.summon_full_params(model):
        return [bool((param == ours[name]).any()) for name, param in model.named_parameters()]


def test_without_it_ranks_keep_their_own_values():
    by_rank = run_kept_ranks(unsynchronised, 2)
    assert all(any(flags) for flags in zip(*by_rank, strict=True))


class Forgets(nn.Module):
    """Its ``reset_parameters`` leaves one parameter out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.other = nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return x * self.weight + self.other


class Raises(Forgets):
    """Its ``reset_parameters`` fails."""

    def reset_parameters(self):
        raise KeyError("cannot")


def uninitialised():
    with torch.device("meta"):
        forgets, raises, none = nn.Sequential(Forgets()), nn.Sequential(Raises()), RootParam()
    with pytest.raises(FsdpError, match=r"0\.other") as caught:
        FSDP(forgets)
    assert "0.weight" not in str(caught.value)
    assert "param_init_fn" in str(caught.value)
    with pytest.raises(Exception, match="cannot"):
        FSDP(raises)
    with pytest.raises(FsdpError, match="weight"):
        FSDP(none)
    with torch.device("meta"):
        again = nn.Sequential(Forgets())
    with pytest.raises(ValueError, match="callable"):
        FSDP(again, param_init_fn=3)


class RootParam(nn.Module):
    """No ``reset_parameters`` at all."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_values_that_nothing_initialises_are_an_error_that_names_them():
    run_kept_ranks(uninitialised, 1)


def partly_meta():
    """Only some modules on meta: the others keep their values."""
    item = entry("mlp")
    plain = item.build(seed=2)
    plain.blocks[1].to("meta")
    torch.manual_seed(0)
    model = wrap_entry(item, plain, sync_module_states=True)
    state = model.state_dict()
    expected = item.build(seed=2).state_dict()
    for key, value in state.items():
        assert not value.isnan().any()
        if not key.startswith("blocks.1"):
            assert torch.equal(value, expected[key]), key


def test_modules_that_are_not_on_meta_keep_their_values():
    run_kept_ranks(partly_meta, 2)


class OddBuffers(nn.Linear):
    """Buffers of dtypes that backends do not send, with gaps, transposed, without dimensions."""

    def __init__(self, rank):
        super().__init__(3, 3)
        count = 12 * rank + torch.arange(12).view(3, 4)
        self.register_buffer("transposed", count.t())
        self.register_buffer("every_second", count[:, ::2])
        self.register_buffer("short", count.to(torch.int16).t())
        self.register_buffer("complex", torch.complex(count.float(), -count.float()).t())
        self.register_buffer("flags", count[0] > 1)
        self.register_buffer("steps", torch.tensor(rank, dtype=torch.int16))


def odd_buffers():
    model = FSDP(OddBuffers(dist.get_rank()), sync_module_states=True)
    for name, value in OddBuffers(0).named_buffers():
        got = model.module.get_buffer(name)
        assert torch.equal(got, value), name
        assert got.dtype is value.dtype
        assert got.stride() == value.stride()


def test_buffers_of_any_dtype_and_strides_are_those_of_the_first_rank():
    run_kept_ranks(odd_buffers, 2)


def device():
    item = entry("mlp")
    model = wrap_entry(item, item.build(), device_id=torch.device("cpu"))
    assert model.compute_device == torch.device("cpu")
    for wrong in (1.5, True):
        with pytest.raises(TypeError, match="device_id"):
            wrap_entry(item, item.build(), device_id=wrong)


def test_the_device_is_an_index_or_a_device():
    run_kept_ranks(device, 1)


def memory():
    """The original storages are gone: what remains is the shard."""
    item = entry("mlp")
    for orig in EXPOSURES:
        plain = item.build()
        storages = [param.untyped_storage() for param in plain.parameters()]
        sizes = sum(storage.nbytes() for storage in storages)
        model = wrap_entry(item, plain, use_orig_params=orig)
        held = {
            param.untyped_storage().data_ptr(): param.untyped_storage().nbytes()
            for param in model.parameters()
        }
        assert sum(held.values()) < sizes / 2 + 64 * 4, (sum(held.values()), sizes)


def test_each_rank_keeps_its_shard_only():
    run_kept_ranks(memory, 2)
