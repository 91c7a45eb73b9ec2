"""Experts over ranks of their own together with the wrapper's other features."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.optim import apply_optimizer_in_backward
from tests.moe.support import Block, build, dense_mean, loss_of, place, spread, wrap
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.oracles import full_grads
from tests.support.ranks import run_kept_ranks, run_ranks


def checkpointed(blocks):
    for block in blocks:
        original = block.forward
        block.forward = lambda x, f=original: checkpoint(f, x, use_reentrant=False)


def features(kind, orig):
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(2)
    plain = spread(build(), where)
    if kind == "checkpoint":
        checkpointed(plain.blocks)
    options = {"allow_unused": "any_rank"} if kind == "any_rank" else {}
    model = wrap(plain, where, use_orig_params=orig, **options)
    if kind == "deepcopy":
        model = copy.deepcopy(model, {id(where.across): where.across})  # groups are shared
    expected = dense_mean(world)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        got = full_grads(model)
        assert_close({name: expected[name] for name in got}, got, GRADIENTS)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("kind", ["checkpoint", "any_rank", "deepcopy"])
def test_gradients_stay_the_dense_models(kind, orig):
    run_kept_ranks(features, 4, kind, orig)


def routed_in_full_precision():
    where = place(2)
    policy = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, rules={"*.router": torch.float32}
    )
    seen = {}
    plain = spread(build(), where)

    def look(module, args):
        seen["router"] = module.weight.dtype

    plain.blocks[0].router.register_forward_pre_hook(look)
    plain.blocks[0].experts.each[str(where.numbers[0])].register_forward_hook(
        lambda module, args, out: seen.update(expert=out.dtype)
    )
    model = wrap(plain, where, mixed_precision=policy)
    assert isinstance(model.blocks[0].module, Block)
    loss_of(model, dist.get_rank()).float().backward()
    assert seen == {"router": torch.float32, "expert": torch.bfloat16}
    expected = dense_mean(dist.get_world_size())
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=0.1, atol=0.03)


def test_the_router_stays_in_float32_by_a_rule():
    run_kept_ranks(routed_in_full_precision, 4)


def stepped(orig):
    """The norm that ``apply_optimizer_in_backward`` reports counts experts of all ranks."""
    where = place(2)
    model = wrap(spread(build(), where), where, use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    in_backward = apply_optimizer_in_backward(model, optimizer, max_norm=1e9)
    loss_of(model, dist.get_rank()).backward()
    expected = dense_mean(dist.get_world_size())
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(in_backward.norm, whole, rtol=1e-5, atol=0)


@pytest.mark.parametrize("orig", [False, True])
def test_the_norm_of_a_step_in_the_backward_counts_all_experts(orig):
    run_kept_ranks(stepped, 4, orig)


def late_rank():
    """A rank that does not save is named on the others, also where experts are exchanged."""
    import os

    os.environ["FSDP_ENTRY_TIMEOUT"] = "2"
    where = place(2)
    model = wrap(spread(build(), where), where)
    if dist.get_rank() == 3:
        return ""
    with pytest.raises(RuntimeError) as caught:
        FSDP.full_optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_a_rank_that_stays_away_from_a_save_is_named():
    messages = run_ranks(late_rank, 4)
    assert all("ranks [3] did not" in message for message in messages[:3])


def in_hybrid(orig):
    """The model is sharded in rows and replicated over columns; experts are sharded over columns."""
    world, rank = dist.get_world_size(), dist.get_rank()
    where = place(2)
    model = wrap(
        spread(build(seed=rank), where),
        where,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        use_orig_params=orig,
    )
    model.load_state_dict(build().state_dict())
    loss_of(model, rank).backward()
    expected = dense_mean(world)
    got = full_grads(model)
    assert_close({name: expected[name] for name in got}, got, GRADIENTS)
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e9), whole, rtol=1e-6, atol=0)
    assert_bitwise(dict(build().state_dict()), dict(model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer)
    names = [name for name, _ in build().named_parameters()]
    assert list(state.get("state", [])) == (names if rank == 0 else [])


@pytest.mark.parametrize("orig", [False, True])
def test_experts_inside_a_hybrid_model(orig):
    run_kept_ranks(in_hybrid, 4, orig)
