"""Module code that runs in a backward finds the gathered parameters, however it reads them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.oracles import full_grads, full_params, mean_grads
from tests.support.ranks import run_kept_ranks

WIDTH = 5


def by_attribute(block, x):
    return block.linear(x)


def by_get(block, x):
    table = block.linear._parameters
    return nn.functional.linear(x, table.get("weight"), table.get("bias"))


def by_a_copy_of_the_table(block, x):
    return nn.functional.linear(x, *dict(block.linear._parameters).values())


def by_keywords(block, x):
    return nn.functional.linear(x, **block.linear._parameters)


def by_another_module_of_the_same_parameters(block, x):
    other = nn.Linear.__new__(nn.Linear)
    vars(other).update(vars(block.linear))
    other._parameters = other._parameters.copy()
    return other(x)


def by_taking_it_out_and_putting_it_back(block, x):
    weight = block.linear._parameters.pop("weight")
    block.linear._parameters["weight"] = weight
    return block.linear(x)


def by_what_is_lent(block, x):
    """Of ``mixed``, whose entries are written one by one, before ``linear``, whose table is exchanged."""
    if not hasattr(block, "lent"):
        block.lent = [
            {name: 2 * param.detach().clone() for name, param in block.pair.named_parameters()}
        ]
    return torch.func.functional_call(block.pair, block.lent[0], (x,), tie_weights=False)


def by_iterating(block, x):
    return x + sum(param.square().mean() for param in block.parameters())


def by_functional_call(block, x):
    params = {name: 2 * param for name, param in block.linear.named_parameters()}
    return torch.func.functional_call(block.linear, params, (x,))


def by_a_recurrent_module(block, x):
    return block.linear(block.recurrent(x)[0])


def by_compiled_code(block, x):
    return block.compiled(x)


READS = (
    by_attribute,
    by_get,
    by_a_copy_of_the_table,
    by_keywords,
    by_another_module_of_the_same_parameters,
    by_taking_it_out_and_putting_it_back,
    by_what_is_lent,
    by_iterating,
    by_functional_call,
    by_a_recurrent_module,
    by_compiled_code,
)


class Mixed(nn.Module):
    """Parameters of two handles."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.weight + self.bias


class Block(nn.Module):
    """Recomputes ``read`` of itself in the backward; also a parameter of its own, beside its modules'."""

    def __init__(self, read, reentrant):
        super().__init__()
        self.read, self.reentrant = read, reentrant
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        if read is by_what_is_lent:
            self.pair = nn.Sequential(Mixed(), nn.Linear(WIDTH, WIDTH))
        if read is by_a_recurrent_module:
            self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if read is by_compiled_code:
            self.linear.compile(backend="aot_eager")
            self.compiled = self.linear

    def again(self, x):
        return torch.tanh(self.read(self, x)) * self.scale

    def forward(self, x):
        return x + checkpoint(self.again, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    def __init__(self, read, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[Block(read, reentrant) for _ in range(2)])

    def forward(self, x):
        return self.blocks(self.first(x)).square().mean()


def backward(model, rank):
    batch = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(rank))
    model(batch).backward()


def reads_as_the_dense_model_does(read, use_orig_params):
    for reentrant in (False, True):
        torch._dynamo.reset()
        dense = Net(read, reentrant)
        expected = mean_grads(dense, backward, range(dist.get_world_size()))
        torch._dynamo.reset()
        model = FSDP(
            Net(read, reentrant),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
        )
        for _ in range(3):
            model.zero_grad()
            backward(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS, none_is_zero=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_what_a_backward_runs_again_reads_whole_parameters(read, use_orig_params):
    run_kept_ranks(reads_as_the_dense_model_does, 2, read, use_orig_params)


class Decaying(nn.Module):
    """Its forward writes into a parameter of its own, and so does the recomputation."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.code = nn.Parameter(torch.linspace(1, 2, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(2, 3, WIDTH))

    def again(self, x):
        with torch.no_grad():
            self.code.mul_(0.9)
        return x * self.code

    def forward(self, x):
        return checkpoint(self.again, x, use_reentrant=self.reentrant) * self.scale


def writes_as_the_dense_model_does(use_orig_params):
    for reentrant in (False, True):
        dense = nn.Sequential(Decaying(reentrant), Decaying(reentrant))
        model = FSDP(
            nn.Sequential(Decaying(reentrant), Decaying(reentrant)),
            auto_wrap_policy=ModuleWrapPolicy({Decaying}),
            use_orig_params=use_orig_params,
        )
        for _ in range(3):
            x = torch.ones(2, WIDTH, requires_grad=True)
            for trained in (dense, model):
                trained(x).sum().backward()
        assert_close(dict(dense.state_dict()), full_params(model), GRADIENTS)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_a_backward_runs_again_writes_into_whole_parameters(use_orig_params):
    run_kept_ranks(writes_as_the_dense_model_does, 2, use_orig_params)
