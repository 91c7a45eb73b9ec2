"""A failure on one rank ends the wait of the others with an error that says so; slowness never does."""

from __future__ import annotations

import contextlib
import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.watch import Position, find_circle
from fsdp.errors import ShardMismatchError
from tests.support.ranks import run_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)

LIMIT = 2.0


def script(model, rank, step=0):
    model(batch(rank, step)).square().sum().backward()


def fails_on_rank_one(where, guarded, use_orig_params):
    """One good step, then rank 1 raises ``where`` in the step; what others got to see, and after how long."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = str(LIMIT)
    rank = dist.get_rank()
    model = wrap(build(), use_orig_params=use_orig_params)
    guard = model.guard() if guarded else contextlib.nullcontext()
    script(model, rank)
    if rank == 1:
        fail_in(model.module.blocks[1].module, where)
    start = time.monotonic()
    try:
        with guard:
            script(model, rank)
    except (KeyError, RuntimeError) as error:
        seconds = time.monotonic() - start
        time.sleep(2 * LIMIT if rank == 1 else 0)  # alive: nothing but the guard tells the others
        return seconds, type(error).__name__, str(error)
    return None


def fail_in(module, where):
    def fail(*_):
        raise KeyError("on purpose")

    if where == "forward":
        module.register_forward_hook(fail)
    else:
        module.up.register_full_backward_hook(fail)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])  # alone there are no others
def test_within_a_guard_an_exception_on_one_rank_reaches_the_others_in_time(
    world_size, use_orig_params, where
):
    results = run_ranks(fails_on_rank_one, world_size, where, True, use_orig_params)
    assert results.pop(1)[1] == "KeyError"
    for seconds, kind, message in results:
        assert kind == "ShardMismatchError"
        assert seconds < LIMIT
        assert "rank 1 has failed: KeyError: 'on purpose'" in message
        assert "unit 'blocks." in message or "unit '<root>'" in message


def stays_away(use_orig_params):
    """Rank 1 does something else for long, without failing."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = str(LIMIT)
    model = wrap(build(), use_orig_params=use_orig_params)
    script(model, dist.get_rank())
    if dist.get_rank() == 1:
        time.sleep(3 * LIMIT)
        return None
    start = time.monotonic()
    # Of two that wait, the second to give up finds the first one gone as well.
    named = r"ranks \[(0, )?1(, 2)?\] are not waiting"
    with pytest.raises(RuntimeError, match=named) as caught, model.guard():
        script(model, dist.get_rank())
    return time.monotonic() - start, type(caught.value).__name__


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (3, True)])
def test_within_a_guard_a_rank_that_stays_away_is_named_after_the_limit(
    world_size, use_orig_params
):
    results = run_ranks(stays_away, world_size, use_orig_params)
    assert results.pop(1) is None
    for seconds, kind in results:
        assert LIMIT <= seconds < 2.5 * LIMIT
        assert kind == "ShardMismatchError"


def slow(use_orig_params):
    """Rank 1 is late by several limits, without a guard: the step is right, and the others were warned."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = "0.4"
    rank = dist.get_rank()
    expected = dense_grads(build(), script, dist.get_world_size())
    model = wrap(build(), use_orig_params=use_orig_params)
    for _ in range(2):
        model.zero_grad()
        if rank == 1:
            time.sleep(2.0)
        with pytest.warns(UserWarning, match="rank") if rank != 1 else contextlib.nullcontext():
            script(model, rank)
        assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize(("world_size", "use_orig_params"), [(2, False), (3, True)])
def test_without_a_guard_a_slow_rank_is_waited_for_and_warned_about(world_size, use_orig_params):
    run_ranks(slow, world_size, use_orig_params)


def caught_on_every_rank(use_orig_params):
    """All ranks fail in the same place inside a guard, and go on: the next guarded step equals a fresh one."""
    rank = dist.get_rank()
    expected = dense_grads(build(), script, dist.get_world_size())
    model = wrap(build(), use_orig_params=use_orig_params)
    for where in ("up", "down"):
        module = getattr(model.module.blocks[1].module, where)
        handle = module.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), model.guard():
            script(model, rank)
        handle.remove()
        model.zero_grad()
        with model.guard():
            script(model, rank)
        assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_failure_on_every_rank_leaves_guarded_steps_as_good_as_fresh_ones(
    world_size, use_orig_params
):
    run_ranks(caught_on_every_rank, world_size, use_orig_params)


class OutOfMemory(RuntimeError):
    """What an allocator says."""


def too_large_at_first(use_orig_params):
    """A loop that halves its micro-batches until they fit, as trainers do when memory runs out."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap(build(), use_orig_params=use_orig_params)

    def limited(module, args):
        if args[0].shape[0] > 2:
            raise OutOfMemory

    model.module.blocks[1].register_forward_pre_hook(limited)
    rows, tried = 8, []
    while rows not in tried:
        tried.append(rows)
        model.zero_grad()
        try:
            for part in batch(rank, rows=8).split(rows):
                model(part).square().sum().backward()
        except OutOfMemory:
            rows //= 2
    assert tried == [8, 4, 2]
    expected = dense_grads(
        build(), lambda net, who: net(batch(who, rows=8)).square().sum().backward(), world_size
    )
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loop_that_halves_its_micro_batches_until_they_fit(world_size, use_orig_params):
    run_ranks(too_large_at_first, world_size, use_orig_params)


def position(awaited, launched, ranks):
    return Position(awaited, 0, f"the {awaited}", ranks, launched)


def test_a_circle_is_found_only_where_nobody_can_move():
    both = (0, 1)
    stuck = {0: position("a", {"a": 1}, both), 1: position("b", {"b": 1}, both)}
    assert find_circle(stuck, 0) == [0, 1]
    # Rank 1 has launched what rank 0 waits for: the network is slow.
    assert find_circle({**stuck, 1: position("b", {"a": 1, "b": 1}, both)}, 0) is None
    # Rank 1 is not waiting: it computes.
    assert find_circle({0: stuck[0]}, 0) is None
    # Rank 0 waits for rank 1, which waits for rank 2 over another group, and rank 2 computes.
    chain = {0: position("a", {"a": 1}, both), 1: position("c", {"c": 1}, (1, 2))}
    assert find_circle(chain, 0) is None
    # Rank 2 waits for rank 1 in turn: rank 0 is stuck behind their circle.
    assert find_circle({**chain, 2: position("d", {"d": 1}, (1, 2))}, 0) == [1, 2]


def reset_by_hand(use_orig_params):
    rank = dist.get_rank()
    expected = dense_grads(build(), script, dist.get_world_size())
    model = wrap(build(), use_orig_params=use_orig_params)
    model(batch(rank))  # a forward whose backward never comes
    model.reset()
    assert not any(
        handle.unsharded.flat.untyped_storage().size() and dist.get_world_size() > 1
        for wrapper in type(model).fsdp_modules(model)
        for handle in wrapper._handles
    )
    script(model, rank)
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reset_frees_what_a_forgotten_step_has_gathered(world_size, use_orig_params):
    run_ranks(reset_by_hand, world_size, use_orig_params)


def ranks_that_stop_in_a_state_dict(use_orig_params):
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    missing = list(range(1, dist.get_world_size()))
    model = wrap(build(), use_orig_params=use_orig_params)
    if dist.get_rank() == 0 and missing:
        with pytest.raises(
            RuntimeError, match=rf"state_dict.*ranks? {re.escape(str(missing))} did"
        ):
            model.state_dict()
    elif not missing:
        assert list(model.state_dict()) == list(build().state_dict())  # nobody else is needed
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_dict_on_rank_zero_only_names_the_call_and_the_missing_ranks(
    world_size, use_orig_params
):
    run_ranks(ranks_that_stop_in_a_state_dict, world_size, use_orig_params)


def fails_in_different_layers(use_orig_params):
    """The very first forward fails in another layer on each rank; the next one starts together again."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    rank = dist.get_rank()
    expected = dense_grads(build(), script, dist.get_world_size())
    model = wrap(build(), use_orig_params=use_orig_params)
    module = model.module.blocks[rank].module.up
    handle = module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError)), model.guard():
        script(model, rank)
    handle.remove()
    dist.barrier()
    model.zero_grad()
    script(model, rank)
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_first_forward_that_fails_at_different_places_leaves_the_ranks_in_step(
    world_size, use_orig_params
):
    run_ranks(fails_in_different_layers, world_size, use_orig_params)


def other_turns(use_orig_params):
    """Accelerators match collectives by their order alone, so another one may pass; on the CPU it is made up here."""
    rank = dist.get_rank()
    model = wrap(build(), use_orig_params=use_orig_params)
    check = model._unit.root.order_check
    check.on = True

    def swap(*_):
        check.path[-2:] = check.path[:-3:-1]

    handle = model.module.out.register_forward_pre_hook(swap)
    for step in range(3):  # the same order on all ranks, whatever it is, is no error
        if step == 2:
            handle.remove()
        model(batch(rank, step)).sum().backward()
        with torch.no_grad():
            model(batch(rank, step))
            model.module.blocks[1](torch.ones(2, 7))  # an inner unit alone
    if rank == 1:
        model.module.out.register_forward_pre_hook(swap)
    model(batch(rank)).sum().backward()
    with pytest.raises(ShardMismatchError) as caught:
        model(batch(rank))
    return str(caught.value)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_order_of_units_on_one_rank_is_found_by_a_hash_a_step(world_size, use_orig_params):
    for message in run_ranks(other_turns, world_size, use_orig_params, timeout=30):
        others = "rank 0" if world_size == 2 else "ranks 0, 2"
        assert f"{others}: unit 'blocks.1'; rank 1: unit 'blocks.2'" in message
        assert "number 4 of the units" in message  # after the lone inner unit, the root and a block
