"""Embeddings as units: backwards that do without their values, and gradients that are sent from where they lie."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.recording import Event, Recording
from fsdp.plan.auto import AutoWrapPolicy
from fsdp.runtime.buffers import BufferPool
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_kept_ranks, run_ranks

BOTH = (False, True)


class Model(nn.Module):
    """Two embeddings, one of them after a layer that has run, and layers between."""

    def __init__(self, rows=7, width=5, *, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(rows, width)
        self.first = nn.Linear(width, width)
        self.others = nn.Embedding(rows, width, padding_idx=1)
        self.second = nn.Linear(width, width)
        self.recompute = recompute

    def forward(self, tokens):
        embedded = (
            checkpoint(self.tokens, tokens, use_reentrant=False)
            if self.recompute
            else self.tokens(tokens)
        )
        hidden = self.first(embedded).relu() + self.others(tokens.flip(0))
        return self.second(hidden).sin().sum()


def tokens_of(rank, step, rows=7):
    return torch.randint(rows, (6,), generator=torch.Generator().manual_seed(10 * rank + step))


def wrapped(model, *, lean=True, **kwargs):
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Linear}), **kwargs)
    if lean:
        model.module.tokens.set_unshard_in_backward(False)
        model.module.others.set_unshard_in_backward(False)
    return model


def script(model, rank, rows=7):
    for step in range(3):
        model(tokens_of(rank, step, rows)).backward()


def expected(rows=7, width=5):
    ranks = range(dist.get_world_size())
    return mean_grads(Model(rows, width), lambda m, rank: script(m, rank, rows), ranks)


def check(model, rows=7, width=5, tolerance=GRADIENTS):
    script(model, dist.get_rank(), rows)
    assert_close(expected(rows, width), full_grads(model), tolerance, none_is_zero=True)


def gradients():
    for orig in BOTH:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            for recompute in BOTH:
                check(
                    wrapped(
                        Model(recompute=recompute),
                        use_orig_params=orig,
                        sharding_strategy=ShardingStrategy[strategy],
                    )
                )
        check(wrapped(Model(), use_orig_params=orig, allow_unused="any_rank"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_a_gather_in_the_backward_an_embedding_has_the_same_gradient(world_size):
    run_kept_ranks(gradients, world_size)


def launches(lean):
    model = wrapped(Model(), lean=lean)
    events: list[Event] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Recording(unit.shard, unit.name, events)
    script(model, dist.get_rank())
    events.clear()
    model(tokens_of(dist.get_rank(), 9)).backward()
    gathers = [event.unit for event in events if event.op == "all_gather"]
    reductions = [event.unit for event in events if event.op == "reduce_scatter"]
    assert sorted(reductions) == ["first", "others", "second", "tokens"]
    assert gathers.count("first") == 2
    assert gathers.count("tokens") == gathers.count("others") == (1 if lean else 2)


@pytest.mark.parametrize("lean", BOTH)
def test_an_embedding_is_gathered_once_a_step_if_its_backward_does_without(lean):
    run_kept_ranks(launches, 2, lean)


class Own(nn.Embedding):
    """May do anything in its forward."""


def automatic():
    for orig in BOTH:
        model = Model()
        model.others = Own(7, 5, padding_idx=1, _weight=model.others.weight.detach().clone())
        model = FSDP(model, auto_wrap_policy=AutoWrapPolicy(1), use_orig_params=orig)
        check(model)
        inner = model.module
        assert [
            wrapper._unit.unshards_in_backward
            for wrapper in (inner.tokens, inner.others, inner.first, model)
        ] == [False, True, True, True]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_automatic_policy_gathers_an_embedding_for_the_forward_only(world_size):
    run_kept_ranks(automatic, world_size)


class Normed(nn.Module):
    """An embedding whose weight is made of other parameters, by a hook."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = norm(nn.Embedding(7, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.last(self.tokens(tokens)).sin().sum()


def made_of_others():
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm):
        for orig in BOTH:
            torch.manual_seed(dist.get_rank())
            model = FSDP(Normed(norm), auto_wrap_policy=AutoWrapPolicy(1), use_orig_params=orig)
            assert model.module.tokens._unit.unshards_in_backward
            model(tokens_of(dist.get_rank(), 0)).backward()


def test_the_automatic_policy_gathers_an_embedding_again_whose_weight_is_made_in_its_forward():
    run_kept_ranks(made_of_others, 2)


def read_again():
    for orig in BOTH:
        model = wrapped(Model(), lean=False, use_orig_params=orig)
        model.module.second.set_unshard_in_backward(False)  # whose backward reads the weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            script(model, dist.get_rank())
        model.reset()
        model.module.second.set_unshard_in_backward(True)
        model.zero_grad()
        check(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_backward_that_reads_what_it_does_without_is_refused_and_can_be_set_right(world_size):
    run_kept_ranks(read_again, world_size)


def copies():
    model = wrapped(Model())
    check(model)
    copied = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for other in (copied, loaded):
        assert not other.module.tokens._unit.unshards_in_backward
        assert other.module.first._unit.unshards_in_backward
        other.zero_grad()
        check(other)


def test_copies_and_pickles_keep_the_setting():
    run_kept_ranks(copies, 2)


ROWS, WIDTH = 3000, 96  # 288000 elements: worth no copy


def lone(rows, whole):
    """``whole``: how many of the embeddings' gradients are sent from where they lie, between hosts."""
    os.environ["FSDP_SHARED_MEMORY"] = "0"  # on one host none is copied (test_direct_sums)
    taken = []
    take = BufferPool.take

    def watched(pool, layout, dtype, device):
        taken.append(layout)
        return take(pool, layout, dtype, device)

    BufferPool.take = watched
    for orig in BOTH:
        for lean in BOTH:
            taken.clear()
            check(wrapped(Model(rows, WIDTH), lean=lean, use_orig_params=orig), rows, WIDTH)
            assert len(taken) == 3 * (4 - whole)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_gradient_of_a_large_lone_parameter_is_sent_from_where_it_lies(world_size):
    run_ranks(lone, world_size, ROWS, 2)


def test_one_that_does_not_divide_by_the_ranks_is_copied():
    run_ranks(lone, 5, ROWS + 1, 0)


def accumulated():
    for orig in BOTH:
        model = wrapped(Model(ROWS, WIDTH), use_orig_params=orig)
        rank = dist.get_rank()
        with model.no_sync():
            model(tokens_of(rank, 0, ROWS)).backward()
        for step in (1, 2):
            model(tokens_of(rank, step, ROWS)).backward()
        assert_close(expected(ROWS, WIDTH), full_grads(model), GRADIENTS, none_is_zero=True)


def test_accumulation_of_a_large_lone_parameter_is_exact():
    run_kept_ranks(accumulated, 2)


class Twin(nn.Module):
    """Two large parameters whose gradients autograd lets share memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Weight(), Weight()

    def forward(self, tokens):
        both = self.left().view(-1) + self.right().view(-1)
        return (both * tokens.sum()).sin().sum()


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self):
        return self.weight + 0.0


def shared():
    def of(model, rank):
        model(tokens_of(rank, 0)).backward()

    want = mean_grads(Twin(), of, range(dist.get_world_size()))
    for orig in BOTH:
        policy = ModuleWrapPolicy({Weight})
        model = FSDP(Twin(), auto_wrap_policy=policy, use_orig_params=orig)
        of(model, dist.get_rank())
        assert_close(want, full_grads(model), GRADIENTS)


def test_gradients_that_share_memory_are_both_right():
    run_kept_ranks(shared, 2)


def hooked():
    """A hook of the user's keeps the gradient that it is shown."""
    model = wrapped(Model(ROWS, WIDTH))
    seen = []
    inner = model.module.tokens.module
    inner.register_forward_pre_hook(
        lambda module, _: module.weight.register_hook(seen.append) and None
    )
    model(tokens_of(dist.get_rank(), 0, ROWS)).backward()
    model.zero_grad()
    kept = seen[0].clone()
    script(model, dist.get_rank(), ROWS)
    assert torch.equal(seen[0], kept)
    assert_close(expected(ROWS, WIDTH), full_grads(model), GRADIENTS, none_is_zero=True)


def test_a_gradient_that_a_hook_keeps_stays_as_it_was():
    run_kept_ranks(hooked, 2)


def low_precision():
    half = MixedPrecision(torch.bfloat16, torch.bfloat16)
    model = wrapped(Model(ROWS, WIDTH), mixed_precision=half)
    script(model, dist.get_rank(), ROWS)
    for name, grad in full_grads(model).items():
        want = expected(ROWS, WIDTH)[name]
        assert F.cosine_similarity(grad.flatten(), want.flatten(), 0) > 0.99, name


def test_low_precision_is_reduced_from_where_it_lies_too():
    run_kept_ranks(low_precision, 2)
