"""The sum over replicas: beside the next unit's reduction, and only when it is wanted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp import ShardingStrategy
from fsdp.errors import UnsupportedError, UsageError
from fsdp.runtime import reduction_queue, root
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import batch, build, wrap

HYBRID = ShardingStrategy.HYBRID_SHARD


class Logged:
    """Collectives of one axis that log when work starts and when it is waited for."""

    def __init__(self, inner, log):
        self._inner = inner
        self._log = log

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_reduce(self, tensors, *, op="sum"):
        return self._started("all_reduce", self._inner.all_reduce(tensors, op=op))

    def reduce_scatter(self, reduces):
        return self._started("reduce_scatter", self._inner.reduce_scatter(reduces))

    def _started(self, what, work):
        log, self.what = self._log, what
        log.append(f"start {what}")

        class Waited:
            def wait(self):
                work.wait()
                log.append(f"wait {what}")

        return Waited()


def overlapped(orig):
    # As if the units were large:
    root._SMALL_BYTES = reduction_queue._SMALL_BYTES = reduction_queue._BURST_BYTES[True] = 0
    model = wrap(
        build(),
        sharding_strategy=HYBRID,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        use_orig_params=orig,
    )
    model(batch(dist.get_rank())).square().sum().backward()
    model.zero_grad()
    log = []
    blocks = [model._unit.root.units[index] for index in (3, 2, 1)]  # as the backward reaches them
    for number, unit in enumerate(blocks):
        own = Named(log, number)
        unit.shard = unit.step_shard = Logged(unit.shard, own)
        unit.replicate = Logged(unit.replicate, own)
    model(batch(dist.get_rank())).square().sum().backward()
    for number in (0, 1):
        begun = log.index(f"start all_reduce {number}")
        following = log.index(f"start reduce_scatter {number + 1}")
        ended = log.index(f"wait all_reduce {number}")
        assert begun < following < ended, log


class Named(list):
    """Appends to a log under a unit's number."""

    def __init__(self, log, number):
        super().__init__()
        self._log, self._number = log, number

    def append(self, text):
        self._log.append(f"{text} {self._number}")


@pytest.mark.parametrize("orig", [False, True])
def test_the_sum_over_replicas_runs_beside_the_next_units_reduce_scatter(orig):
    run_ranks(overlapped, 4, orig)


def deferred(replicas, shards, orig, steps):
    """Backwards without all-reduce, then one with: the mean over all of them."""
    item, world = entry("gpt_tied"), replicas * shards
    rank = dist.get_rank()

    def script(model, who):
        for step in range(steps):
            item.loss(model, item.make_batch(who, step)).backward()

    expected = mean_grads(item.build(), script, range(world))
    model = wrap_entry(
        item,
        item.build(),
        sharding_strategy=HYBRID,
        device_mesh=init_device_mesh("cpu", (replicas, shards)),
        use_orig_params=orig,
    )
    for _ in range(2):
        sums = []
        for unit in model._unit.root.units:
            unit.replicate = Counted(unit.replicate, sums)
        for step in range(steps):
            model.set_requires_all_reduce(step == steps - 1)
            item.loss(model, item.make_batch(rank, step)).backward()
            if replicas > 1 and step < steps - 1:
                assert all(param.grad is None for param in model.parameters())
                with pytest.raises(UsageError, match="unreduced"):
                    model.clip_grad_norm_(1.0)
                assert sums == []
        assert_close(expected, full_grads(model), GRADIENTS)
        norm = model.clip_grad_norm_(1e9)
        wanted = torch.stack([grad.norm() for grad in expected.values()]).norm()
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        model.zero_grad()


class Counted:
    """Notes every sum of floating tensors over the replicas."""

    def __init__(self, inner, sums):
        self._inner, self._sums = inner, sums

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_reduce(self, tensors, *, op="sum"):
        if any(tensor.is_floating_point() for tensor in tensors):
            self._sums.append(op)
        return self._inner.all_reduce(tensors, op=op)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 1), (1, 2)])
def test_without_all_reduce_backwards_add_up_until_one_with(replicas, shards, orig):
    run_kept_ranks(deferred, replicas * shards, replicas, shards, orig, 3)


def part(orig):
    """A unit that the last backward does not reach is summed over the replicas all the same."""
    model = wrap(
        build(),
        sharding_strategy=HYBRID,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        use_orig_params=orig,
    )

    def script(model, who):
        model(batch(who)).square().sum().backward()

    expected = mean_grads(build(), script, range(4))
    model.set_requires_all_reduce(False)
    script(model, dist.get_rank())
    model.set_requires_all_reduce(True)
    inner = model.blocks[0]
    x = torch.zeros(1, 7, requires_grad=True)
    (0.0 * inner(x)).sum().backward()
    assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("orig", [False, True])
def test_what_was_left_is_summed_in_the_next_backward_that_wants_it(orig):
    run_kept_ranks(part, 4, orig)


def early_step(orig):
    model = wrap(
        build(),
        sharding_strategy=HYBRID,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        use_orig_params=orig,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.state_dict())
    model.set_requires_all_reduce(False)
    model(batch(0)).square().sum().backward()
    with pytest.raises(UsageError, match="unreduced"):
        optimizer.step()
    assert_bitwise(before, dict(model.state_dict()))
    hooked = wrap(build(), sharding_strategy=HYBRID, device_mesh=init_device_mesh("cpu", (2, 2)))
    hooked.register_comm_hook(None, lambda state, grad, output=None: None)
    with pytest.raises(UnsupportedError, match="no_sync"):
        hooked.set_requires_all_reduce(False)


@pytest.mark.parametrize("orig", [False, True])
def test_steps_before_the_sum_and_communication_hooks_are_refused(orig):
    run_kept_ranks(early_step, 4, orig)
