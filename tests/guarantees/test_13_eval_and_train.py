"""Hypothesis: any mixture of steps, evaluation, saving, summoning and loading equals the plain model.

Oracle: the dense model, doing the same with the batches of all ranks.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.compare import Tolerance, assert_close
from tests.support.models import ENTRIES
from tests.support.oracles import wrap_entry
from tests.support.ranks import run_kept_ranks
from tests.support.strategies import scripts

# SGD with a rate of 0.05: a parameter moves by far less than its size, and errors of gradients by a twentieth.
LOOSE = Tolerance(rtol=1e-3, atol=2e-5)


class Player:
    """Carries out one action after the other on a dense or a wrapped model."""

    def __init__(self, item, model, ranks):
        self.item, self.model, self.ranks = item, model, ranks
        trainable = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=0.05)
        self.results = []

    def backward(self, step):
        for rank in self.ranks:
            loss = self.item.loss(self.model, self.item.make_batch(rank, step)) / len(self.ranks)
            loss.backward()

    def evaluate(self, step):
        self.results.append(
            self.item.loss(self.model, self.item.make_batch(0, step)).detach().clone()
        )

    def play(self, action, step):
        getattr(self, action)(step)

    def step(self, step, *, clip=False):
        self.backward(step)
        if clip:
            self.results.append(self.clip())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped_step(self, step):
        self.step(step, clip=True)

    def clip(self):
        if isinstance(self.model, FSDP):
            return self.model.clip_grad_norm_(0.5)
        params = [param for param in self.model.parameters() if param.numel()]
        return nn.utils.clip_grad_norm_(params, 0.5)

    def backward_no_sync(self, step):
        with self.model.no_sync() if isinstance(self.model, FSDP) else nullcontext():
            self.backward(step)

    def forward_no_grad(self, step):
        with torch.no_grad():
            self.evaluate(step)

    def forward_inference(self, step):
        with torch.inference_mode():
            self.evaluate(step)

    def forward_eval(self, step):
        self.model.eval()
        self.evaluate(step)
        self.model.train()

    @torch.no_grad()
    def inner_forward(self, step):
        block = next(m for m in self.model.modules() if type(m) in self.item.blocks)
        if hasattr(block, "up"):
            self.results.append(block(torch.ones(2, 7)).clone())

    def state_dict(self, step):
        self.results.append(sum(value.float().sum() for value in self.model.state_dict().values()))

    def summon(self, step):
        with FSDP.summon_full_params(self.model):
            self.scale(0.8)

    def load(self, step):
        self.model.load_state_dict(self.item.build(seed=step).state_dict())

    def zero_grad(self, step):
        self.optimizer.zero_grad()

    def scale_in_place(self, step):
        self.scale(1.25)

    @torch.no_grad()
    def scale(self, factor):
        for param in self.model.parameters():
            if param.requires_grad:
                param.mul_(factor)


def play(name, script, strategy, orig):
    item = ENTRIES[name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = Player(item, item.build(), range(world_size))
    model = wrap_entry(
        item,
        item.build(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
    )
    wrapped = Player(item, model, [rank])
    for step, action in enumerate([*script, "step", "state_dict"]):
        print(action, flush=True)
        dense.play(action, step)
        wrapped.play(action, step)
    for want, got in zip(dense.results, wrapped.results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    params = dict(item.build().named_parameters(remove_duplicate=False))
    expected, state = dense.model.state_dict(), model.state_dict()
    assert_close({k: expected[k] for k in params}, {k: state[k] for k in params}, LOOSE)
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._handles:
            assert handle.aliased or not handle.unsharded.flat.untyped_storage().nbytes()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    name=st.sampled_from(["mlp", "gpt_tied", "lora", "odd", "shared", "outputs"]),
    script=scripts(),
    strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    orig=st.booleans(),
)
# What the first forward leaves gathered is not what the second one has to compute with.
@example(
    name="mlp",
    script=["forward_eval", "scale_in_place", "forward_no_grad"],
    strategy="SHARD_GRAD_OP",
    orig=True,
)
def test_any_script_leaves_what_the_plain_model_has(world_size, name, script, strategy, orig):
    run_kept_ranks(play, world_size, name, script, strategy, orig, timeout=30)
