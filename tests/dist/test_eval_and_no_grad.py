"""Evaluation between steps: everything is sharded again, and what was gathered before is never used again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def assert_sharded(model):
    """No unit holds whole parameters."""
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._handles:
            if not handle.aliased:
                held = handle.unsharded.flat.untyped_storage().nbytes()
                assert held == 0, f"unit {wrapper._unit.name!r} holds {held} bytes"


def forward(model, item, index=0):
    return item.loss(model, item.make_batch(dist.get_rank(), index))


def resharded():
    for name in ("gpt_tied", "shared", "lora"):
        item = entry(name)
        for strategy in STRATEGIES:
            for orig in EXPOSURES:
                model = wrap_entry(
                    item,
                    item.build(),
                    sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=orig,
                )
                assert_sharded(model)
                with torch.no_grad():
                    forward(model, item)
                assert_sharded(model)
                with torch.inference_mode():
                    forward(model, item)
                assert_sharded(model)
                model.eval()
                with torch.no_grad():
                    forward(model, item)
                assert_sharded(model)
                model.train()
                forward(model, item).backward()
                assert_sharded(model)
                with model.no_sync():
                    forward(model, item).backward()
                    if strategy != "SHARD_GRAD_OP":
                        assert_sharded(model)
                forward(model, item).backward()
                assert_sharded(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_unit_is_sharded_after_evaluation_and_after_a_backward(world_size):
    run_kept_ranks(resharded, world_size)


def teacher(strategy, mode):
    """An exponential average updated in place from the student between forwards."""
    item = entry("gpt_rope")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    for orig in EXPOSURES:
        settings = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": orig,
        }
        student = wrap_entry(item, item.build(1), **settings)
        mean = wrap_entry(item, item.build(2).requires_grad_(False), **settings)
        dense_student, dense_mean = item.build(1), item.build(2)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        dense_optimizer = torch.optim.SGD(dense_student.parameters(), lr=0.1)
        for step in range(3):
            with context():
                got = forward(mean, item, step)
                want = forward(dense_mean, item, step)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
            optimizer.zero_grad()
            forward(student, item, step).backward()
            optimizer.step()
            dense_optimizer.zero_grad()
            for other in range(world_size):
                (item.loss(dense_student, item.make_batch(other, step)) / world_size).backward()
            dense_optimizer.step()
            with torch.no_grad():
                for pair in (
                    (mean.parameters(), student.parameters()),
                    (dense_mean.parameters(), dense_student.parameters()),
                ):
                    for average, param in zip(*pair, strict=True):
                        average.lerp_(param, 0.5)
        with context():
            got, want = forward(mean, item, 9), forward(dense_mean, item, 9)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert rank < world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_teacher_updated_in_place_is_never_stale(world_size, strategy, mode):
    run_kept_ranks(teacher, world_size, strategy, mode)


def updated_between(strategy):
    """A forward with grad that never gets its backward, then an update, then another forward."""
    item = entry("mlp")
    x, _ = item.make_batch(0, 0)
    for orig in EXPOSURES:
        for train in (True, False):
            model = wrap_entry(
                item,
                item.build(),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
            ).train(train)
            dense = item.build().train(train)
            model(x)  # kept for a backward that never comes
            with torch.no_grad():
                for param in (*model.parameters(), *dense.parameters()):
                    param.mul_(0.5)
            torch.testing.assert_close(model(x), dense(x))
            model.load_state_dict(item.build(seed=3).state_dict())
            torch.testing.assert_close(model(x), item.build(seed=3)(x))
            with FSDP.summon_full_params(model), torch.no_grad():
                model.module.out.weight.zero_()
            changed = item.build(seed=3)
            with torch.no_grad():
                changed.out.weight.zero_()
            torch.testing.assert_close(model(x), changed(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_forward_without_backward_leaves_nothing_stale(strategy, world_size):
    run_kept_ranks(updated_between, world_size, strategy)


def between(strategy):
    """Evaluation between a forward and its backward changes no gradient."""
    item = entry("gpt_tied")

    def script(model, rank):
        loss = item.loss(model, item.make_batch(rank, 0))
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                item.loss(model, item.make_batch(rank, 1))
        loss.backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
        )
        script(model, dist.get_rank())
        assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_between_forward_and_backward_changes_no_gradient(world_size, strategy):
    run_kept_ranks(between, world_size, strategy)


def modes():
    """Batch norm and dropout follow train() and eval(), set on the wrapper or on what is inside."""
    item = entry("conv")
    batch = item.make_batch(0, 0)
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        dense = item.build()
        for _ in range(2):
            item.loss(model, batch)
            item.loss(dense, batch)
        model.eval()
        dense.eval()
        assert not model.module.blocks[0].module.norm.training
        torch.testing.assert_close(item.loss(model, batch), item.loss(dense, batch))
        for name, buffer in dense.named_buffers():
            assert torch.equal(dict(model.named_buffers())[name], buffer), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_modes_and_buffers_follow_the_plain_model(world_size):
    run_kept_ranks(modes, world_size)


def frozen_everywhere():
    """A model without trainable parameters evaluates, and passes gradients on to its input."""
    for name in ("mlp", "odd"):
        item = entry(name)
        for orig in EXPOSURES:
            plain = item.build().requires_grad_(False)
            dense = copy.deepcopy(plain)
            model = wrap_entry(item, plain, use_orig_params=orig)
            x = item.make_batch(dist.get_rank(), 0)[0]
            left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
            model(left).square().sum().backward()
            dense(right).square().sum().backward()
            torch.testing.assert_close(left.grad, right.grad)
            assert_sharded(model)
            with torch.no_grad():
                model(x)
            assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_model_passes_gradients_to_its_input(world_size):
    run_kept_ranks(frozen_everywhere, world_size)
