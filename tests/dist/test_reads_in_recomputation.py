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
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_ranks

WIDTH = 5


def by_attribute(block, x):
    return block.linear(x)


def by_get(block, x):
    table = block.linear._parameters
    return nn.functional.linear(x, table.get("weight"), table.get("bias"))


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
    by_iterating,
    by_functional_call,
    by_a_recurrent_module,
    by_compiled_code,
)


class Block(nn.Module):
    """Recomputes ``read`` of itself in the backward; also a parameter of its own, beside its modules'."""

    def __init__(self, read, reentrant):
        super().__init__()
        self.read, self.reentrant = read, reentrant
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
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
            assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_what_a_backward_runs_again_reads_whole_parameters(read, use_orig_params):
    run_ranks(reads_as_the_dense_model_does, 2, read, use_orig_params)
