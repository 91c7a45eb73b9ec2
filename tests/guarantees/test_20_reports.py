"""What a user needs to see that wrapping did what they meant, and a warning where it did not."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FsdpWarning, MixedPrecision
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.plan.auto import AutoWrapPolicy
from fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.ranks import run_ranks
from tests.support.scripts import Block, Net, batch, build, wrap


def explained():
    for orig in (False, True):
        model = wrap(build(), use_orig_params=orig)
        report = model.explain()
        assert [unit.name for unit in report.units] == [
            "<root>",
            "blocks.0",
            "blocks.1",
            "blocks.2",
        ]
        assert [unit.kind for unit in report.units] == ["Net", "Block", "Block", "Block"]
        dense = build()
        assert sum(unit.numel for unit in report.units) == sum(
            p.numel() for p in dense.parameters()
        )
        block = report.units[1]
        assert (
            block.numel == block.trainable == sum(p.numel() for p in dense.blocks[0].parameters())
        )
        assert block.parameters == len(list(dense.blocks[0].parameters()))
        if dist.get_world_size() == 1:
            assert block.gathered_bytes == 0  # the shard is the whole
            assert block.sharded_bytes >= 4 * block.numel
        else:
            assert block.gathered_bytes >= 4 * block.numel
            assert block.sharded_bytes * dist.get_world_size() == block.gathered_bytes
        assert not report.recorded
        for _ in range(2):
            model(batch(0)).sum().backward()
        report = model.explain()
        assert report.recorded
        text = str(report)
        if dist.get_world_size() > 1:
            assert report.gathers == ("<root>", "blocks.0", "blocks.1", "blocks.2")
            assert "gathers (as last run): <root> -> blocks.0 -> blocks.1 -> blocks.2" in text
        else:
            assert report.gathers == ()
        assert f"{dist.get_world_size()} shards x 1 replicas" in text
        assert len(text.splitlines()) == 7


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_explain_lists_units_bytes_and_the_order_of_gathers(world_size):
    run_ranks(explained, world_size)


def why_units():
    for orig in (False, True):
        model = FSDP(build(), auto_wrap_policy=AutoWrapPolicy(200), use_orig_params=orig)
        for report in (model.explain(), copy.deepcopy(model).explain()):
            whys = {unit.name: unit.why for unit in report.units}
            assert whys["<root>"] == ""
            assert {whys[f"blocks.{index}"] for index in range(3)} == {"one of 3 Block"}
            header, first = str(report).splitlines()[1:3]
            assert header.endswith("  why")
            assert first.startswith("<root>")
            assert "one of 3 Block" in str(report)


def test_explain_says_why_the_automatic_policy_made_each_unit_one():
    run_ranks(why_units, 2)


def precision(use_orig_params):
    net = build()
    net.blocks[0].bfloat16()
    net.blocks[1].requires_grad_(False)
    net.register_buffer("scale", torch.ones(3))
    policy = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, rules={nn.LayerNorm: torch.float32}
    )
    model = wrap(net, use_orig_params=use_orig_params, mixed_precision=policy)
    report = model.precision_report()
    by_name = {fqn: line for line in report.lines for fqn in line.fqns}
    up = by_name["blocks.2.up.weight"]
    assert (up.stored, up.computed, up.reduced, up.gradient) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert by_name["blocks.2.norm.weight"].computed is torch.float32
    assert by_name["blocks.0.up.weight"].stored is torch.bfloat16
    assert by_name["blocks.1.up.weight"].reduced is None
    assert report.buffers == {torch.float32: ("scale",)}
    low = sum(p.numel() for p in build().blocks[0].parameters())
    assert f"{low:,} of" in str(report)
    assert "frozen" in str(report)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_precision_report_says_in_which_dtype_each_parameter_is_stored_computed_and_reduced(
    world_size, use_orig_params
):
    run_ranks(precision, world_size, use_orig_params)


class Lopsided(Net):
    """Nearly everything is in a layer of its own."""

    def __init__(self):
        super().__init__()
        self.big = nn.Linear(90, 90)


def warnings_of(cls, policy, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(build(cls), auto_wrap_policy=policy, **kwargs)
    return [str(w.message) for w in caught if w.category is FsdpWarning]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_with_most_of_the_model_is_warned_about_with_candidates(world_size, use_orig_params):
    policy, kwargs = ModuleWrapPolicy({Block}), {"use_orig_params": use_orig_params}
    first, *others = run_ranks(warnings_of, world_size, Lopsided, policy, **kwargs)
    if world_size == 1:
        assert first == []  # nothing is gathered, so no unit is too large
        return
    assert len(first) == 1
    assert "unit '<root>'" in first[0]
    assert "Linear" in first[0]
    assert others == [[]] * (world_size - 1)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_policy_that_wraps_nothing_is_warned_about_with_candidates(world_size, use_orig_params):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)
    first = run_ranks(warnings_of, world_size, Net, policy, use_orig_params=use_orig_params)[0]
    if world_size == 1:
        assert first == []
        return
    assert "wrapped nothing" in first[0]
    assert "Block (3 x 239 elements)" in first[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_wrapping_that_divides_the_model_is_not_warned_about(world_size):
    for policy in (ModuleWrapPolicy({Block}), None):
        assert run_ranks(warnings_of, world_size, Net, policy) == [[]] * world_size
