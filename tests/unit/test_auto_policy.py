"""``auto_wrap_policy="auto"`` picks blocks and large layers, from sizes that grow with the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError, ConfigTypeError
from fsdp.plan.auto import AutoWrapPolicy, efficient_bytes
from tests.support.models import Gpt, GptBlock
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.scripts import Net, assert_same_gradients, batch, build, dense_grads, full_grads


class Stage(nn.Module):
    def __init__(self, blocks, dim):
        super().__init__()
        self.blocks = nn.ModuleList(Inner(dim) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Inner(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Pyramid(nn.Module):
    """Stages of which one holds most of the model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.stages = nn.ModuleList([Stage(1, 8), Stage(6, 8), Stage(1, 8)])
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def chosen(model, least_bytes):
    policy = AutoWrapPolicy(least_bytes)
    picked = policy._run_policy(model, set(), {})
    names = {module: name for name, module in model.named_modules()}
    assert {names[module] for module in picked} == set(policy.reasons)
    return policy.reasons


def test_blocks_of_a_stack_are_units():
    reasons = chosen(Gpt(), 1)
    blocks = [name for name, module in Gpt().named_modules() if isinstance(module, GptBlock)]
    assert [name for name in reasons if "GptBlock" in reasons[name]] == blocks
    assert reasons[blocks[0]] == f"one of {len(blocks)} GptBlock"


def test_a_block_that_is_most_of_the_model_is_entered():
    reasons = chosen(Pyramid(), 1)
    assert {name for name in reasons if name.startswith("stages.1")} == {
        f"stages.1.blocks.{index}" for index in range(6)
    }
    assert reasons["stages.0"] == "one of 3 Stage"


def test_large_layers_are_units_unless_they_are_tied():
    assert chosen(Pyramid(), 1000)["embed"] == "a large Embedding"
    tied = Pyramid()
    tied.head.weight = tied.embed.weight
    assert not {"embed", "head"} & set(chosen(tied, 1000))


def test_small_blocks_are_merged_into_what_is_around_them():
    reasons = chosen(Pyramid(), 2000)
    assert reasons["stages.1"] == "Stage around blocks that are small"
    assert not any("blocks" in name for name in reasons)


def test_a_model_below_the_least_size_is_one_unit():
    assert chosen(Pyramid(), 1 << 30) == {}


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_least_size_grows_with_the_number_of_ranks_of_a_network(on_cpu):
    sizes = [efficient_bytes(ranks, on_cpu=on_cpu) for ranks in (2, 4, 8)]
    assert sizes == sorted(sizes)
    far = [efficient_bytes(ranks, on_cpu=on_cpu) for ranks in (16, 64, 256, 1024)]
    assert far == sorted(far)


def trains(policy):
    def script(model, rank):
        model(batch(rank)).square().sum().backward()

    world_size = torch.distributed.get_world_size()
    model = FSDP(build(Net), auto_wrap_policy=policy)
    expected = dense_grads(build(Net), script, world_size)
    script(model, torch.distributed.get_rank())
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)
    return len(FSDP.fsdp_modules(model))


def test_training_under_the_policy_equals_the_unsharded_model():
    assert run_ranks(trains, 2, "auto") == [1, 1]  # a tiny model: no gather of a part would pay
    assert run_ranks(trains, 2, AutoWrapPolicy(200)) == [4, 4]


def test_another_string_is_refused():
    outcome = run_ranks_outcomes(trains, 1, "automatic")[0]
    assert outcome.error_type in (ConfigError.__name__, ConfigTypeError.__name__)
    assert "auto" in outcome.message
