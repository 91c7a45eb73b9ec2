"""A save writes what lies in the shards from where it lies; together the boxes are the whole state dicts, bitwise."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy, checkpoint
from fsdp.checkpoint.source import Source
from fsdp.errors import CheckpointError
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.checkpoint.support import assert_same, whole
from tests.dist.test_state_dict_types import peak_growth
from tests.support.ranks import run_ranks

SIDE = 1000


def refuse(*args, **kwargs):
    raise AssertionError("a save moves nothing")


def wide(orig):
    """Six layers, each a unit, and an optimizer with two moments."""
    plain = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(6)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# -- memory and traffic ------------------------------------------------------------------------------------------------


def costs(folder, orig):
    model, optimizer = wide(orig)
    for unit in model._unit.root.units:
        unit.shard.exchange = unit.shard.broadcast = refuse
    checkpoint.save(folder / "warm", model, optimizer)
    return peak_growth(lambda: checkpoint.save(folder / "cold", model, optimizer))


@pytest.mark.parametrize("orig", [False, True])
def test_a_save_moves_nothing_and_needs_no_memory(tmp_path, orig):
    shards = 3 * 6 * SIDE * SIDE * 4 / 2  # parameters and two moments, of one rank
    for growth in run_ranks(costs, 2, tmp_path, orig):
        assert growth < 0.03 * shards


# -- what is written ---------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Every kind of shape: a scalar, one element, none, odd sides, four dimensions in two orders, a large one."""

    def __init__(self, seed=0, length=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.randn(length, 3))
        self.odd = nn.Parameter(torch.randn(3, 1, 5))
        self.rows = nn.Parameter(torch.randn(2, 3, 5, 7))
        last = torch.randn(5, 3, 2, 7).to(memory_format=torch.channels_last)
        self.last = nn.Parameter(last)
        self.turned = nn.Parameter(torch.randn(7, 11).t())
        self.large = nn.Linear(31, 37)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        sums = [p.sum() for name, p in self.named_parameters() if not name.startswith("large")]
        return self.large(x) * (1 + sum(sums))


class Odd(torch.optim.Optimizer):
    """States of other dtypes, of one element, none, and of no tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            state["count"] = torch.tensor(float(state["step"]))
            state["bound"] = torch.tensor([[0.5]])
            state["half"] = (3 * param).bfloat16()
            state["eighth"] = param.detach().clone().to(torch.float8_e4m3fn)
            state["limit"] = torch.tensor(0.5).to(torch.float8_e4m3fn)
            state["sign"] = param.detach() > 0


KINDS = ("adamw", "odd", "whole")


def shapes(strategy, orig, kind="adamw", seed=0):
    """The model, wrapped, and an optimizer without state."""
    kwargs = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    if strategy == "HYBRID_SHARD":
        sizes = (dist.get_world_size() // 2, 2)
        kwargs["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", sizes)
    policy = ModuleWrapPolicy({nn.Linear} if orig else {Shapes})
    plain = Shapes(seed, length=2 if kind == "whole" else 0)  # Adafactor divides by lengths
    model = FSDP(nn.Sequential(plain), auto_wrap_policy=policy, **kwargs)
    makers = {
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "odd": lambda: Odd(model.parameters()),
        "whole": lambda: WholeParamOptimizer(model, torch.optim.Adafactor, lr=0.1),
    }
    return model, makers[kind]()


def as_bytes(value):
    """Its shape, its dtype and its bits, of any dtype."""
    return [*value.shape], str(value.dtype), value.reshape(-1).view(torch.uint8)


def saves(folder, strategy, orig):
    """Save with each optimizer; on the first rank all that was written is what the whole state dicts hold."""
    results = []
    for kind in KINDS:
        model, optimizer = shapes(strategy, orig, kind)
        for number in range(2):
            model(torch.full((2, 31), 1.0 + number)).square().mean().backward()
            optimizer.step()
        checkpoint.save(folder / kind, model, optimizer)
        state, optimizer_state = whole(model, optimizer)
        if dist.get_rank() == 0:
            with Source(folder / kind) as source:
                check_written(source, state, optimizer_state, 2 if "HYBRID" in strategy else 3)
        results.append((dict(state), optimizer_state["state"] if kind != "odd" else None))
    return results


def check_written(source, state, optimizer_state, ranks):
    others = source.value("optimizer")
    assert_same(optimizer_state["param_groups"], others["param_groups"])
    for name, value in state.items():
        assert torch.equal(source.whole(f"model/{name}"), value), name
    for fqn, values in optimizer_state["state"].items():
        for name, value in values.items():
            key = f"optimizer/{name}/{fqn}"
            if key in source.manifest.tensors:
                assert_same(as_bytes(value), as_bytes(source.whole(key)), key)
            else:
                assert not isinstance(value, torch.Tensor) or not value.dim()
                assert_same(value, others["state"][fqn][name], key)
    for key, entry in source.manifest.tensors.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == entry.numel, key
        assert len(entry.chunks) <= ranks * max(1, 2 * len(entry.shape) - 1), key


def loads(folder, orig):
    results = []
    for kind in KINDS:
        model, optimizer = shapes("FULL_SHARD", orig, kind, seed=1)
        checkpoint.load(folder / kind, model, optimizer)
        state, optimizer_state = whole(model, optimizer)
        # torch's optimizers load states in the parameter's dtype.
        results.append((dict(state), optimizer_state["state"] if kind != "odd" else None))
    return results


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("strategy", "ranks", "loaders"),
    [("FULL_SHARD", 3, 2), ("HYBRID_SHARD", 4, 1), ("NO_SHARD", 2, 3)],
)
def test_boxes_of_every_shape_are_the_whole_state(tmp_path, orig, strategy, ranks, loaders):
    expected = run_ranks(saves, ranks, tmp_path, strategy, orig)[0]
    for results in run_ranks(loads, loaders, tmp_path, not orig):
        assert_same(expected, results)


def keeps_masters(path):
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Shapes(), mixed_precision=precision, use_orig_params=True)
    checkpoint.save(path, model)
    if dist.get_rank() == 0:
        with Source(path) as source:
            for name, value in Shapes().state_dict().items():
                assert torch.equal(source.whole(f"model/{name}"), value), name


def test_masters_are_saved_not_what_is_computed_with(tmp_path):
    run_ranks(keeps_masters, 2, tmp_path / "c")


# -- what several ranks hold -------------------------------------------------------------------------------------------


def written_by(path, strategy):
    """Of each layer a rank of a pair holds whole rows and half a row: two boxes, of which one is large."""
    kwargs = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        kwargs["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    plain = nn.Sequential(*(nn.Linear(100, 5, bias=False) for _ in range(8)))
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **kwargs)
    checkpoint.save(path, model)
    nbytes = Counter()
    with Source(path) as source:
        for entry in source.manifest.tensors.values():
            for chunk in entry.chunks:
                nbytes[chunk.stored.file] += chunk.stored.nbytes
    return nbytes


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_ranks_share_the_writing_evenly(tmp_path, strategy):
    nbytes = run_ranks(written_by, 4, tmp_path / "c", strategy)[0]
    assert sum(nbytes.values()) == 8 * 5 * 100 * 4
    assert max(nbytes.values()) <= 1.1 * sum(nbytes.values()) / 4


def divided_by_users(path):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = nn.Module()
    alike, cut = torch.arange(3.0), torch.arange(3.0)
    model.register_parameter("alike", nn.Parameter(distribute_tensor(alike, mesh, [Replicate()])))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.alike.sum().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    with Source(path) as source:
        assert torch.equal(source.whole("model/alike"), model.alike.to_local())
        assert source.whole("optimizer/momentum_buffer/alike").tolist() == [1.0] * 3
    model.register_parameter("cut", nn.Parameter(distribute_tensor(cut, mesh, [Shard(0)])))
    with pytest.raises(CheckpointError, match=r"cut over ranks.*Shard.*'cut'.*Wrap the module"):
        checkpoint.save(path.with_name("d"), model, optimizer)


def test_dtensors_that_no_wrapper_manages_are_refused_by_name_where_ranks_have_parts(tmp_path):
    run_ranks(divided_by_users, 2, tmp_path / "c")
