"""What a module writes into its own parameters in its forward stays there, whichever way it writes.

Oracle: the dense model, which sees the rows of all ranks in turn.  Every forward writes what does not depend on them.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import UsageError
from fsdp.optim import apply_optimizer_in_backward
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_kept_ranks

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def in_place(layer):
    with torch.no_grad():
        layer.weight.clamp_(-0.2, 0.2)


def through_data(layer):
    layer.weight.data.clamp_(-0.2, 0.2)


def masked(layer):
    layer.weight.data *= layer.weight.data.abs() < 0.2


def data_replaced(layer):
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.3)


def every_parameter_replaced(layer):
    for param in layer.parameters():
        param.data = param.data.clamp(-0.2, 0.2)


def nothing(layer):
    del layer


WRITES = (in_place, through_data, masked, data_replaced, every_parameter_replaced)


class Writer(nn.Linear):
    """Writes into its parameters before it uses them."""

    write = staticmethod(nothing)

    def forward(self, x):
        self.write(self)
        return F.linear(x, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, write, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList([Writer(5, 7), Writer(7, 7), Writer(7, 3)])
        self.checkpointed = checkpointed
        for layer in self.layers:
            layer.write = write

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = x.tanh()
        return x


def build(write, checkpointed=False):
    torch.manual_seed(0)
    return Net(write, checkpointed).double()


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(dist.get_world_size(), 4, 5, generator=generator, dtype=torch.float64)


def train(model, dense, steps=range(3)):
    """Steps of both; the largest difference of a parameter afterwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5) for net in (model, dense)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for mine in rows(step):
            (dense(mine).square().mean() / world_size).backward()
        model(rows(step)[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    state = model.state_dict()
    return max((state[name] - value).abs().max() for name, value in dense.state_dict().items())


def trained(checkpointed, **kwargs):
    pairs = itertools.product(WRITES, STRATEGIES)
    for number, (write, strategy) in enumerate(pairs):
        by_layer = number % 2 == 0
        model = FSDP(
            build(write, checkpointed),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Writer}) if by_layer else None,
            **kwargs,
        )
        off = train(model, build(write, checkpointed))
        assert off < 1e-12, f"{write.__name__} {strategy} {by_layer}: off by {off}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_what_a_forward_writes_is_trained_on(orig, world_size):
    run_kept_ranks(trained, world_size, False, use_orig_params=orig)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("orig", [False, True])
def test_what_a_checkpointed_forward_writes_twice_is_trained_on(orig, world_size):
    run_kept_ranks(trained, world_size, True, use_orig_params=orig)


@pytest.mark.parametrize("what", ["offload_params", "offload_optimizer"])
def test_what_a_forward_writes_reaches_offloaded_shards(what):
    run_kept_ranks(trained, 3, False, cpu_offload=CPUOffload(**{what: True}))


def begins_late(use_orig_params):
    dense = build(nothing)
    model = FSDP(
        build(nothing),
        auto_wrap_policy=ModuleWrapPolicy({Writer}),
        use_orig_params=use_orig_params,
    )
    train(model, dense, range(3))
    for net in (model, dense):
        for layer in net.layers:
            getattr(layer, "module", layer).write = through_data
    assert train(model, dense, range(3, 6)) < 1e-12  # the fourth forward looks


@pytest.mark.parametrize("orig", [False, True])
def test_writes_that_begin_later_are_seen_by_the_next_look(orig):
    run_kept_ranks(begins_late, 2, orig)


def other_memory(use_orig_params, strategy):
    dense = build(nothing)
    model = FSDP(
        build(nothing),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Writer}),
        use_orig_params=use_orig_params,
    )
    train(model, dense, range(4))
    for net in (model, dense):
        for layer in net.layers:
            getattr(layer, "module", layer).write = data_replaced
    for step in range(4, 8):  # the eighth forward is the next one that compares
        assert train(model, dense, [step]) < 1e-12, step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("orig", [False, True])
def test_a_parameter_that_is_given_other_memory_at_any_time_is_followed(orig, world_size, strategy):
    run_kept_ranks(other_memory, world_size, orig, strategy)


def turned(layer):
    if layer.out_features == layer.in_features:
        layer.weight.data = layer.weight.data.t()


def turns(use_orig_params):
    dense = build(turned)
    model = FSDP(build(turned), use_orig_params=use_orig_params)
    x = rows(0)[dist.get_rank()]
    for _ in range(2):
        assert torch.allclose(model(x), dense(x), rtol=0, atol=1e-12)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in dense.state_dict().items())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_a_parameter_whose_memory_is_read_in_another_order_is_written_in_that_order(
    orig, world_size
):
    run_kept_ranks(turns, world_size, orig)


class Momentum(nn.Module):
    """Half of what is between them is added to the key encoder between the forwards of the two, as MoCo does."""

    def __init__(self, through_data):
        super().__init__()
        self.query, self.key = Writer(5, 7), Writer(5, 7).requires_grad_(False)
        self.through_data = through_data

    def forward(self, x):
        query = self.query(x)
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                (mine.data if self.through_data else mine).lerp_(other, 0.5)
        return query - self.key(x)


def follows(through_data, strategy):
    torch.manual_seed(0)
    dense = Momentum(through_data).double()
    model = FSDP(
        copy.deepcopy(dense),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Writer}),
    )
    for step in range(5):
        dense(rows(step)[0])
        model(rows(step)[0]).sum().backward()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, dense.state_dict()[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_written_into_shards_after_they_were_gathered_is_not_taken_for_old_values(
    world_size, through_data, strategy
):
    run_kept_ranks(follows, world_size, through_data, strategy)


class Adapted(nn.Module):
    """A frozen layer beside a trained one, which bounds its weight."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.adapter = nn.Linear(5, 5)

    def forward(self, x):
        through_data(self.adapter)
        return (self.base(x) + self.adapter(x)).tanh()


def steps_in_backward(**kwargs):
    torch.manual_seed(0)
    dense = nn.Sequential(Adapted(), Adapted(), Adapted()).double()
    model = FSDP(copy.deepcopy(dense), auto_wrap_policy=ModuleWrapPolicy({Adapted}), **kwargs)
    trained = [
        [param for param in net.parameters() if param.requires_grad] for net in (dense, model)
    ]
    optimizer = torch.optim.SGD(trained[0], lr=0.5)
    apply_optimizer_in_backward(model, torch.optim.SGD(trained[1], lr=0.5))
    world_size = dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        for mine in rows(step):
            (dense(mine).square().mean() / world_size).backward()
        model(rows(step)[dist.get_rank()]).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, dense.state_dict()[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("kwargs", [{}, {"allow_unused": "any_rank"}])
def test_a_step_in_the_backward_is_not_undone_by_what_the_forward_has_written(kwargs):
    run_kept_ranks(steps_in_backward, 2, **kwargs)


def keeps_bits(write):
    """One element is written; the others keep the bits that the compute dtype has not."""

    def set_one(layer):
        write(layer)

    model = FSDP(
        build(set_one),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        auto_wrap_policy=ModuleWrapPolicy({Writer}),
    )
    model(rows(0)[dist.get_rank()])
    for name, before in build(nothing).state_dict().items():
        after = model.state_dict()[name]
        written = torch.zeros_like(before, dtype=torch.bool)
        if name.endswith("weight"):
            written[0, 0] = True
        assert torch.equal(after[~written], before[~written])
        assert (after[written] == 0.5).all()


def one_in_place(layer):
    with torch.no_grad():
        layer.weight[0, 0] = 0.5


def one_through_data(layer):
    layer.weight.data[0, 0] = 0.5


@pytest.mark.parametrize("write", [one_in_place, one_through_data])
def test_a_write_in_low_precision_leaves_the_other_elements_of_the_shards_alone(write):
    run_kept_ranks(keeps_bits, 2, write)


def another_parameter(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def another_dtype(layer):
    layer.weight.data = layer.weight.data.float()


def another_shape(layer):
    layer.weight.data = layer.weight.data.t().contiguous()


def fewer_rows(layer):
    layer.weight.data = layer.weight.data[:-1]


def refused(write, use_orig_params):
    model = FSDP(
        build(write),
        auto_wrap_policy=ModuleWrapPolicy({Writer}),
        use_orig_params=use_orig_params,
    )
    x = rows(0)[dist.get_rank()]
    if (
        write is not another_parameter
    ):  # what only makes the module's own computation fail is its own error
        model.module.layers[0].module.forward = lambda x: write(model.module.layers[0]) or x
    with pytest.raises(UsageError, match=r"layers\.0\.weight.*forward") as caught:
        model(x)
    assert caught.value.fqn == "layers.0.weight"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("write", [another_parameter, another_dtype, another_shape, fewer_rows])
def test_another_parameter_dtype_or_shape_in_a_forward_is_refused_by_name(write, orig, world_size):
    run_kept_ranks(refused, world_size, write, orig)


class Late(nn.Module):
    """Writes into its weight in its third forward, after some that have shown nothing of the kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7, bias=False)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards == 3:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return self.linear(x)


def written_late(use_orig_params):
    torch.manual_seed(0)
    dense = nn.Sequential(Late(), nn.Linear(7, 3))
    model = FSDP(
        copy.deepcopy(dense),
        auto_wrap_policy=ModuleWrapPolicy({Late}),
        use_orig_params=use_orig_params,
    )
    for _ in range(4):
        for either in (dense, model):
            either(torch.ones(2, 5)).sum().backward()
    state = model.state_dict()
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_write_in_place_is_kept_whenever_it_comes(world_size, use_orig_params):
    run_kept_ranks(written_late, world_size, use_orig_params)
