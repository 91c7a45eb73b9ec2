"""Full state dicts: keys, order, shapes, values and dtypes of the unwrapped model's, before and after steps."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy, StateDictType, checkpoint
from fsdp.errors import CheckpointError
from tests.support.compare import assert_bitwise
from tests.support.models import ENTRIES, entry
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import build, wrap

EXPOSURES = (False, True)


def step(model, item, optimizer=None, index=0):
    item.loss(model, item.make_batch(dist.get_rank(), index)).backward()
    if optimizer is not None:
        optimizer.step()


def round_trip(name, strategy):
    item = ENTRIES[name]
    for orig in EXPOSURES:
        for wrapping in ("root", "blocks"):
            plain = item.build()
            expected = copy.deepcopy(plain.state_dict())
            model = wrap_entry(
                item,
                plain,
                wrapping,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            assert_bitwise(expected, model.state_dict())
            trainable = [param for param in model.parameters() if param.requires_grad]
            optimizer = torch.optim.SGD(trainable, lr=0.1)
            step(model, item, optimizer)
            saved = model.state_dict()
            assert any(not torch.equal(saved[key], expected[key]) for key in expected)
            kept = copy.deepcopy(saved)
            step(model, item, optimizer, 1)
            assert_bitwise(kept, saved)  # what was saved is a copy
            other = wrap_entry(item, item.build(seed=7), wrapping, use_orig_params=not orig)
            result = other.load_state_dict(kept)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert_bitwise(kept, other.state_dict())
            dense = item.build(seed=8)
            dense.load_state_dict(kept)
            dense.eval()
            other.eval()
            batch = item.make_batch(0, 2)
            with torch.no_grad():
                torch.testing.assert_close(item.loss(other, batch), item.loss(dense, batch))


@pytest.mark.parametrize("name", ENTRIES)
def test_every_model_saves_as_the_plain_one_and_loads_anywhere(name):
    run_kept_ranks(round_trip, 2, name, "FULL_SHARD")


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_other_strategies_and_world_sizes_save_and_load(world_size, strategy):
    run_kept_ranks(round_trip, world_size, "gpt_tied", strategy)


def moments():
    """Saving between forward and backward's neighbours: after eval, after no_grad, twice, with gradients present."""
    item = entry("gpt_rope")
    expected = item.build().state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        x = item.make_batch(dist.get_rank(), 0)[:, :-1]
        model.eval()
        model(x)
        assert_bitwise(expected, model.state_dict())
        with torch.no_grad():
            model(x)
            assert_bitwise(expected, model.state_dict())
        with torch.inference_mode():
            model(x)
            assert_bitwise(expected, model.state_dict())
        model.train()
        with model.no_sync():
            step(model, item)
        assert_bitwise(expected, model.state_dict())
        loss = item.loss(model, item.make_batch(dist.get_rank(), 1))
        assert_bitwise(expected, model.state_dict())
        loss.backward()
        assert_bitwise(expected, model.state_dict())
        assert all(param.grad is not None or not param.numel() for param in model.parameters())


def test_saving_at_any_moment_gives_the_same_and_disturbs_nothing():
    run_kept_ranks(moments, 2)


def strictness():
    item = entry("mlp")
    source = item.build(seed=4).state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        partial = {key: value for key, value in source.items() if key != "blocks.1.up.weight"}
        partial["blocks.1.up.weigth"] = source["blocks.1.up.weight"]
        for args, kwargs in (((), {}), ((), {"strict": True}), ((True,), {})):
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(partial, *args, **kwargs)
            text = str(caught.value)
            assert '"blocks.1.up.weight"' in text
            assert '"blocks.1.up.weigth"' in text
            assert "_fsdp" not in text
            assert "flat_param" not in text
        for result in (
            model.load_state_dict(partial, strict=False),
            model.load_state_dict(partial, False),
        ):
            assert result.missing_keys == ["blocks.1.up.weight"]
            assert result.unexpected_keys == ["blocks.1.up.weigth"]
        state = model.state_dict()
        old = item.build().state_dict()
        for key, value in state.items():
            source_of = old if key == "blocks.1.up.weight" else source
            assert torch.equal(value, source_of[key]), key
        wrong = {key: value.clone() + 1 for key, value in source.items()}
        wrong["blocks.2.down.weight"] = torch.zeros(15, 7)
        with pytest.raises(CheckpointError, match=r"blocks\.2\.down\.weight"):
            model.load_state_dict(wrong, strict=False)
        assert_bitwise(dict(state), dict(model.state_dict()))
        with pytest.raises((TypeError, CheckpointError)):
            model.load_state_dict({**source, "inp.weight": "text"})
        with pytest.raises((TypeError, RuntimeError)):
            model.load_state_dict(3)
        model.load_state_dict(source)
        assert_bitwise(dict(source), dict(model.state_dict()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_strict_is_honoured_by_keyword_and_position_and_messages_are_clean(world_size):
    run_kept_ranks(strictness, world_size)


def elsewhere():
    """Through the wrapper, its module, containers, units and layers inside it, and a plain module around it."""
    item = entry("mlp")
    source = item.build(seed=4).state_dict()

    def part(prefix):
        return {k.removeprefix(prefix): v for k, v in source.items() if k.startswith(prefix)}

    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        model.module.blocks[1].load_state_dict(part("blocks.1."))
        assert_bitwise(part("blocks.1."), dict(model.module.blocks[1].state_dict()))
        assert torch.equal(model.state_dict()["blocks.1.up.weight"], source["blocks.1.up.weight"])
        assert not torch.equal(
            model.state_dict()["blocks.0.up.weight"], source["blocks.0.up.weight"]
        )
        model.module.load_state_dict(source)
        assert_bitwise(dict(source), dict(model.state_dict()))
        outer = nn.ModuleDict({"m": model, "extra": nn.Linear(2, 2)})
        state = outer.state_dict()
        assert list(state) == [*(f"m.{key}" for key in source), "extra.weight", "extra.bias"]
        outer.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
        assert not any(value.any() for value in model.state_dict().values())
        inner = model.module.blocks[0].module
        assert list(inner.up.state_dict()) == ["weight", "bias"]
        assert inner.up.state_dict()["weight"].shape == (15, 7)
        assert list(model.state_dict(prefix="net.")) == [f"net.{key}" for key in source]


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_of_parts_and_of_wholes_fit_together(world_size):
    run_kept_ranks(elsewhere, world_size)


def tied():
    """Both names are saved; one is enough to load; two different values are refused, naming both."""
    item = entry("gpt_tied")
    source = item.build(seed=4).state_dict()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        assert {"emb.weight", "head.weight"} <= set(model.state_dict())
        for missing in ("emb.weight", "head.weight"):
            model.load_state_dict(item.build().state_dict())
            one = {key: value for key, value in source.items() if key != missing}
            model.load_state_dict(one)
            state = model.state_dict()
            assert torch.equal(state["emb.weight"], source["emb.weight"])
            assert torch.equal(state["head.weight"], source["emb.weight"])
        with pytest.raises(CheckpointError) as caught:
            model.load_state_dict({**source, "head.weight": source["head.weight"] + 1})
        assert "emb.weight" in str(caught.value)
        assert "head.weight" in str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tied_parameters_load_from_either_name_and_refuse_two_values(world_size):
    run_kept_ranks(tied, world_size)


class Extra(nn.Module):
    """Extra state, a None parameter, a None buffer, an integer buffer, hooks on state dicts."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3, bias=False)
        self.register_parameter("nothing", None)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("scale", torch.full((2,), 1 / 3))
        self.register_buffer("none", None)
        self.note = "start"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, x):
        return self.lin(x) * self.scale.sum()


def extras():
    expected = Extra().state_dict()
    for orig in EXPOSURES:
        plain = nn.Sequential(Extra(), nn.Linear(3, 1))
        names = list(plain.state_dict())
        policy = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = FSDP(plain, auto_wrap_policy={Extra}, use_orig_params=orig, mixed_precision=policy)
        model(torch.ones(2, 3)).sum().backward()
        state = model.state_dict()
        assert list(state) == names
        assert state["0._extra_state"] == {"note": "start"}
        assert state["0.scale"].dtype == torch.float32
        assert state["0.count"].dtype == expected["count"].dtype
        state["0._extra_state"] = {"note": "loaded"}
        state["0.count"] = torch.tensor(9)
        model.load_state_dict(state)
        inner = model.module[0].module
        assert inner.note == "loaded"
        assert inner.count == 9
        assert inner.scale.dtype == torch.bfloat16  # the model computes on as before


def test_extra_state_buffers_and_absent_members_follow_the_rules_of_modules():
    run_kept_ranks(extras, 2)


def hooks():
    """Users' own state-dict hooks on inner modules see whole tensors under clean relative names."""
    item = entry("mlp")
    plain = item.build()
    seen = {}

    def after(module, state, prefix, _metadata):
        seen[prefix] = {key: value.shape for key, value in state.items() if key.startswith(prefix)}

    plain.blocks[0].register_state_dict_post_hook(after) if hasattr(
        plain.blocks[0], "register_state_dict_post_hook"
    ) else plain.blocks[0]._register_state_dict_hook(after)
    model = wrap_entry(item, plain)
    model.state_dict()
    assert any(
        key.endswith("up.weight") and shape == (15, 7)
        for shapes in seen.values()
        for key, shape in shapes.items()
    )


def test_state_dict_hooks_of_users_see_whole_tensors():
    run_kept_ranks(hooks, 2)


def of_kind(model, kind, call):
    with FSDP.state_dict_type(model, kind):
        return call()


def set_before_loading(strategy, folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = dict(build().state_dict())
    for orig in EXPOSURES:
        options = {"use_orig_params": orig, "sharding_strategy": ShardingStrategy[strategy]}
        model = wrap(build(), **options)
        path = f"{folder}/{world_size}-{orig}"
        checkpoint.save(path, model)
        ways = [
            lambda m: m.load_state_dict(whole if rank == 0 else {}, broadcast_from_rank0=True),
            functools.partial(checkpoint.load, path),
        ]
        for kind in StateDictType:
            saved = of_kind(model, kind, lambda m=model: copy.deepcopy(m.state_dict()))
            ways.append(lambda m, k=kind, s=saved: of_kind(m, k, lambda: m.load_state_dict(s)))
        for load in ways:
            for param in model.parameters():
                if orig:
                    param.data = torch.zeros_like(param)
                else:
                    param.detach().zero_()
            load(model)
            assert_bitwise(whole, dict(model.state_dict()))
        if orig:
            inner = model.module.blocks[1].module.up
            inner.weight.data = torch.zeros_like(inner.weight)
            inner.load_state_dict({"weight": torch.ones(15, 7), "bias": torch.ones(15)})
            assert model.state_dict()["blocks.1.up.weight"].eq(1).all()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_loaded_comes_over_values_that_were_set_before(world_size, strategy, tmp_path):
    run_kept_ranks(set_before_loading, world_size, strategy, str(tmp_path))
