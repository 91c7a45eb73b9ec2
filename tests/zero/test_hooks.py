"""Steps inside DDP's gradient hook, and gradients reduced to their owners.  Oracle: plain optimizer, dense model."""

from __future__ import annotations

import contextlib
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp.optim import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.zero.support import (
    BATCH,
    assert_same_everywhere,
    assert_same_parameters,
    bytes_sent,
    make_batch,
    make_model,
    make_pair,
    own_part,
    train,
)

HOOKS = {
    "after": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
LAYOUTS = {
    "plain": {},
    "views": {"parameters_as_bucket_view": True},
    "element": {"partition": "element"},
}
SMALL = {"bucket_cap_mb": 0.0001}  # several buckets for a small model


def overlapped(kind, layout, ddp, optimizer, options):
    pair = make_pair(
        getattr(torch.optim, optimizer),
        ddp={**SMALL, **ddp},
        overlap_with_ddp=True,
        **LAYOUTS[layout],
        **options,
    )
    wrapped, zero, dense, plain = pair
    wrapped.register_comm_hook(None, HOOKS[kind](allreduce_hook, wrapped, zero))
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.7)
    other = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)

    def check(iteration):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # schedulers warn if they think that no step came first
            scheduler.step()
        other.step()
        assert_same_parameters(wrapped, dense)

    train(*pair, range(5), check)
    torch.testing.assert_close(
        zero.state_dict(consolidate=True)["state"],
        plain.state_dict()["state"],
        rtol=1e-4,
        atol=1e-5,
    )
    zero.load_state_dict(plain.state_dict())
    train(*pair, range(5, 7), lambda iteration: assert_same_parameters(wrapped, dense))


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ddp",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_every_backward_from_the_first_on_steps_like_the_plain_optimizer(kind, layout, ddp):
    run_ranks(overlapped, 2, kind, layout, ddp, "AdamW", {"lr": 0.02})


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "foreach": True}),
        ("Adam", {"lr": 0.02, "fused": True}),
        ("Adafactor", {"lr": 0.02}),
        ("NAdam", {"lr": 0.02}),
    ],
    ids=str,
)
def test_any_optimizer_steps_bucket_by_bucket(kind, optimizer, options):
    run_ranks(overlapped, 3, kind, "plain", {}, optimizer, options)


class Branches(nn.Module):
    """One branch of two per iteration; a third is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x, index):
        return self.branches[index](x)


def unused(kind):
    wrapped = DDP(Branches(), find_unused_parameters=True, **SMALL)
    dense = Branches()
    options = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}
    groups = lambda model: [  # noqa: E731
        {"params": list(branch.parameters()), "lr": 0.1 * (1 + index)}
        for index, branch in enumerate(model.branches)
    ]
    zero = ZeroRedundancyOptimizer(
        groups(wrapped.module), torch.optim.SGD, overlap_with_ddp=True, **options
    )
    plain = torch.optim.SGD(groups(dense), **options)
    wrapped.register_comm_hook(None, HOOKS[kind](allreduce_hook, wrapped, zero))
    world = dist.get_world_size()
    for iteration in range(4):
        batch = make_batch(iteration, world)
        # In iteration 1 each rank takes another branch.
        choice = [rank % 2 if iteration == 1 else iteration % 2 for rank in range(world)]
        zero.zero_grad()
        plain.zero_grad()
        wrapped(own_part(batch), choice[dist.get_rank()]).square().mean().backward()
        for rank in range(world):
            part = batch[rank * BATCH : (rank + 1) * BATCH]
            (dense(part, choice[rank]).square().mean() / world).backward()
        plain.step()
        for ours, theirs in zip(wrapped.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_parameter_that_no_rank_used_is_not_stepped_and_groups_keep_their_settings(kind):
    run_kept_ranks(unused, 2, kind)


def accumulating(kind):
    wrapped, zero, dense, plain = make_pair(
        torch.optim.AdamW, ddp=SMALL, overlap_with_ddp=True, lr=0.02
    )
    wrapped.register_comm_hook(None, HOOKS[kind](allreduce_hook, wrapped, zero))
    for iteration in range(4):
        zero.zero_grad()
        plain.zero_grad()
        for micro in range(2):
            batch = make_batch(2 * iteration + micro, dist.get_world_size())
            with wrapped.no_sync() if micro == 0 else contextlib.nullcontext():
                wrapped(own_part(batch)).square().mean().backward()
            dense(batch).square().mean().backward()
        plain.step()
        assert_same_parameters(wrapped, dense)


@pytest.mark.parametrize("kind", HOOKS)
def test_gradients_accumulated_without_synchronisation_count(kind):
    run_kept_ranks(accumulating, 2, kind)


def compressed(kind):
    wrapped, zero, _, _ = make_pair(torch.optim.SGD, ddp=SMALL, overlap_with_ddp=True, lr=0.1)
    wrapped.register_comm_hook(dist.group.WORLD, HOOKS[kind](fp16_compress_hook, wrapped, zero))
    reference = DDP(make_model(), **SMALL)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    for iteration in range(3):
        batch = own_part(make_batch(iteration, dist.get_world_size()))
        for model, optimizer in ((wrapped, zero), (reference, plain)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
        plain.step()
        for ours, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_compresses_gives_what_ddp_gives_with_it(kind):
    run_kept_ranks(compressed, 2, kind)


def uneven_speed():
    wrapped, zero, dense, plain = make_pair(
        torch.optim.AdamW, ddp=SMALL, overlap_with_ddp=True, lr=0.02
    )

    def slow_hook(state, bucket):
        if (bucket.index() + dist.get_rank()) % 2:
            time.sleep(0.01)
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook_with_zero_step_interleaved(slow_hook, wrapped, zero))
    train(wrapped, zero, dense, plain, range(6), lambda _: assert_same_parameters(wrapped, dense))


def test_ranks_whose_buckets_finish_in_different_orders_still_agree():
    run_kept_ranks(uneven_speed, 3)


def interrupted(kind):
    wrapped, zero, dense, _ = make_pair(torch.optim.SGD, ddp=SMALL, overlap_with_ddp=True, lr=0.02)
    raised = []

    def failing_hook(state, bucket):
        if not raised:
            raised.append(True)
            raise ZeroDivisionError("in the hook")
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, HOOKS[kind](failing_hook, wrapped, zero))
    with pytest.raises(Exception, match="in the hook"):
        wrapped(own_part(make_batch(0, 2))).sum().backward()
    assert all(
        param.grad is None or param.grad.shape == param.shape for param in dense.parameters()
    )
    held = [param for group in zero.optim.param_groups for param in group["params"]]
    assert len(held) == len(zero._partition_parameters()[zero.rank][0]["params"])


@pytest.mark.parametrize("kind", HOOKS)
def test_an_exception_in_the_hook_surfaces_and_leaves_the_optimizer_whole(kind):
    run_kept_ranks(interrupted, 2, kind)


def subgroup(kind):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    wrapped = DDP(make_model(), process_group=group, **SMALL)
    dense = make_model()
    zero = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, process_group=group, overlap_with_ddp=True
    )
    plain = torch.optim.Adam(dense.parameters())

    def hook(state, bucket):
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(group, HOOKS[kind](hook, wrapped, zero))
    for iteration in range(4):
        batch = make_batch(iteration, 2)
        zero.zero_grad()
        plain.zero_grad()
        part = batch[zero.rank * BATCH : (zero.rank + 1) * BATCH]
        wrapped(part).square().mean().backward()
        dense(batch).square().mean().backward()
        plain.step()
        assert_same_parameters(wrapped, dense)


@pytest.mark.parametrize("kind", HOOKS)
def test_overlap_in_a_group_that_is_not_the_default_one(kind):
    run_kept_ranks(subgroup, 3, kind)


def reduced(layout, ddp, in_forward):
    pair = make_pair(torch.optim.AdamW, ddp={**SMALL, **ddp}, lr=0.02, **LAYOUTS[layout])
    wrapped, zero, dense, _ = pair
    hook = reduce_scatter_hook(wrapped, zero, gather_in_forward=in_forward)
    wrapped.register_comm_hook(None, hook)

    def check(iteration):
        if iteration == 2:
            for ours, theirs in zip(
                wrapped.module.state_dict().values(), dense.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    train(*pair, range(5), check)
    zero.wait_for_parameters()
    assert_same_parameters(wrapped, dense)
    assert_same_everywhere(wrapped.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize("in_forward", [False, True])
def test_gradients_reduced_to_owners_give_the_same_parameters(layout, ddp, in_forward):
    run_kept_ranks(reduced, 3, layout, ddp, in_forward)


def clipped(hooked):
    wrapped, zero, dense, plain = make_pair(torch.optim.SGD, ddp=SMALL, lr=0.5)
    if hooked:
        wrapped.register_comm_hook(None, reduce_scatter_hook(wrapped, zero))
    for order in (2.0, 1.0, float("inf")):
        batch = make_batch(0, dist.get_world_size())
        for model, optimizer, part in ((wrapped, zero, own_part(batch)), (dense, plain, batch)):
            optimizer.zero_grad()
            model(part).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.1, order)
        torch.testing.assert_close(zero.clip_grad_norm_(0.1, order), expected)
        zero.step()
        plain.step()
        assert_same_parameters(wrapped, dense)


@pytest.mark.parametrize("hooked", [False, True])
def test_the_norm_counts_every_element_once(hooked):
    run_kept_ranks(clipped, 3, hooked)


def partly_held():
    model = DDP(make_model(), **SMALL)
    dense = make_model()
    inner, head = list(model.parameters())[:4], list(model.parameters())[4:]
    zero = ZeroRedundancyOptimizer(inner, torch.optim.SGD, lr=0.1)
    model.register_comm_hook(None, reduce_scatter_hook(model, zero))
    others = torch.optim.SGD(head, lr=0.1)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    for iteration in range(3):
        batch = make_batch(iteration, dist.get_world_size())
        for optimizer in (zero, others, plain):
            optimizer.zero_grad()
        model(own_part(batch)).square().mean().backward()
        dense(batch).square().mean().backward()
        for optimizer in (zero, others, plain):
            optimizer.step()
        assert_same_parameters(model, dense)


def test_parameters_of_another_optimizer_are_averaged_everywhere():
    run_kept_ranks(partly_held, 2)


def traffic(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))
    wrapped = DDP(model, bucket_cap_mb=1)
    if kind == "ddp":
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped.register_comm_hook(None, allreduce_hook)
    else:
        partition = "element" if kind == "element" else "parameter"
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, lr=0.1, partition=partition
        )
        if kind != "no hook":
            wrapped.register_comm_hook(None, reduce_scatter_hook(wrapped, optimizer))
    sent = []
    for _ in range(3):
        before = bytes_sent()
        wrapped(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        sent.append(bytes_sent() - before)
    return sent[-1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_moves_the_bytes_of_one_all_reduce(world_size):
    sent = {
        kind: sum(run_kept_ranks(traffic, world_size, kind))
        for kind in ("ddp", "no hook", "parameter", "element")
    }
    assert sent["parameter"] < 1.03 * sent["ddp"]
    assert sent["element"] < 1.03 * sent["ddp"]
    assert (
        sent["no hook"] > 1.4 * sent["ddp"]
    )  # what the hook is for: DDP's all-reduce and the parameters
