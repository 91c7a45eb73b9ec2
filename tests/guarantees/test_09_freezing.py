"""Parameters may be frozen and thawed in mid-run, and their gradients dropped by the user."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.errors import UsageError
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)


def thawed():
    """Freeze a block at step 1, thaw it at step 2, add it to the optimizer then."""
    for use_orig_params in (False, True):
        model, dense = wrap(build(), use_orig_params=use_orig_params), build()
        pairs = []
        for net in (model, dense):
            body = [p for n, p in net.named_parameters() if not n.startswith("blocks.1")]
            pairs.append((net, torch.optim.SGD(body, lr=0.1)))
        for step in range(4):
            for net, optimizer in pairs:
                block = [p for n, p in net.named_parameters() if n.startswith("blocks.1")]
                for param in block:
                    param.requires_grad_(step >= 2)
                if step == 2:
                    optimizer.add_param_group({"params": block})
                optimizer.zero_grad()
                if net is dense:
                    world = dist.get_world_size()
                    for rank in range(world):
                        (net(batch(rank, step)).square().mean() / world).backward()
                else:
                    net(batch(dist.get_rank(), step)).square().mean().backward()
                optimizer.step()
        state = model.state_dict()
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_freezing_and_thawing_in_mid_run(world_size):
    run_kept_ranks(thawed, world_size)


def dropped(use_orig_params):
    """``p.grad = None`` between backwards drops what was there, and nothing else."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = dense_grads(
        build(), lambda m, r: m(batch(r, 1)).square().sum().backward(), world_size
    )
    model = wrap(build(), use_orig_params=use_orig_params)
    model(batch(rank)).square().sum().backward()
    for param in model.parameters():
        param.grad = None
    model(batch(rank, 1)).square().sum().backward()
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)


def dropped_one(names):
    """Of some parameters only; an optimizer then leaves them alone (with original parameters: flat ones are a unit)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def script(net, rank):
        net(batch(rank)).square().sum().backward()

    expected = dense_grads(build(), script, world_size)
    model = wrap(build(), use_orig_params=True)
    before = model.state_dict()
    script(model, rank)
    for name in names:
        model.get_parameter(name).grad = None
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]) is (name in names), name
    script(model, rank)
    grads = full_grads(model)
    for name in names:  # the second backward's gradient alone
        assert grads[name] is not None
    model.zero_grad()
    model.load_state_dict(before)
    script(model, rank)
    model.get_parameter("out.weight").grad = None
    script(model, rank)
    doubled = {name: 2 * grad for name, grad in expected.items()}
    doubled["out.weight"] = expected["out.weight"]
    assert_same_gradients(doubled, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_gradient_of_one_parameter_may_be_set_to_none(world_size):
    run_kept_ranks(dropped_one, world_size, ["blocks.1.up.weight", "out.bias"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_gradient_that_the_user_sets_to_none_is_gone(use_orig_params, world_size):
    run_kept_ranks(dropped, world_size, use_orig_params)


def frozen_too_early(use_orig_params):
    """Gradients of ``no_sync`` belong to no rank yet: a block that is frozen then would lose them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap(build(), use_orig_params=use_orig_params)

    def script(net, rank_, step):
        net(batch(rank_, step)).square().sum().backward()

    with model.no_sync():
        script(model, rank, 0)
    model.module.blocks[1].requires_grad_(False)
    for _ in range(2):
        with pytest.raises(UsageError, match="frozen while gradients of no_sync") as caught:
            model(batch(rank, 1))
        assert caught.value.fqn.startswith("blocks.1.")
    model.module.blocks[1].requires_grad_(True)
    script(model, rank, 1)

    def both(net, rank_):
        script(net, rank_, 0)
        script(net, rank_, 1)

    expected = dense_grads(build(), both, world_size)
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)
    with model.no_sync():
        script(model, rank, 0)
    model.zero_grad()
    model.module.blocks[1].requires_grad_(False)  # nothing is lost
    script(model, rank, 1)
    plain = build()
    plain.blocks[1].requires_grad_(False)
    expected = dense_grads(plain, lambda net, rank_: script(net, rank_, 1), world_size)
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_freezing_what_has_unreduced_gradients_is_refused_and_loses_nothing(
    world_size, use_orig_params
):
    run_kept_ranks(frozen_too_early, world_size, use_orig_params)
