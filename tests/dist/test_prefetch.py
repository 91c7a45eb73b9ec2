"""Prefetching: what starts when, that it changes no number, and that a changing order costs time only."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import BackwardPrefetch, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm.recording import Recording
from fsdp.runtime import reduction_queue
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks

MODES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


def gradients(name):
    item = entry(name)

    def script(model, rank):
        for step in range(3):
            item.loss(model, item.make_batch(rank, step)).backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for backward, forward, limit, strategy in itertools.product(
        MODES, (False, True), (False, True), ("FULL_SHARD", "SHARD_GRAD_OP")
    ):
        model = wrap_entry(
            item,
            item.build(),
            backward_prefetch=backward,
            forward_prefetch=forward,
            limit_all_gathers=limit,
            sharding_strategy=ShardingStrategy[strategy],
        )
        script(model, dist.get_rank())
        assert_close(expected, full_grads(model), GRADIENTS, none_is_zero=True)


@pytest.mark.parametrize("name", ["mlp", "shared", "experts"])
def test_no_way_of_prefetching_changes_a_gradient(name):
    run_kept_ranks(gradients, 2, name)


def trace(backward, forward, reduced_together=0, strategy="FULL_SHARD"):
    """Launches of the third step, with the forward, backward and end of each block."""
    item = entry("mlp")
    model = wrap_entry(
        item,
        item.build(),
        backward_prefetch=backward,
        forward_prefetch=forward,
        sharding_strategy=ShardingStrategy[strategy],
    )
    reduction_queue._BURST_BYTES[True] = reduced_together
    log: list[str] = []

    class Log(list):
        """Takes events in the place of a list."""

        def append(self, event):
            log.append(f"{event.op} {event.unit}")

    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Recording(unit.shard, unit.name, Log())
        unit.replicate = Recording(unit.replicate, unit.name, Log())
    for index, block in enumerate(model.module.blocks):
        inner = block.module
        inner.up.register_forward_hook(lambda *_, i=index: log.append(f"forward blocks.{i}"))
        inner.up.register_full_backward_hook(lambda *_, i=index: log.append(f"backward blocks.{i}"))
    for step in range(3):
        log.clear()
        item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
    return log


def position(log, text, last=False):
    found = [index for index, line in enumerate(log) if line == text]
    return found[-1 if last else 0]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_next_gather_of_the_backward_starts_where_the_mode_says(mode):
    log = run_ranks(trace, 2, mode, False)[0]
    gather = position(log, "all_gather blocks.1", last=True)
    backward = position(log, "backward blocks.2")
    reduce = position(log, "reduce_scatter blocks.2")
    own_backward = position(log, "backward blocks.1")
    assert gather < own_backward
    assert log.count("all_gather blocks.1") == 2
    if mode is PRE:
        assert gather < backward, log
        assert gather < reduce, log
    if mode is POST:
        assert backward < gather, log
    if mode is None:
        assert reduce < gather, log


def test_gradients_of_parameters_that_are_whole_everywhere_are_reduced_in_the_backward_too():
    log = run_ranks(trace, 2, PRE, False, 0, "NO_SHARD")[0]
    for index in (1, 2):
        reduced = position(log, f"all_reduce blocks.{index}")
        assert position(log, f"backward blocks.{index}") < reduced, log
        assert reduced < position(log, f"backward blocks.{index - 1}"), log


@pytest.mark.parametrize("blocks_together", [1, 2, 3])
def test_small_units_are_reduced_together_when_enough_are_due_or_the_backward_ends(blocks_together):
    item = entry("mlp")
    block = sum(p.numel() * p.element_size() for p in item.build().blocks[0].parameters())
    count = len(item.build().blocks)
    limit = block * blocks_together - 1
    log = run_ranks(trace, 2, PRE, False, limit)[0]
    reductions = [f"reduce_scatter blocks.{i}" for i in reversed(range(count))]
    assert [line for line in log if line.startswith("reduce_scatter blocks")] == reductions
    for number, line in enumerate(reductions):
        last_of_burst = number - number % blocks_together + blocks_together - 1
        begins = position(log, f"backward blocks.{max(0, count - 1 - last_of_burst)}")
        assert log.index(line) > begins, log
        after = count - 2 - last_of_burst
        if after >= 0:
            assert log.index(line) < position(log, f"backward blocks.{after}"), log


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_unit_is_gathered_while_the_current_one_computes(ahead):
    """On an accelerator the host runs ahead; on the CPU the gather is started early whether asked for or not."""
    log = run_ranks(trace, 2, PRE, ahead)[0]
    assert position(log, "all_gather blocks.1") < position(log, "forward blocks.0"), log
    assert log.count("all_gather blocks.0") == 2


class Logged:
    """Collectives that log when a gather starts, and when it is waited for."""

    def __init__(self, inner, name, log):
        self._inner = inner
        self._name = name
        self._log = log

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_gather(self, gathers):
        self._log.append(f"gather {self._name}")
        work = self._inner.all_gather(gathers)
        return LoggedWork(work, lambda: self._log.append(f"wait {self._name}"))


class LoggedWork:
    """Work that calls a function when it is waited for."""

    def __init__(self, work, waited):
        self._work = work
        self._waited = waited

    def wait(self):
        self._waited()
        self._work.wait()


def launches_and_waits(exposure):
    """Of the third step's forward, and of its backward."""
    item = entry("mlp")
    model = wrap_entry(item, item.build(), use_orig_params=exposure)
    log: list[str] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Logged(unit.shard, unit.name or "root", log)
    for step in range(2):
        item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
    log.clear()
    loss = item.loss(model, item.make_batch(dist.get_rank(), 2))
    forward = list(log)
    log.clear()
    loss.backward()
    return forward, log


@pytest.mark.parametrize("orig", [False, True])
def test_the_next_gather_starts_before_the_wait_for_the_units_own(orig):
    forward, backward = run_kept_ranks(launches_and_waits, 2, orig)[0]
    assert position(forward, "gather blocks.0") < position(forward, "wait root"), forward
    assert position(backward, "gather blocks.1") < position(backward, "wait blocks.2"), backward


class Changing(nn.Module):
    """Runs its blocks in an order that changes from step to step, and leaves some out."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(MlpBlock(7) for _ in range(4))
        self.out = nn.Linear(7, 3)

    def forward(self, x, order):
        x = self.inp(x)
        for index in order:
            x = self.blocks[index](x)
        return self.out(x)


ORDERS = ([0, 1, 2, 3], [3, 1, 0, 2], [2], [], [1, 1, 3], [0, 3, 2, 1])


def changing(forward):
    def script(model, rank):
        for step, order in enumerate(ORDERS):
            rng = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 5, generator=rng), order).square().sum().backward()
            with torch.no_grad():
                model(torch.randn(4, 5, generator=rng), order[::-1])

    torch.manual_seed(0)
    expected = mean_grads(Changing(), script, range(dist.get_world_size()))
    for mode in MODES:
        for orig in (False, True):
            torch.manual_seed(0)
            model = FSDP(
                Changing(),
                auto_wrap_policy={MlpBlock},
                backward_prefetch=mode,
                forward_prefetch=forward,
                use_orig_params=orig,
            )
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)
            for wrapper in FSDP.fsdp_modules(model):
                for handle in wrapper._handles:
                    if not handle.aliased:
                        assert handle.unsharded.flat.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_order_that_changes_every_step_is_only_slower(forward, world_size):
    run_kept_ranks(changing, world_size, forward)
