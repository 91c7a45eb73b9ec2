"""Touching a sharded parameter is an error that names it and the remedy; the process never crashes.

With ``use_orig_params=True`` users hold their own parameters over this rank's pieces between forwards: plain tensors,
which say by ``fsdp_shape`` what they are pieces of, for optimizers, clipping and averages.  What would be wrong is
refused: computing with them inside the forward of another module, and a gradient that reaches them.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy, _torch
from fsdp.errors import ShardedParameterError
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import (
    Block,
    Net,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)

TOUCHES = {
    "sum": lambda w: w.sum(),
    "index": lambda w: w[0],
    "matmul": lambda w: w @ torch.ones(7),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, 7), w),
    "numpy": lambda w: w.detach().numpy(),
    "item": lambda w: w.view(-1)[0].item(),
    "in_place": lambda w: w.data.zero_(),
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float64),
    "compare": lambda w: bool((w == 0).all()),
    "list": lambda w: torch.stack([w, w]),
    "print_values": lambda w: w.tolist(),
}
SETTINGS = {
    "grad": lambda w: w.grad,
    "set_grad": lambda w: setattr(w, "grad", torch.zeros(15, 7)),
    "set_data": lambda w: setattr(w, "data", torch.zeros(15, 7)),
    "freeze": lambda w: w.requires_grad_(False),
    "set_requires_grad": lambda w: setattr(w, "requires_grad", False),
    "hook": lambda w: w.register_hook(lambda grad: grad * 2),
    "post_hook": lambda w: w.register_post_accumulate_grad_hook(lambda param: None),
    "pickle": lambda w: w.__reduce_ex__(2),
    "address": lambda w: w.data_ptr(),
    "share": lambda w: w.share_memory_(),
}


def touched(when):
    model = wrap(build())
    if when == "after a step":
        model(batch(0)).sum().backward()
    if when == "after eval":
        model.eval()
        with torch.no_grad():
            model(batch(0))
    weight = model.module.blocks[1].module.up.weight
    assert tuple(weight.shape) == (15, 7)
    assert weight.dtype is torch.float32
    assert "blocks.1.up.weight" in repr(weight)
    for name, touch in (TOUCHES | SETTINGS).items():
        with pytest.raises(ShardedParameterError, match="summon_full_params") as caught:
            touch(weight)
        assert caught.value.fqn == "blocks.1.up.weight", name
    with FSDP.summon_full_params(model):
        whole = model.module.blocks[1].module.up.weight
        assert torch.equal(whole, build().blocks[1].up.weight) or when == "after a step"
        assert torch.isfinite(whole.sum())
    model(batch(0)).sum().backward()  # the model is as usable as before


@pytest.mark.parametrize("when", ["before any forward", "after a step", "after eval"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_operation_raises_naming_the_parameter(world_size, when):
    run_kept_ranks(touched, world_size, when)


def pieces():
    model = wrap(build(), use_orig_params=True)
    model(batch(0)).sum().backward()
    weight = model.module.blocks[1].module.up.weight
    assert weight.fsdp_shape == (15, 7)
    total = torch.tensor([weight.detach().sum(), weight.numel()])
    dist.all_reduce(total)
    assert total[1] == 15 * 7
    torch.testing.assert_close(total[0], build().blocks[1].up.weight.sum().detach())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_orig_parameters_are_pieces_that_add_up_to_the_whole(world_size):
    run_kept_ranks(pieces, world_size)


class ReachingNet(Net):
    """Its forward uses a parameter of a block, as models do that tie their head by hand."""

    reach = staticmethod(lambda h, block: h + block.up.bias[:1])

    def forward(self, x):
        return self.out(self.reach(self.features(x), self.blocks[1]))


REACHES = {
    "broadcasting": lambda h, block: h + block.up.bias[:1],
    "linear": lambda h, block: nn.functional.linear(h, block.up.weight)[:, :7],
    "penalty": lambda h, block: h + block.norm.weight.square().sum(),
}


def reached(use_orig_params):
    rank = dist.get_rank()
    for reach in REACHES.values():
        plain = build(ReachingNet)
        plain.reach = reach
        model = wrap(plain, {Block}, use_orig_params=use_orig_params)
        bound = model.module.blocks[1].module
        if use_orig_params and dist.get_world_size() == 1:
            model(batch(rank))  # the piece is the whole
            continue
        with pytest.raises(ShardedParameterError, match="summon_full_params") as caught:
            model(batch(rank))
        assert caught.value.fqn.startswith("blocks.1.")
        with torch.no_grad(), pytest.raises(ShardedParameterError):
            model(batch(rank))
        if use_orig_params:
            assert dict(model.named_parameters())["blocks.1.up.weight"] is bound.up.weight
        plain.reach = lambda h, block: h
        model(batch(rank)).sum().backward()  # as usable as before
        if use_orig_params:
            assert isinstance(bound.up.weight, nn.Parameter)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_forward_that_reaches_for_the_parameter_of_another_unit_is_refused(
    world_size, use_orig_params
):
    run_kept_ranks(reached, world_size, use_orig_params)


def computed_with_pieces(use_orig_params, kwargs):
    model = wrap(build(), use_orig_params=use_orig_params, **kwargs)
    penalty = sum(param.norm() for param in model.parameters())
    loss = model(batch(dist.get_rank())).square().sum() + penalty
    if dist.get_world_size() == 1:
        loss.backward()  # the pieces are the parameters
        return
    with pytest.raises(ShardedParameterError, match="weight_decay"):
        loss.backward()
    model.zero_grad()
    loss = model(batch(dist.get_rank())).square().sum()
    (loss + 0 * sum(param.sum() for param in model.parameters())).backward()
    with torch.no_grad():
        assert sum(param.norm() for param in model.parameters()) > 0  # pieces are no secret


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_that_would_stay_on_one_rank_is_refused(world_size, use_orig_params):
    run_kept_ranks(computed_with_pieces, world_size, use_orig_params, {})


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_past_the_reduction_is_refused_under_no_shard_too(world_size, use_orig_params):
    settings = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    run_kept_ranks(computed_with_pieces, world_size, use_orig_params, settings)


def half_zero(model):
    """Of a parameter of which some ranks hold nothing but zeros."""
    named = dict(model.named_parameters())
    return named.get("inp.weight", named.get("flat_param")).square().sum()


def small(model):
    """Of a parameter of which some ranks hold nothing."""
    return list(model.parameters())[-1].square().sum()


PENALTIES = {
    "all": lambda model: sum(param.norm() for param in model.parameters()),
    "half zero": half_zero,
    "small": small,
}
LOSSES = {
    "penalty first": lambda model, penalty, x: penalty(model) + model(x).square().sum(),
    "penalty last": lambda model, penalty, x: model(x).square().sum() + penalty(model),
    "penalty alone": lambda model, penalty, x: penalty(model),
    "checkpointed": lambda model, penalty, x: (
        checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum() + penalty(model)
    ),
    "penalty checkpointed": lambda model, penalty, x: (
        model(x).square().sum() + checkpoint(lambda: penalty(model), use_reentrant=False)
    ),
}


def refused_together(use_orig_params):
    """Every rank raises, whatever it holds, when its backward has ended; the next step knows nothing of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def script(model, who):
        model(batch(who)).square().sum().backward()

    plain = build()
    with torch.no_grad():
        plain.inp.weight[2:].zero_()
    expected = dense_grads(plain, script, world_size)
    for penalty in PENALTIES.values():
        model = wrap(copy.deepcopy(plain), use_orig_params=use_orig_params)
        for loss in LOSSES.values():
            for accumulates in (False, True):
                with model.no_sync() if accumulates else contextlib.nullcontext():
                    total = loss(model, penalty, batch(rank))
                    with pytest.raises(ShardedParameterError, match="weight_decay"):
                        total.backward()
                model.zero_grad()
                script(model, rank)
                assert_same_gradients(expected, full_grads(model), none_is_zero=not use_orig_params)
                model.zero_grad()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_penalty_on_pieces_is_refused_on_every_rank_and_leaves_nothing_behind(
    world_size, use_orig_params
):
    run_kept_ranks(refused_together, world_size, use_orig_params, timeout=30)


class Penalised(Net):
    """Its modules look through their own parameters inside their forwards."""

    class Part(Block):
        def forward(self, x):
            assert [name for name, _ in self.named_parameters()][:2] == ["norm.weight", "norm.bias"]
            return super().forward(x) + sum(p.square().sum() for p in self.parameters())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Part(7) for _ in range(2))

    def forward(self, x):
        own = [*self.inp.parameters(), *self.out.parameters()]
        assert {id(param) for param in own} <= {id(param) for param in self.parameters()}
        assert next(self.parameters()).shape == (7, 5)
        return super().forward(x) * own[0].square().mean() + sum(p.abs().sum() for p in own)


def looked_through():
    def script(model, rank):
        for step in range(2):
            model(batch(rank, step)).square().sum().backward()
            kinds = {type(param) for param in model.parameters()}
            assert kinds == {nn.Parameter}, kinds  # outside, parameters are what they were

    check_script(script, Penalised, {Penalised.Part})
    check_script(script, Penalised, set())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inside_its_forward_a_module_finds_its_own_parameters_whole(world_size):
    run_kept_ranks(looked_through, world_size)


def kept_leaves(use_orig_params):
    model = wrap(build(), use_orig_params=use_orig_params)
    kept = []
    up = model.module.blocks[1].module.up
    up.register_forward_hook(lambda module, args, out: kept.append(module.weight))
    model(batch(dist.get_rank())).sum().backward()
    with torch.no_grad():
        if dist.get_world_size() > 1 and _torch.swap_storages is not None:
            assert not torch.isfinite(kept[0].clone()).any()
        for weight in (kept[0], kept[0].detach()):
            for touch in (*TOUCHES.values(), torch.exp, torch.norm, lambda w: w + 1, torch.sort):
                with contextlib.suppress(RuntimeError):
                    touch(weight)
    model(batch(dist.get_rank())).sum().backward()
    state = model.state_dict()
    assert all(value.isfinite().all() for value in state.values()) or dist.get_world_size() == 1


@pytest.mark.skipif(
    _torch.swap_storages is None, reason="freed storages point nowhere before torch 2.13"
)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weight_that_a_hook_kept_is_no_number_once_freed_and_never_a_crash(
    world_size, use_orig_params
):
    run_ranks(kept_leaves, world_size, use_orig_params)


def kept_leaf(model):
    kept = []
    up = model.module.blocks[1].module.up
    hook = up.register_forward_hook(lambda module, args, out: kept.append(module.weight.detach()))
    model(batch(dist.get_rank())).sum().backward()
    hook.remove()
    return kept[0]


def written_when_freed(use_orig_params):
    if _torch.swap_storages is None:
        return
    written = kept_leaf(wrap(build(), use_orig_params=use_orig_params))
    written.fill_(1.0)
    assert written.isfinite().all()  # in a page of its own
    assert kept_leaf(wrap(build(), use_orig_params=use_orig_params)).isnan().all()
    assert written.isnan().all()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_write_to_a_freed_weight_leaves_those_of_later_models_no_numbers(
    world_size, use_orig_params
):
    run_kept_ranks(written_when_freed, world_size, use_orig_params)
