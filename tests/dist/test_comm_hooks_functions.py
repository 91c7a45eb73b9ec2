"""The gradient communication hooks: what they compute, in which dtype, and that a wrapped model trains with them.

The oracle is the mean, computed on one rank from every rank's gradient.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.comm.hooks import (
    LOW_PRECISION_HOOKS,
    DefaultState,
    GossipState,
    LowPrecisionState,
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    gossip_hook,
    powersgd_hook,
    reduce_scatter_hook,
)
from fsdp.comm.recording import Recording
from fsdp.errors import ConfigError, ConfigTypeError, ShardMismatchError, TrainingStateError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_kept_ranks

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
    run_kept_ranks(states, world_size)


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

        grad = gradient(rank, numel * world, dtype)  # in place, as NCCL allows it
        output = own_slice(grad)
        reduce_scatter_hook(state, grad, output)
        assert numel == 0 or near(output, own_slice(mean(numel * world, dtype)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_default_hooks_average_in_place_and_in_the_dtype_they_get(world_size, dtype):
    run_kept_ranks(plain, world_size, dtype)


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
    run_kept_ranks(shapes, 2)


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
    run_kept_ranks(compressed, world_size, hook, dtype, parameter_type)


def in_range():
    """The sum of these would overflow float16 (65504); divided first it does not."""
    grad = torch.full((3,), 30000.0)
    fp16_compress_hook(LowPrecisionState(dist.group.WORLD), grad)
    assert grad.tolist() == [30000.0] * 3


def test_dividing_before_the_sum_keeps_float16_in_range():
    run_kept_ranks(in_range, 4)


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
    run_kept_ranks(trained, 2, strategy, hook, orig)


# -- PowerSGD ------------------------------------------------------------------------------------------------------


def low_rank(sharded):
    """Every rank's gradient has its own left side and the same right one, so the mean has rank one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    columns = 12 * world
    right = gradient(99, columns)
    lefts = [gradient(r, columns) for r in range(world)]
    grad = torch.outer(lefts[rank], right).view(-1)
    expected = torch.outer(torch.stack(lefts).mean(0), right).view(-1)
    state = PowerSGDState(dist.group.WORLD, rank=1)
    if sharded:
        output = torch.empty(grad.numel() // world)
        powersgd_hook(state, grad.clone(), output)
        torch.testing.assert_close(output, own_slice(expected), rtol=1e-3, atol=1e-4)
    else:
        powersgd_hook(state, grad)
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_powersgd_is_exact_for_means_of_its_rank(world_size, sharded):
    run_kept_ranks(low_rank, world_size, sharded)


def remembered():
    """The average of what arrives converges to the mean of a gradient that comes again and again."""
    world, rank, numel, rounds = dist.get_world_size(), dist.get_rank(), 150 * 2, 200
    state = PowerSGDState(dist.group.WORLD, rank=2)
    total = torch.zeros(numel // world)
    errors = []
    for number in range(rounds):
        output = torch.empty(numel // world)
        state._calls = 0  # every reduction is one of a backward of its own
        powersgd_hook(state, gradient(rank, numel), output)
        total += output
        if number in (0, rounds - 1):
            errors.append((total / (number + 1) - own_slice(mean(numel))).abs().max().item())
    assert errors[1] < errors[0] / 5


def test_powersgd_makes_up_for_what_it_missed():
    run_kept_ranks(remembered, 2)


def powersgd_sends():
    state = PowerSGDState(dist.group.WORLD, rank=2)
    events = []
    group = state.collectives_on(torch.device("cpu"))
    state.collectives[torch.device("cpu")] = Recording(group, "", events)
    powersgd_hook(state, gradient(0, 10_000), torch.empty(5_000))
    powersgd_hook(state, gradient(0, 8), torch.empty(4))  # too small to pay
    return [(event.op, event.numels) for event in events]


def test_powersgd_sends_two_thin_matrices():
    assert [
        ("all_reduce", (200,)),
        ("all_reduce", (200,)),
        ("reduce_scatter", (8,)),
    ] == run_kept_ranks(powersgd_sends, 2)[0]


def powersgd_trains(orig, exact_steps):
    item = entry("gpt_rope")

    def losses(hooked):
        model = FSDP(
            item.build(), auto_wrap_policy=ModuleWrapPolicy(item.blocks), use_orig_params=orig
        )
        if hooked:
            state = PowerSGDState(dist.group.WORLD, rank=4, exact_steps=exact_steps)
            model.register_comm_hook(state, powersgd_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = item.loss(model, item.make_batch(dist.get_rank(), 0))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    return losses(hooked=False), losses(hooked=True)


@pytest.mark.parametrize(("orig", "exact_steps"), [(False, 0), (True, 3)])
def test_a_model_learns_with_powersgd(orig, exact_steps):
    for exact, compressed_ in run_kept_ranks(powersgd_trains, 2, orig, exact_steps):
        assert compressed_[: exact_steps + 1] == pytest.approx(exact[: exact_steps + 1], rel=1e-5)
        assert compressed_ != exact
        assert compressed_[-1] < 0.65 * exact[0]


@pytest.mark.parametrize("options", [{"rank": 0}, {"exact_steps": -1}])
def test_powersgd_refuses_what_it_can_not_do(options):
    with pytest.raises(ConfigError, match="at least 1 and at least 0"):
        PowerSGDState(None, **options)


# -- gossip --------------------------------------------------------------------------------------------------------


def gossiped(ranks_per_node, rounds):
    world, rank = dist.get_world_size(), dist.get_rank()
    state = GossipState(dist.group.WORLD, ranks_per_node, seed=1)
    grad, seen = gradient(rank, 6).view(2, 3), []
    for _ in range(rounds):
        gossip_hook(state, grad)
        everyone = [torch.empty(2, 3) for _ in range(world)]
        dist.all_gather(everyone, grad)
        spread = torch.stack(everyone)
        assert near(spread.mean(0).view(-1), mean(6), torch.float32)  # the mean over ranks stays
        for node in spread.split(ranks_per_node):
            assert torch.equal(node, node[:1].expand_as(node))
        seen.append(spread.std(0).max().item())
    return seen


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"), [(2, 1), (4, 2), (4, 1), (3, 1), (4, 4), (1, 1)]
)
def test_gossip_keeps_the_mean_and_nodes_come_to_agree(world_size, ranks_per_node):
    rounds = 12
    for seen in run_kept_ranks(gossiped, world_size, ranks_per_node, rounds):
        nodes = world_size // ranks_per_node
        if nodes <= 2:
            assert world_size == 1 or seen[0] < 1e-6  # one pair: the mean at once
        else:
            assert seen[0] > 0.05
            assert seen[-1] < seen[0] / 10


def gossip_trains(orig):
    item = entry("mlp")
    model = FSDP(item.build(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=orig)
    model.register_comm_hook(GossipState(dist.group.WORLD, 1), gossip_hook)

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    script(model, dist.get_rank())
    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    assert_close(expected, full_grads(model), GRADIENTS)  # one pair of nodes: no drift


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_a_model_trains_with_gossip(orig):
    run_kept_ranks(gossip_trains, 2, orig)


def cut_badly():
    with pytest.raises(ConfigError, match="a group of 3 ranks into nodes of 2"):
        GossipState(dist.group.WORLD, 2)


def test_gossip_needs_whole_nodes():
    run_kept_ranks(cut_badly, 3)


# -- registration --------------------------------------------------------------------------------------------------


class Unbound:
    def hook(self, state, grad, output):
        raise AssertionError


def registration():
    item, state = entry("mlp"), DefaultState(dist.group.WORLD)

    def wrapped(strategy="FULL_SHARD"):
        return FSDP(
            item.build(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
        )

    model = wrapped()
    with pytest.raises(ConfigError, match="must be callable but got 3"):
        model.register_comm_hook(state, 3)
    with pytest.raises(ConfigTypeError, match=r"\(state, grad, output\).*too many positional"):
        model.register_comm_hook(state, allreduce_hook)
    with pytest.raises(ConfigTypeError, match=r"NO_SHARD.*\(state, grad\).*'output'"):
        wrapped("NO_SHARD").register_comm_hook(state, reduce_scatter_hook)
    wrapped("NO_SHARD").register_comm_hook(state, Unbound.hook)  # only its first call can tell
    inner = next(w for w in FSDP.fsdp_modules(model) if w is not model)
    with pytest.raises(TrainingStateError, match="only be called on a root instance"):
        inner.register_comm_hook(state, reduce_scatter_hook)
    assert model._comm_hook is None  # nothing was registered by a call that failed
    model.register_comm_hook(state, reduce_scatter_hook)
    with pytest.raises(TrainingStateError, match="already registered"):
        model.register_comm_hook(state, reduce_scatter_hook)
    late = wrapped()
    item.loss(late, item.make_batch(dist.get_rank(), 0)).backward()
    with pytest.raises(TrainingStateError, match="before the first forward"):
        late.register_comm_hook(state, reduce_scatter_hook)


def test_wrong_signatures_and_double_late_or_inner_registration_are_errors():
    run_kept_ranks(registration, 2)


def alone(orig):
    """One rank: the hook is called as several ranks call it."""
    item = entry("mlp")

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    model = FSDP(item.build(), use_orig_params=orig)
    model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    script(model, 0)
    assert_close(mean_grads(item.build(), script, range(1)), full_grads(model), GRADIENTS)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_one_rank_alone_calls_the_hook_of_sharded_units(orig):
    run_kept_ranks(alone, 1, orig)


def hybrid(shape):
    item = entry("mlp")

    def script(model, rank):
        for step in range(2):
            item.loss(model, item.make_batch(rank, step)).backward()

    mesh = init_device_mesh("cpu", shape)
    model = FSDP(
        item.build(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
    )
    model.register_comm_hook(DefaultState(mesh.get_group(1)), reduce_scatter_hook)
    script(model, dist.get_rank())
    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)])
def test_under_hybrid_sharding_the_replicas_are_averaged_after_the_hook(shape):
    run_kept_ranks(hybrid, shape[0] * shape[1], shape)
