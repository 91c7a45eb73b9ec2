"""Any order of forwards and backwards gives the gradients of the dense model (oracle: tests/support/scripts.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, batch, build, check_script, wrap


def forward_forward_backward_backward(model, rank):
    first, second = model(batch(rank)).sum(), model(batch(rank, 1)).square().sum()
    first.backward()
    second.backward()


def forward_forward_backward_reversed(model, rank):
    first, second = model(batch(rank)).sum(), model(batch(rank, 1)).square().sum()
    second.backward()
    first.backward()


def two_losses_in_one_backward(model, rank):
    (model(batch(rank)).sum() + model(batch(rank, 1)).square().sum()).backward()


def backward_twice_through_one_graph(model, rank):
    loss = model(batch(rank)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def loss_of_an_inner_unit_only(model, rank):
    kept = []
    handle = model.blocks[1].register_forward_hook(lambda _m, _a, out: kept.append(out))
    model(batch(rank))
    handle.remove()
    kept[0].square().sum().backward()


def inner_unit_called_before_the_root_ever_was(model, rank):
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(rank))
    model.blocks[0](x).sum().backward()
    model(batch(rank)).square().sum().backward()


def through_the_inner_module(model, rank):
    inner = model.module if isinstance(model, FSDP) else model
    inner(batch(rank)).square().sum().backward()


def evaluation_between_forward_and_backward(model, rank):
    loss = model(batch(rank)).square().sum()
    with torch.no_grad():
        model(batch(rank, 5))
    loss.backward()


def output_written_in_place(model, rank):
    out = model(batch(rank)).view(-1)
    out += 1
    out.square().sum().backward()


def some_blocks_only(model, rank):
    inner = model.module if isinstance(model, FSDP) else model
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(rank))
    inner.blocks[2](inner.blocks[0](x)).square().sum().backward()


SCRIPTS = [
    forward_forward_backward_backward,
    forward_forward_backward_reversed,
    two_losses_in_one_backward,
    backward_twice_through_one_graph,
    loss_of_an_inner_unit_only,
    inner_unit_called_before_the_root_ever_was,
    through_the_inner_module,
    evaluation_between_forward_and_backward,
    output_written_in_place,
    some_blocks_only,
]


def run_all(scripts, **kwargs):
    for script in scripts:
        check_script(script, **kwargs)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_equal_the_dense_model_for_every_order(world_size, strategy):
    run_kept_ranks(run_all, world_size, SCRIPTS, sharding_strategy=ShardingStrategy[strategy])


class Reused(nn.Module):
    """One block used three times."""

    def __init__(self):
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(5, 7), Block(7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        for _ in range(3):
            x = self.block(x)
        return self.out(x)


class Checkpointed(Net):
    """Activation checkpointing around units, or around two of them at once."""

    def __init__(self, reentrant, span):
        super().__init__()
        self.reentrant, self.span = reentrant, span

    def forward(self, x):
        x = self.inp(x)
        blocks = list(self.blocks)
        while blocks:
            now, blocks = blocks[: self.span], blocks[self.span :]
            x = checkpoint(nn.Sequential(*now), x, use_reentrant=self.reentrant)
        return self.out(x)


def plain_step(model, rank):
    model(batch(rank)).square().sum().backward()


def reused_layer():
    check_script(plain_step, Reused)
    check_script(two_losses_in_one_backward, Reused)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_layer_used_three_times_gets_the_sum_of_its_gradients(world_size):
    run_kept_ranks(reused_layer, world_size)


def checkpointed(reentrant, span):
    check_script(plain_step, lambda: Checkpointed(reentrant, span))
    check_script(
        plain_step,
        lambda: Checkpointed(reentrant, span),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 2])
def test_checkpointing_around_units_keeps_gradients(world_size, reentrant, span):
    run_kept_ranks(checkpointed, world_size, reentrant, span)


class SharedUnits(nn.Module):
    """An embedding in a unit of its own whose weight is tied to the root's head."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.block = Block(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        tokens = (x.abs() * 3).long() % 11
        return self.head(self.block(self.emb(tokens)))


def tied():
    check_script(plain_step, SharedUnits, {Block, nn.Embedding})
    check_script(plain_step, SharedUnits, {Block, nn.Embedding, nn.Linear})
    model = wrap(build(SharedUnits), {Block, nn.Embedding})
    state = model.state_dict()
    assert torch.equal(state["emb.weight"], state["head.weight"])
    return list(state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_tied_across_units_stay_tied(world_size):
    names = run_kept_ranks(tied, world_size)[0]
    assert names == list(build(SharedUnits).state_dict())


class Raises(Net):
    """Raises in the middle of a forward on demand."""

    def __init__(self):
        super().__init__()
        self.fail = False

    def forward(self, x):
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fail:
                raise KeyError("on purpose")
        return self.out(x)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("on purpose")


def fails_then_steps(model, rank):
    inner = model.module if isinstance(model, FSDP) else model
    inner.fail = True
    with pytest.raises(KeyError):
        model(batch(rank))
    inner.fail = False
    handle = inner.blocks[0].register_forward_hook(lambda _m, _a, out: RaisesInBackward.apply(out))
    with pytest.raises(KeyError):
        model(batch(rank)).sum().backward()
    handle.remove()
    model.zero_grad()
    plain_step(model, rank)


def failing():
    check_script(fails_then_steps, Raises)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_after_an_exception_equals_a_fresh_one(world_size):
    run_kept_ranks(failing, world_size)
