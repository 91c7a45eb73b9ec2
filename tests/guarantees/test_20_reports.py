"""What a user needs to see that wrapping did what they meant, and a warning where it did not."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

from fsdp import FsdpWarning, MixedPrecision
from fsdp import FullyShardedDataParallel as FSDP
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
        assert block.gathered_bytes >= 4 * block.numel
        assert block.sharded_bytes * 2 == block.gathered_bytes
        assert not report.recorded
        for _ in range(2):
            model(batch(0)).sum().backward()
        report = model.explain()
        assert report.recorded
        assert report.gathers == ("<root>", "blocks.0", "blocks.1", "blocks.2")
        text = str(report)
        assert "gathers (as last run): <root> -> blocks.0 -> blocks.1 -> blocks.2" in text
        assert "2 shards x 1 replicas" in text
        assert len(text.splitlines()) == 7


def test_explain_lists_units_bytes_and_the_order_of_gathers():
    run_ranks(explained, 2)


def precision():
    net = build()
    net.blocks[0].bfloat16()
    net.blocks[1].requires_grad_(False)
    net.register_buffer("scale", torch.ones(3))
    policy = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, rules={nn.LayerNorm: torch.float32}
    )
    model = wrap(net, use_orig_params=True, mixed_precision=policy)
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


def test_precision_report_says_in_which_dtype_each_parameter_is_stored_computed_and_reduced():
    run_ranks(precision, 2)


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


def test_a_unit_with_most_of_the_model_is_warned_about_with_candidates():
    first, second = run_ranks(warnings_of, 2, Lopsided, ModuleWrapPolicy({Block}))
    assert len(first) == 1
    assert "unit '<root>'" in first[0]
    assert "Linear" in first[0]
    assert second == []


def test_a_policy_that_wraps_nothing_is_warned_about_with_candidates():
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)
    (first, _) = run_ranks(warnings_of, 2, Net, policy)
    assert "wrapped nothing" in first[0]
    assert "Block (3 x 239 elements)" in first[0]


def test_a_wrapping_that_divides_the_model_is_not_warned_about():
    assert run_ranks(warnings_of, 2, Net, ModuleWrapPolicy({Block})) == [[], []]
    assert run_ranks(warnings_of, 2, Net, None) == [[], []]
