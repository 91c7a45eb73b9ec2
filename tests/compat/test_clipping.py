"""torch's own ``clip_grad_norm_``, however it was imported, clips pieces by the norm of the whole gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import UsageError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks
from tests.support.scripts import Block, Net, batch


def dense(world_size, order):
    torch.manual_seed(0)
    model, other = Net(), nn.Linear(3, 2)
    for rank in range(world_size):
        (model(batch(rank)).square().sum() / world_size).backward()
    other(torch.ones(1, 3)).sum().backward()
    params = [*model.parameters(), *other.parameters()]
    norm = nn.utils.clip_grad_norm_(params, 0.3, order)
    return norm, [param.grad for param in params]


def clip_wrapped(orig, strategy, order):
    torch.manual_seed(0)
    model, other = Net(), nn.Linear(3, 2)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(model, use_orig_params=orig, sharding_strategy=strategy, auto_wrap_policy=policy)
    model(batch(model.rank)).square().sum().backward()
    other(torch.ones(1, 3)).sum().backward()
    params = [*model.parameters(), *other.parameters()]
    norm = clip_grad_norm_((param for param in params), 0.3, order)
    assert nn.utils.clip_grad_norm_(params[:1], 1e9, norm_type=order) <= 0.3 + 1e-6
    with FSDP.summon_full_params(model, with_grads=True):
        inside = nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1e9, order)
        assert inside <= 0.3 + 1e-6
        return norm, [param.grad.clone() for param in (*model.parameters(), *other.parameters())]


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.FULL_SHARD),
        (3, ShardingStrategy.SHARD_GRAD_OP),
        (2, ShardingStrategy.NO_SHARD),
    ],
)
def test_the_norm_is_that_of_the_unsharded_gradient(world_size, strategy, orig, order):
    norm, grads = dense(world_size, order)

    for got, found in run_ranks(clip_wrapped, world_size, orig, strategy, order):
        torch.testing.assert_close(got, norm)
        torch.testing.assert_close(found, grads)


def clip_what_is_whole_on_one_rank_only(orig):
    model = FSDP(nn.Linear(2, 3), use_orig_params=orig)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="unreduced"):
        clip_grad_norm_(model.parameters(), 1.0)
    model(torch.ones(1, 2)).sum().backward()
    bias = list(model.parameters())[-1]
    other = nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    assert clip_grad_norm_(other, 10.0) == 2.0  # no wrapper's: torch's own
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((param for param in ()), 1.0)
    return clip_grad_norm_(bias, 1.0)


def test_one_parameter_is_clipped_by_all_ranks():
    for norm in run_ranks(clip_what_is_whole_on_one_rank_only, 2, True):
        torch.testing.assert_close(norm, torch.tensor([2.0, 2.0, 2.0]).norm())
