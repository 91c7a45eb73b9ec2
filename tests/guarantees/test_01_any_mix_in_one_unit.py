"""Any mix of dtypes, ``requires_grad``, shapes and strides in one unit: one gather, and costs of the trained part only.

Training of such models equals the dense one in ``tests/parity/test_training.py`` (``lora``, ``odd``, ``conv``).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.dist.test_engine_features import record
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, full_params, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

MIXED = ("lora", "odd", "conv")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def mixed(name, strategy):
    item = entry(name)

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in (False, True):
        for wrapping in ("root", "blocks"):
            model = wrap_entry(
                item,
                item.build(),
                wrapping,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))
            strides = {key: p.stride() for key, p in item.build().named_parameters()}
            with FSDP.summon_full_params(model):
                dense = [p for p in model.parameters() if p.dim() == 4]
                assert all(p.is_contiguous(memory_format=torch.channels_last) for p in dense), (
                    strides
                )
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)
            frozen = {k: v for k, v in full_params(model).items() if expected[k] is None}
            assert all(
                torch.equal(v, dict(item.build().named_parameters())[k]) for k, v in frozen.items()
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_the_dense_model(world_size, name, strategy):
    run_kept_ranks(mixed, world_size, name, strategy)


def counted(orig):
    item = entry("lora")
    model = wrap_entry(item, item.build(), use_orig_params=orig)
    events = record(model)
    for _ in range(2):
        events.clear()
        item.loss(model, item.make_batch(0, 0)).backward()
    trained = sum(p.numel() for p in item.build().blocks[0].parameters() if p.requires_grad)
    grads = [p.grad for p in model.module.blocks[0].parameters() if p.grad is not None]
    held = torch.tensor(sum(grad.numel() for grad in grads))
    dist.all_reduce(held)
    assert {grad.dtype for grad in grads} <= {torch.float32}
    return [event for event in events if event.unit == "blocks.0"], trained, int(held)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixed_unit_has_one_gather_a_use_and_one_reduction(world_size, orig):
    """Alone, nothing is communicated: the shard is the whole."""
    for events, _, _ in run_kept_ranks(counted, world_size, orig):
        ops = [event.op for event in events]
        assert ops.count("all_gather") == (2 if world_size > 1 else 0)
        assert ops.count("reduce_scatter") == (1 if world_size > 1 else 0)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_reductions_are_of_the_trained_part_and_frozen_parameters_stay_low(
    world_size, orig
):
    padding = 64 * world_size
    for events, trained, held in run_kept_ranks(counted, world_size, orig):
        assert trained <= held <= trained + padding
        for event in events:
            if event.op == "reduce_scatter":
                assert event.dtypes == ("float32",)
                assert trained <= sum(event.numels) <= trained + padding
            else:
                assert sorted(event.dtypes) == ["bfloat16", "float32", "uint8"]


class Frozen(nn.Module):
    """A frozen unit between trained layers."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.base(self.inp(x)))


def frozen_units(orig):
    plain = Frozen()
    inner = plain.base
    model = FSDP(
        plain,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module is inner,
        use_orig_params=orig,
    )
    events = record(model)
    model(torch.ones(2, 5)).sum().backward()
    return [event.op for event in events if event.unit == "base"]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_unit_is_never_reduced(world_size, orig):
    for ops in run_kept_ranks(frozen_units, world_size, orig):
        assert ("all_gather" in ops) is (world_size > 1)
        assert "reduce_scatter" not in ops
