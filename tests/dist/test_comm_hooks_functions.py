"""The gradient communication hooks: what they compute, in which dtype, and that a wrapped model trains with them.

The oracle is the mean, computed on one rank from every rank's gradient.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.comm.hooks import (
    LOW_PRECISION_HOOKS,
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from fsdp.errors import ConfigError, ConfigTypeError, ShardMismatchError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_ranks

WORLDS = [1, 2, 3, 4]
WIRE = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


def gradient(rank, numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def mean(numel, dtype=torch.float32):
    world = dist.get_world_size()
    return torch.stack([gradient(rank, numel, dtype).double() for rank in range(world)]).mean(0)


def own_slice(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def near(actual, expected, dtype):
    """One rounding a summand, one a division, in ``dtype``; summands are below 4."""
    bound = 4 * (dist.get_world_size() + 2) * torch.finfo(dtype).eps
    return bool((actual.double() - expected).abs().max() <= bound)


# -- states --------------------------------------------------------------------------------------------------------


def states():
    world, group = dist.get_world_size(), dist.group.WORLD
    state = DefaultState(group)
    assert state.process_group is group
    assert state.world_size == world
    factors = state.gradient_predivide_factor, state.gradient_postdivide_factor
    assert factors[0] * factors[1] == world
    low = LowPrecisionState(group)
    assert low.parameter_type is torch.float32
    assert LowPrecisionState(group, torch.bfloat16).parameter_type is torch.bfloat16
    assert (low.gradient_predivide_factor, low.gradient_postdivide_factor) == factors
    with pytest.raises(ConfigTypeError, match="parameter_type"):
        LowPrecisionState(group, "float32")


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_two_factors_make_up_the_world_size(world_size):
    run_ranks(states, world_size)


@pytest.mark.parametrize("kind", [DefaultState, LowPrecisionState])
def test_a_state_needs_a_process_group(kind):
    with pytest.raises(ConfigError, match=f"explicit ProcessGroup to {kind.__name__}") as caught:
        kind(None)

    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("world_size", "factor"),
    [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (12, 4), (16, 4), (64, 8), (100, 8)],
)
def test_the_first_factor_is_the_power_of_two_near_the_root(world_size, factor):
    assert DefaultState._get_gradient_predivide_factor(world_size) == factor
    assert isinstance(DefaultState._get_gradient_predivide_factor(world_size), float)


def test_the_compressing_hooks_are_listed():
    assert LOW_PRECISION_HOOKS == [fp16_compress_hook, bf16_compress_hook]


# -- what they compute ---------------------------------------------------------------------------------------------


def plain(dtype):
    world, rank = dist.get_world_size(), dist.get_rank()
    state = DefaultState(dist.group.WORLD)
    for numel in (0, 1, 5):
        grad = gradient(rank, numel, dtype)
        pointer = grad.data_ptr()
        assert allreduce_hook(state, grad) is None
        assert (grad.dtype, grad.data_ptr()) == (dtype, pointer)
        assert numel == 0 or near(grad, mean(numel, dtype), dtype)

        grad, output = gradient(rank, numel * world, dtype), torch.empty(numel, dtype=dtype)
        pointer = output.data_ptr()
        assert reduce_scatter_hook(state, grad, output) is None
        assert (output.dtype, output.data_ptr()) == (dtype, pointer)
        assert numel == 0 or near(output, own_slice(mean(numel * world, dtype)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_default_hooks_average_in_place_and_in_the_dtype_they_get(world_size, dtype):
    run_ranks(plain, world_size, dtype)


def shapes():
    world, rank = dist.get_world_size(), dist.get_rank()
    state = DefaultState(dist.group.WORLD)
    grad = gradient(rank, 6).view(2, 3)
    allreduce_hook(state, grad)
    assert near(grad.view(-1), mean(6), torch.float32)
    grad, output = gradient(rank, 6 * world).view(world, 2, 3), torch.empty(2, 3)
    reduce_scatter_hook(state, grad, output)
    assert near(output.view(-1), own_slice(mean(6 * world)), torch.float32)
    for numel in (0, 1, 5, 7):
        with pytest.raises(ShardMismatchError, match=f"{numel}: .* {world} times"):
            reduce_scatter_hook(state, torch.ones(3 * world), torch.empty(numel))


def test_shapes_do_not_matter_but_sizes_have_to_fit():
    run_ranks(shapes, 2)


def compressed(hook, dtype, parameter_type):
    world, rank = dist.get_world_size(), dist.get_rank()
    state = LowPrecisionState(dist.group.WORLD, parameter_type)
    grad = gradient(rank, 5, dtype)
    hook(state, grad)
    assert grad.dtype is parameter_type
    assert near(grad, mean(5, dtype), WIRE[hook])
    if parameter_type.itemsize > 2:
        assert torch.equal(grad, grad.to(WIRE[hook]).to(parameter_type))  # it did travel compressed

    grad, output = gradient(rank, 5 * world, dtype), torch.empty(5, dtype=dtype)
    before, pointer = grad.clone(), output.data_ptr()
    hook(state, grad, output)
    assert output.dtype is parameter_type
    assert (output.data_ptr() == pointer) == (dtype is parameter_type)
    assert near(output, own_slice(mean(5 * world, dtype)), WIRE[hook])
    assert torch.equal(grad, before)


@pytest.mark.parametrize("hook", LOW_PRECISION_HOOKS)
@pytest.mark.parametrize(
    ("dtype", "parameter_type"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_compressing_hooks_average_in_their_dtype_and_return_the_parameters(
    world_size, hook, dtype, parameter_type
):
    run_ranks(compressed, world_size, hook, dtype, parameter_type)


def in_range():
    """The sum of these would overflow float16 (65504); divided first it does not."""
    grad = torch.full((3,), 30000.0)
    fp16_compress_hook(LowPrecisionState(dist.group.WORLD), grad)
    assert grad.tolist() == [30000.0] * 3


def test_dividing_before_the_sum_keeps_float16_in_range():
    run_ranks(in_range, 4)


# -- in a wrapped model --------------------------------------------------------------------------------------------


def trained(strategy, hook, orig):
    item, rank = entry("mlp"), dist.get_rank()

    def script(model, rank):
        for step in range(2):
            item.loss(model, item.make_batch(rank, step)).backward()

    model = FSDP(
        item.build(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
        use_orig_params=orig,
    )
    compresses = hook in LOW_PRECISION_HOOKS
    state = (LowPrecisionState if compresses else DefaultState)(dist.group.WORLD)
    model.register_comm_hook(state, hook)
    script(model, rank)
    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    actual = full_grads(model)
    assert all(param.grad.dtype is torch.float32 for param in model.parameters() if param.numel())
    if not compresses:
        assert_close(expected, actual, GRADIENTS)
        return
    for name, grad in expected.items():
        scale = grad.abs().max() + 1e-3
        error = (actual[name] - grad).abs().max() / scale
        assert error < 16 * torch.finfo(WIRE[hook]).eps, name


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("FULL_SHARD", reduce_scatter_hook),
        ("NO_SHARD", allreduce_hook),
        *[(s, hook) for hook in LOW_PRECISION_HOOKS for s in ("SHARD_GRAD_OP", "NO_SHARD")],
    ],
)
def test_a_model_trains_with_each_hook(strategy, hook, orig):
    run_ranks(trained, 2, strategy, hook, orig)
