"""Ranks that wait for each other at different collective calls, or before one, learn of it in seconds."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import ShardMismatchError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks_outcomes
from tests.support.scripts import Block, Net, batch


def step(model, rank):
    model(batch(rank)).sum().backward()


def load_on_one_rank(rank, orig):
    model = FSDP(Net(), use_orig_params=orig)
    state = model.state_dict()
    if rank == 1:
        model.load_state_dict(state)
    step(model, rank)


def synchronise_one_rank(rank, orig):
    step(FSDP(Net(), use_orig_params=orig, sync_module_states=rank == 1), rank)


def change_one_rank(rank, orig):
    model = FSDP(Net(), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))
    step(model, rank)
    if rank == 1:
        model.module.blocks = nn.ModuleList(reversed(list(model.module.blocks)))
    step(model, rank)


def shard_all_but_one_rank(rank, orig):
    strategy = ShardingStrategy.NO_SHARD if rank == 1 else ShardingStrategy.FULL_SHARD
    step(FSDP(Net(), use_orig_params=orig, sharding_strategy=strategy), rank)


def replicate_other_models(rank, orig):
    module = nn.Sequential(nn.Linear(5, 7 + rank), nn.Linear(7 + rank, 3))
    step(FSDP(module, use_orig_params=orig, sharding_strategy=ShardingStrategy.NO_SHARD), rank)


def run(program, orig):
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    warnings.simplefilter("ignore")  # that ranks are late
    program(torch.distributed.get_rank(), orig)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (load_on_one_rank, ["the first forward", "load_state_dict"]),
        (synchronise_one_rank, ["the first forward", "a broadcast of unit"]),
        (change_one_rank, ["the gather of unit", "the first forward"]),
        (shard_all_but_one_rank, ["different models", "FULL_SHARD", "NO_SHARD"]),
        (replicate_other_models, ["different models"]),
    ],
)
def test_ranks_at_different_calls_learn_of_it(program, said, orig):
    for outcome in run_ranks_outcomes(run, 2, program, orig, timeout=20):
        assert outcome.raised(ShardMismatchError)
        assert all(part in outcome.message for part in said)
