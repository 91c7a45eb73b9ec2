"""The same as torch's ZeroRedundancyOptimizer where that is right: assignment, steps, what it exposes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from fsdp.optim import ZeroRedundancyOptimizer
from tests.support.ranks import run_kept_ranks
from tests.zero.support import make_model

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def assignments(cases):
    for groups in cases:
        params = [[nn.Parameter(torch.zeros(size)) for size in sizes] for sizes in groups]
        both = []
        for optimizer_class in (TorchZero, ZeroRedundancyOptimizer):
            given_groups = [{"params": list(group)} for group in params]
            zero = optimizer_class(given_groups[:1], torch.optim.SGD, lr=0.1)
            for group in given_groups[1:]:
                zero.add_param_group(group)
            # torch's _all_params forgets groups that were added later.
            everything = [param for group in zero.param_groups for param in group["params"]]
            partition = [
                [[id(param) for param in group["params"]] for group in rank_groups]
                for rank_groups in zero._partition_parameters()
            ]
            held = [[id(param) for param in group["params"]] for group in zero.optim.param_groups]
            ranks = [zero._param_to_rank[param] for param in everything]
            both.append((partition, held, ranks, len(zero._index_to_param)))
        assert both[0] == both[1]


@settings(max_examples=8)
@given(
    st.lists(st.lists(SHAPES, min_size=1, max_size=3), min_size=5, max_size=5), st.integers(1, 4)
)
def test_assignment_and_order_are_torchs(cases, world_size):
    run_kept_ranks(assignments, world_size, cases)


def steps(name, views):
    models = [make_model(), make_model()]
    optimizers = [
        optimizer_class(
            model.parameters(), getattr(torch.optim, name), parameters_as_bucket_view=views, lr=0.05
        )
        for optimizer_class, model in zip((TorchZero, ZeroRedundancyOptimizer), models, strict=True)
    ]
    for iteration in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.full((2, 5), float(iteration + dist.get_rank()))).sum().backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(theirs, ours)
    for optimizer in optimizers:
        optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        theirs, ours = (optimizer.state_dict() for optimizer in optimizers)
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
        assert ours["param_groups"] == theirs["param_groups"]
    buckets = [
        [
            [bucket.numel() for bucket in device if bucket.numel() > 1]
            for device in optimizer._buckets
        ]
        for optimizer in optimizers
    ]
    assert buckets[0] == buckets[1]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("views", [False, True])
def test_steps_and_state_are_bitwise_torchs(name, views):
    run_kept_ranks(steps, 3, name, views)
