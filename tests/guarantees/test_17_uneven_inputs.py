"""Ranks with different numbers of batches train under ``Join`` as one process does on whoever still has data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes
from tests.support.scripts import batch, build, wrap

COUNTS = {1: [3], 2: [2, 5], 3: [3, 5, 0], 4: [3, 5, 7, 0]}
LR = 0.05


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1)


def loss_of(model, rank, step):
    return model(batch(rank, step)).square().sum()


def dense_run(counts, *, by_all=False, clip=None, accumulate=1):
    """One process: each step sums the gradients of ranks that have data and divides by their number."""
    model = build()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        for rank in active:
            loss_of(model, rank, step).backward()
        if (step + 1) % accumulate:
            continue
        for param in model.parameters():
            param.grad.div_(len(counts) if by_all else len(active))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def joined(
    counts,
    exposure,
    strategy=ShardingStrategy.FULL_SHARD,
    clip=None,
    accumulate=1,
    set_to_none=True,
    evaluate=False,
    **join_options,
):
    rank = dist.get_rank()
    by_all = join_options.get("divide_by_initial_world_size", False)
    expected = dense_run(counts, by_all=by_all, clip=clip, accumulate=accumulate)
    model = wrap(build(), use_orig_params=exposure, sharding_strategy=strategy)
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with Join([model], **join_options):
        for step in range(counts[rank]):
            if (step + 1) % accumulate:
                with model.no_sync():
                    loss_of(model, rank, step).backward()
                continue
            loss_of(model, rank, step).backward()
            if clip is not None:
                model.clip_grad_norm_(clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            if evaluate:
                with torch.no_grad():
                    model(batch(rank, 100 + step))
    compare(expected, model)
    # After the context ranks are together again, and everything works as before it.
    after = loss_of(model, rank, 50)
    after.backward()
    optimizer.zero_grad()


def compare(expected, model):
    state = model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=3e-4, atol=3e-5, msg=name)


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])
EXPOSURES = pytest.mark.parametrize("exposure", [False, True])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@EXPOSURES
def test_training_divides_by_the_ranks_that_still_have_data(exposure, world_size):
    run_kept_ranks(joined, world_size, COUNTS[world_size], exposure)


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@EXPOSURES
@WORLDS
def test_under_every_strategy(world_size, exposure, strategy):
    run_kept_ranks(joined, world_size, COUNTS[world_size], exposure, strategy)


@EXPOSURES
@WORLDS
def test_as_an_option_it_divides_by_all_ranks(world_size, exposure):
    counts = COUNTS[world_size]
    run_kept_ranks(joined, world_size, counts, exposure, divide_by_initial_world_size=True)


@EXPOSURES
@WORLDS
def test_gradients_are_clipped_by_the_norm_over_all_ranks(world_size, exposure):
    run_kept_ranks(joined, world_size, COUNTS[world_size], exposure, clip=0.5)


@EXPOSURES
@WORLDS
def test_evaluation_and_zeroed_gradients_in_between(world_size, exposure):
    counts = COUNTS[world_size]
    run_kept_ranks(joined, world_size, counts, exposure, evaluate=True, set_to_none=False)


@EXPOSURES
@WORLDS
def test_micro_batches_accumulate(world_size, exposure):
    counts = [2, 6, 0][:world_size]
    run_kept_ranks(joined, world_size, counts, exposure, accumulate=2, clip=1.0)


def evaluates(counts, exposure):
    """Only forwards without gradients; every rank sees the values of the whole model."""
    rank = dist.get_rank()
    model = wrap(build(), use_orig_params=exposure)
    with Join([model]), torch.no_grad():
        for step in range(counts[rank]):
            out = model(batch(rank, step))
            torch.testing.assert_close(out, build()(batch(rank, step)))


@EXPOSURES
@WORLDS
def test_evaluation_of_uneven_sets(world_size, exposure):
    run_kept_ranks(evaluates, world_size, [0, 4, 1][:world_size], exposure)


def named_optimizers():
    """Two optimizers over parts of the model; the rank without data learns which was stepped."""
    rank = dist.get_rank()
    dense = build()
    model = wrap(build(), use_orig_params=True)

    def split(net):
        blocks = [param for name, param in net.named_parameters() if "blocks" in name]
        others = [param for name, param in net.named_parameters() if "blocks" not in name]
        return torch.optim.SGD(blocks, lr=0.1), torch.optim.Adam(others, lr=0.01)

    last = dist.get_world_size() - 1  # the one with data
    reference = split(dense)
    for step in range(3):
        loss_of(dense, last, step).backward()
        for optimizer in reference[: 1 + step % 2]:
            optimizer.step()
        dense.zero_grad()
    optimizers = split(model)
    with Join([model], optimizers=optimizers):
        for step in range(3 if rank == last else 0):
            loss_of(model, last, step).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
            model.zero_grad()
    compare({name: param.detach() for name, param in dense.named_parameters()}, model)


@WORLDS
def test_several_optimizers_are_stepped_where_the_others_step_them(world_size):
    run_kept_ranks(named_optimizers, world_size)


def resumes_unevenly(exposure):
    """Optimizer state saved after an uneven run equals the dense optimizer's."""
    rank = dist.get_rank()
    model = wrap(build(), use_orig_params=exposure)
    optimizer = make_optimizer(model.parameters())
    with Join([model]):
        for step in range(rank + 1):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = FSDP.optim_state_dict(model, optimizer)
    steps = {float(entry["step"]) for entry in state["state"].values()}
    assert steps == {float(dist.get_world_size())}


@EXPOSURES
@WORLDS
def test_optimizer_state_advances_on_ranks_without_data(world_size, exposure):
    run_kept_ranks(resumes_unevenly, world_size, exposure)


def early_termination(exposure):
    model = wrap(build(), use_orig_params=exposure)

    def train():
        with Join([model], throw_on_early_termination=True):
            for step in range(2 + dist.get_rank()):
                loss_of(model, dist.get_rank(), step).backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


@EXPOSURES
@pytest.mark.parametrize("world_size", [2, 3])  # alone there is nobody to be ended by
def test_on_demand_the_first_rank_without_data_ends_all(world_size, exposure):
    run_kept_ranks(early_termination, world_size, exposure)


def disabled(exposure):
    rank = dist.get_rank()
    model = wrap(build(), use_orig_params=exposure)
    other = copy.deepcopy(model)
    with Join([model], enable=False):
        loss_of(model, rank, 0).backward()
    loss_of(other, rank, 0).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None) is (not ours.numel())
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    assert not model._unit.root.lockstep.on


@EXPOSURES
@WORLDS
def test_a_disabled_context_changes_nothing(world_size, exposure):
    run_kept_ranks(disabled, world_size, exposure)


def hybrid(exposure):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    counts = [1, 3, 0, 2]
    rank = dist.get_rank()
    expected = dense_run(counts)
    model = wrap(
        build(),
        use_orig_params=exposure,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
    )
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with Join([model]):
        for step in range(counts[rank]):
            loss_of(model, rank, step).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    compare(expected, model)


@EXPOSURES
def test_hybrid_sharding(exposure):
    run_kept_ranks(hybrid, 4, exposure)


def two_graphs(exposure):
    model = wrap(build(), use_orig_params=exposure)
    with Join([model]):
        first = loss_of(model, 0, 0)
        second = loss_of(model, 0, 1)
        second.backward()
        first.backward()


def inner(exposure):
    with Join([wrap(build(), use_orig_params=exposure).module.blocks[0]]):
        pass


@EXPOSURES
@WORLDS
def test_what_ranks_without_data_can_not_follow_is_refused(world_size, exposure):
    """By one rank alone too: what it runs must run with more."""
    for outcome in run_ranks_outcomes(two_graphs, world_size, exposure):
        assert outcome.error_type == "UnsupportedError"
        assert "one backward" in outcome.message
    for outcome in run_ranks_outcomes(inner, world_size, exposure):
        assert outcome.error_type == "UsageError"
        assert "root" in outcome.message
