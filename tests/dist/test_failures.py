"""Exceptions in users' code leave the wrapper usable: the next step equals a fresh one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_ranks

EXPOSURES = (False, True)


class Fails(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")


def raise_it(*_):
    raise KeyError("in forward")


def in_forward(model, index):
    """A forward that fails before, inside or after block ``index``."""
    block = model.module.blocks[index].module
    for module in (block, block.up, block.down):
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(raise_it)
            with pytest.raises(KeyError, match="forward"):
                model(torch.randn(4, 5))
            handle.remove()


def in_eval(model, index):
    handle = model.module.blocks[index].module.up.register_forward_hook(raise_it)
    with pytest.raises(KeyError), torch.no_grad():
        model(torch.randn(4, 5))
    handle.remove()


def in_backward(model, index):
    """A backward that fails before and after the gradients of block ``index``."""
    for where in ("up", "down", "norm"):
        module = getattr(model.module.blocks[index].module, where)
        handle = module.register_forward_hook(lambda _m, _a, out: Fails.apply(out))
        with pytest.raises(KeyError, match="backward"):
            model(torch.randn(4, 5)).sum().backward()
        handle.remove()


def in_no_sync(model, index):
    module = model.module.blocks[index].module.up
    handle = module.register_forward_hook(lambda _m, _a, out: Fails.apply(out))
    with pytest.raises(KeyError), model.no_sync():
        model(torch.randn(4, 5)).sum().backward()
    handle.remove()


def in_parameter_hook(model, index):
    """In the forward pre-hook of the wrapper itself, before anything of ours runs."""
    handle = model.register_forward_pre_hook(raise_it)
    with pytest.raises(KeyError):
        model(torch.randn(4, 5))
    handle.remove()


def wrong_input(model, index):
    for bad in (torch.randn(4, 3), "text", None):
        with pytest.raises((RuntimeError, TypeError)):
            model(bad)
    with pytest.raises(TypeError):
        model()


def interrupted(model, index):
    """Ctrl-C is no Exception."""

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.module.blocks[index].module.up.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 5))
    handle.remove()


FAILURES = (
    in_forward,
    in_eval,
    in_backward,
    in_no_sync,
    in_parameter_hook,
    wrong_input,
    interrupted,
)


def recovers(failure, strategy):
    item = entry("mlp")

    def script(model, rank):
        for step in range(2):
            item.loss(model, item.make_batch(rank, step)).backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        for index in (0, 2):
            for first_step in (True, False):
                model = wrap_entry(
                    item,
                    item.build(),
                    use_orig_params=orig,
                    sharding_strategy=ShardingStrategy[strategy],
                )
                if not first_step:
                    item.loss(model, item.make_batch(dist.get_rank(), 7)).backward()
                failure(model, index)
                model.zero_grad()
                script(model, dist.get_rank())
                assert_close(expected, full_grads(model), GRADIENTS)
                assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_step_after_a_failure_equals_a_fresh_one(failure, strategy):
    run_ranks(recovers, 2, failure, strategy)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_one_process_recovers_too(failure):
    run_ranks(recovers, 1, failure, "FULL_SHARD")


def calls_after_failure():
    """Directly after a failed backward: saving, summoning, evaluating, clipping answer."""
    item = entry("mlp")
    for orig in EXPOSURES:
        for failure in (in_forward, in_backward):
            model = wrap_entry(item, item.build(), use_orig_params=orig)
            failure(model, 1)
            assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))
            failure(model, 1)
            with FSDP.summon_full_params(model):
                assert model.module.out.weight.shape == (3, 7)
            failure(model, 1)
            with torch.no_grad():
                torch.testing.assert_close(
                    model(item.make_batch(0, 0)[0]), item.build()(item.make_batch(0, 0)[0])
                )
            failure(model, 1)
            model.apply(lambda m: None)
            failure(model, 1)
            model.load_state_dict(item.build(seed=2).state_dict())
            assert_bitwise(dict(item.build(seed=2).state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_everything_can_be_called_right_after_a_failure(world_size):
    run_ranks(calls_after_failure, world_size)


def broken_construction():
    """A constructor that raises leaves the module as it was, and it can be wrapped again."""
    item = entry("mlp")
    plain = item.build()
    calls = []

    def policy(module, recurse, nonwrapped_numel):
        calls.append(module)
        if len(calls) == 4:
            raise KeyError("in policy")
        return True

    with pytest.raises(KeyError):
        FSDP(plain, auto_wrap_policy=policy)
    assert not any(isinstance(child, FSDP) for child in plain.modules())
    assert_bitwise(dict(item.build().state_dict()), dict(plain.state_dict()))
    model = wrap_entry(item, plain)
    assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))
    fails = nn.Sequential(nn.Linear(2, 2).to("meta"))
    with pytest.raises(KeyError):
        FSDP(fails, param_init_fn=raise_it)


def test_a_constructor_that_raises_changes_nothing():
    run_ranks(broken_construction, 1)
