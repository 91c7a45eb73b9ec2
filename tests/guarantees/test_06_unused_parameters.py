"""Parameters that a step does not use: by no rank, no gradient; by some ranks, the right one or a named error."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import ConfigError, UsageError
from fsdp.runtime import reduction_queue, root
from fsdp.wrap import CustomPolicy
from tests.support.ranks import run_kept_ranks, run_ranks, run_ranks_outcomes
from tests.support.scripts import (
    Block,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


class Branching(nn.Module):
    """Runs its blocks in the order it is told, and each of two heads only if told."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.out = nn.Linear(dim, 3)

    def forward(self, x, order, scaled=False, checkpointed=False):
        x = self.inp(x)
        for index in order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return self.out(x * self.scale if scaled else x)


def run_routes(model, rank, routes, **kwargs):
    """One backward over the blocks that ``routes`` gives this rank."""
    model(batch(rank), routes[rank], scaled=rank == 1, **kwargs).square().sum().backward()


def any_rank(script, **kwargs):
    check_script(script, Branching, allow_unused="any_rank", **kwargs)


ROUTES = {
    "one_rank_skips_a_block": [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]],
    "no_rank_uses_a_block": [[0, 1, 3], [0, 1, 3], [0, 1, 3]],
    "orders_differ": [[0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 3, 2]],
    "blocks_are_repeated": [[0, 0, 1], [2, 3, 2], [1, 1, 1]],
    "a_rank_uses_no_block": [[0, 1, 2, 3], [], [3]],
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("routes", ROUTES)
def test_any_rank_gives_the_gradient_of_the_unsharded_model(routes, strategy, world_size):
    script = functools.partial(run_routes, routes=ROUTES[routes])
    run_kept_ranks(any_rank, world_size, script, sharding_strategy=strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("routes", ["orders_differ", "blocks_are_repeated"])
def test_any_rank_under_activation_checkpointing(routes, world_size):
    script = functools.partial(run_routes, routes=ROUTES[routes], checkpointed=True)
    run_kept_ranks(any_rank, world_size, script)


def two_graphs(model, rank):
    """Two forwards before their backwards, over different blocks, then one that accumulates."""
    first = model(batch(rank, 0), [[0, 1], [2], [3, 3]][rank])
    second = model(batch(rank, 1), [[3], [1, 0], []][rank])
    second.square().sum().backward()
    first.square().sum().backward()
    with torch.no_grad():
        model(batch(rank, 2), [[2], [0, 1], [1, 2, 3]][rank])
    model(batch(rank, 3), [[1], [1, 2], [0]][rank]).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_rank_holds_for_interleaved_graphs_evaluation_and_accumulation(world_size):
    run_kept_ranks(any_rank, world_size, two_graphs)


def changed_since_others_used_them(model, rank):
    """A rank gathers, for others, blocks that it has used before the last change of the parameters."""
    run_routes(model, rank, [[0, 1, 2, 3]] * 3)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    out = model(batch(rank, 1), [[0, 1], [1, 2], [3]][rank])
    with torch.no_grad():
        model(batch(rank, 2), [[0], [], [2, 1]][rank])
    out.square().sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_rank_takes_no_step_for_a_change_between_a_forward_and_its_backward(
    world_size, strategy
):
    run_kept_ranks(any_rank, world_size, changed_since_others_used_them, sharding_strategy=strategy)


def changed_in_between():
    model = wrap(build(Branching), allow_unused="any_rank")
    out = model(batch(dist.get_rank()), [0, 1])
    with torch.no_grad():
        model(batch(dist.get_rank()), [2, 3])
        for param in model.parameters():
            param.mul_(0.9)
    with pytest.raises((UsageError, RuntimeError), match="modified"):
        out.square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_rank_refuses_a_change_between_a_forward_and_its_backward(world_size):
    run_kept_ranks(changed_in_between, world_size)


def accumulating(routes, exposure):
    """no_sync micro-batches over different blocks on each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def dense(model, rank):
        for step, route in enumerate(routes[rank]):
            model(batch(rank, step), route).square().sum().backward()

    expected = dense_grads(build(Branching), dense, world_size)
    model = wrap(build(Branching), allow_unused="any_rank", use_orig_params=exposure)
    for step, route in enumerate(routes[rank][:-1]):
        with model.no_sync():
            model(batch(rank, step), route).square().sum().backward()
    last = len(routes[rank]) - 1
    model(batch(rank, last), routes[rank][last]).square().sum().backward()
    assert_same_gradients(expected, full_grads(model), none_is_zero=not exposure)


@pytest.mark.parametrize("exposure", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_rank_accumulates_without_synchronisation(world_size, exposure):
    routes = [[[0], [1, 2], [3]], [[1], [], [1]], [[2, 0], [2], []]]
    run_kept_ranks(accumulating, world_size, routes, exposure)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=3, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_any_rank_holds_for_any_routes(steps):
    run_kept_ranks(any_rank, 3, functools.partial(run_steps, steps=steps))


def run_steps(model, rank, steps):
    for routes in steps:
        run_routes(model, rank, routes)


def trained(exposure, allow_unused, routes):
    """AdamW with decay on the mean gradient of dense copies, and on the wrapped model: the parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = build(Branching)
    reference = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=0.5)
    model = wrap(build(Branching), use_orig_params=exposure, allow_unused=allow_unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step, route in enumerate(routes):

        def script(net, rank, step=step, route=route):
            net(batch(rank, step), route[rank]).square().sum().backward()

        grads = dense_grads(copy.deepcopy(dense), script, world_size)
        for name, param in dense.named_parameters():
            param.grad = grads[name]
        reference.step()
        optimizer.zero_grad()
        script(model, rank)
        optimizer.step()
    state = model.state_dict()
    for name, param in dense.named_parameters():
        if name == "scale" and not exposure:
            continue  # one flat parameter with the rest of the root: its gradient is zero there, not None
        torch.testing.assert_close(state[name], param.detach(), rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("allow_unused", [None, "any_rank"])
@pytest.mark.parametrize("exposure", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_that_no_rank_uses_is_not_decayed(world_size, exposure, allow_unused):
    routes = [[[0, 2]] * 3, [[0]] * 3, [[2, 1]] * 3]
    run_kept_ranks(trained, world_size, exposure, allow_unused, routes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_original_parameters_a_parameter_that_some_ranks_use_trains_as_in_one_process(
    world_size,
):
    routes = [[[0], [1], []], [[0], [0, 1], [3]], [[], [], []]]
    run_kept_ranks(trained, world_size, True, "any_rank", routes)


def memory_is_given_back(exposure):
    model = wrap(build(Branching), allow_unused="any_rank", use_orig_params=exposure)
    rank = dist.get_rank()
    routes = [[0, 1], [2], [3, 3]]

    def held():
        return [
            handle.unsharded.flat.untyped_storage().size()
            for wrapper in type(model).fsdp_modules(model)
            for handle in wrapper._handles
        ]

    run_routes(model, rank, routes)
    assert not any(held())
    with torch.no_grad():
        model(batch(rank), routes[rank])
    assert not any(held())


@pytest.mark.parametrize("exposure", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])  # alone, the shard is the whole and stays
def test_any_rank_gives_the_memory_back_after_the_backward_and_after_evaluation(
    world_size, exposure
):
    run_kept_ranks(memory_is_given_back, world_size, exposure)


# -- without allow_unused ----------------------------------------------------------------------------------------------


def diverges(steps, limit, linger=4.0, exposure=False):
    """Runs ``steps`` of routes; returns how long the failing one took and its error."""

    os.environ["FSDP_ENTRY_TIMEOUT"] = str(limit)
    rank = dist.get_rank()
    model = wrap(build(Branching), use_orig_params=exposure)
    for routes in steps:
        started = time.monotonic()
        try:
            run_routes(model, rank, routes)
            dist.barrier()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            time.sleep(linger)  # stay, so that the others find out by themselves
            return seconds, type(error).__name__, str(error)
    return None


SAME = [[0, 1, 2]] * 3
WORLDS = pytest.mark.parametrize(
    ("world_size", "exposure"), [(2, False), (3, True)], ids=["2-flat", "3-orig"]
)


def alone(exposure):
    model = wrap(build(Branching), use_orig_params=exposure)
    check = build(Branching)
    for routes in ([[0, 1, 2]], [[2]], [[]], [[3, 0, 0]]):
        for net in (model, check):
            run_routes(net, 0, routes)
    expected = {name: param.grad for name, param in check.named_parameters()}
    assert_same_gradients(expected, full_grads(model), none_is_zero=not exposure)


@pytest.mark.parametrize("exposure", [False, True])
def test_one_rank_alone_may_change_its_route_without_the_flag(exposure):
    run_kept_ranks(alone, 1, exposure)


@pytest.mark.parametrize("exposure", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_in_the_first_iteration_another_unit_is_an_error_at_once_that_names_both(
    world_size, exposure
):
    steps = [[[0, 1, 2], [0, 2, 1], [0, 1, 2]]]
    for seconds, kind, message in run_ranks(diverges, world_size, steps, 30, 0.1, exposure):
        assert seconds < 10
        assert kind == "ShardMismatchError"
        assert "Forward order differs across ranks" in message
        first = "rank 0" if world_size == 2 else "ranks 0, 2"
        assert f"{first}: unit 'blocks.1'" in message
        assert "rank 1: unit 'blocks.2'" in message
        assert "allow_unused='any_rank'" in message


@pytest.mark.parametrize("other", [[0, 2, 1], [0, 2, 3]], ids=["swapped", "another"])
@WORLDS
def test_later_another_unit_is_an_error_within_the_limit_that_says_what_each_rank_waits_for(
    world_size, exposure, other
):
    steps = [SAME, [[0, 1, 2], other, [0, 1, 2]]]
    for seconds, kind, message in run_ranks(
        diverges, world_size, steps, 1.0, exposure=exposure, timeout=30
    ):
        assert 1.0 <= seconds < 8
        assert kind == "ShardMismatchError"
        assert "rank 0 waits for the " in message
        assert "rank 1 waits for the " in message
        assert "'blocks." in message


@WORLDS
def test_a_skipped_unit_is_an_error_that_names_it(world_size, exposure):
    steps = [SAME, [[0, 1, 2], [0, 1], [0, 1, 2]]]
    outcomes = run_ranks(diverges, world_size, steps, 1.0, exposure=exposure, timeout=30)
    for seconds, kind, message in outcomes:
        assert seconds < 8
        assert kind == "ShardMismatchError"
        assert "blocks.2" in message


class SomeParameters(nn.Module):
    """Blocks of which only some ranks use the second matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves() for _ in range(4))

    def forward(self, x, both):
        for block in self.blocks:
            x = block(x, both)
        return x


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)

    def forward(self, x, both):
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if both else x


def partly(exposure, allow_unused, small_bytes=0):
    root._SMALL_BYTES = reduction_queue._SMALL_BYTES = small_bytes
    reduction_queue._BURST_BYTES[True] = small_bytes

    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    rank = dist.get_rank()

    def script(model, rank):
        model(batch(rank), rank == 0).square().sum().backward()

    expected = dense_grads(build(SomeParameters), script, dist.get_world_size())
    model = wrap(
        build(SomeParameters), {Halves}, use_orig_params=exposure, allow_unused=allow_unused
    )
    script(model, rank)
    assert_same_gradients(expected, full_grads(model), none_is_zero=not exposure)


@pytest.mark.parametrize("exposure", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_of_a_unit_that_some_ranks_use_are_right_or_an_error(world_size, exposure):
    run_ranks(partly, world_size, exposure, "any_rank")
    # No reduction waits for another.
    run_ranks(partly, world_size, exposure, None, small_bytes=1 << 20)
    if world_size == 1:
        run_ranks(partly, 1, exposure, None)
        return
    for outcome in run_ranks_outcomes(partly, world_size, exposure, None):
        assert outcome.error_type == "ShardMismatchError", outcome
        assert "blocks.3" in outcome.message


def test_an_unknown_value_is_refused():
    outcome = run_ranks_outcomes(unknown, 1)[0]
    assert outcome.error_type == ConfigError.__name__
    assert "'any_rank'" in outcome.message


def unknown():
    wrap(build(Branching), allow_unused="some")


class Sparing(nn.Module):
    """Leaves a parameter out."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 7)
        self.spare = nn.Linear(7, 7)

    def forward(self, x):
        return self.up(x).tanh()


class TwoKinds(nn.Module):
    """A replicated root around a sharded block; both leave parameters out."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.block = Sparing()
        self.spare = nn.Linear(7, 7)

    def forward(self, x):
        return self.block(self.inp(x))


def of_two_kinds(outer, inner):
    torch.manual_seed(0)
    dense = TwoKinds()
    model = FSDP(
        copy.deepcopy(dense),
        sharding_strategy=outer,
        auto_wrap_policy=CustomPolicy(
            lambda module: {"sharding_strategy": inner} if isinstance(module, Sparing) else False
        ),
        use_orig_params=True,
    )

    def script(net, rank):
        net(batch(rank)).square().sum().backward()

    script(model, dist.get_rank())
    expected = dense_grads(dense, script, dist.get_world_size())
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("outer", "inner"), list(itertools.permutations(STRATEGIES, 2)))
def test_units_of_several_strategies_leave_parameters_out(outer, inner, world_size):
    run_kept_ranks(of_two_kinds, world_size, outer, inner)
