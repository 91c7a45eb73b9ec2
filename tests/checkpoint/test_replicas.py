"""Saves by the ranks of one replica: whole or refused, never with some of the optimizer's state missing in silence."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy, checkpoint
from fsdp.errors import ConfigError, ShardMismatchError
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.checkpoint.support import assert_same, whole
from tests.support.ranks import run_ranks, run_ranks_outcomes

REPLICAS = ((0, 1), (2, 3))
MAKERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "whole": lambda model: WholeParamOptimizer(model, torch.optim.Adafactor, lr=0.1),
}


def trained(kind, orig, seed=0, steps=1):
    """Two replicas of two ranks each."""
    torch.manual_seed(seed)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = FSDP(
        nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        use_orig_params=orig,
    )
    optimizer = MAKERS[kind](model)
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def groups_of(members):
    """This rank's place in ``members``, and a group of each."""
    groups = [dist.new_group(ranks) for ranks in members]
    places = [place for place, ranks in enumerate(members) if dist.get_rank() in ranks]
    return (places[0] if places else None), groups


def saves(folder, kind, orig, members, how="save"):
    """Each of ``members`` calls with its own group and folder; others do not call."""
    model, optimizer = trained(kind, orig)
    place, groups = groups_of(members)
    if place is None:
        return None
    save = getattr(checkpoint, how)
    save(folder / str(place), model, optimizer, process_group=groups[place])
    return whole(model, optimizer)


@pytest.mark.parametrize(("orig", "how"), [(False, "save"), (True, "async_save")])
@pytest.mark.parametrize("members", [REPLICAS, [REPLICAS[1]], [(0, 1, 2)]], ids=str)
def test_a_save_without_ranks_that_own_states_is_refused_on_every_rank_before_anything_is_written(
    tmp_path, orig, members, how
):
    outcomes = run_ranks_outcomes(saves, 4, tmp_path, "whole", orig, members, how, timeout=20)
    for ranks in members:
        lacking = tuple(rank for rank in range(4) if rank not in ranks)
        named = ", ".join(map(str, lacking))
        for outcome in (outcomes[rank] for rank in ranks):
            assert outcome.raised(ConfigError), outcome.traceback
            assert outcome.fields["ranks"] == lacking
            assert f"process_group lacks ranks {named}, and" in outcome.message
            assert "leave process_group out" in outcome.message
    assert not any(tmp_path.iterdir())


def loads(folder, kind, orig):
    found = []
    for place in range(len(REPLICAS)):
        model, optimizer = trained(kind, orig, seed=1, steps=0)
        checkpoint.load(folder / str(place), model, optimizer)
        found.append(whole(model, optimizer))
    return found


@pytest.mark.parametrize("orig", [False, True])
def test_each_replica_saves_all_there_is_where_every_rank_has_a_part_of_each_state(tmp_path, orig):
    expected = run_ranks(saves, 4, tmp_path, "adamw", orig, REPLICAS)[0]
    for found in run_ranks(loads, 4, tmp_path, "adamw", not orig)[0]:
        assert_same(expected, found)


def waits_for_the_others(folder, orig):
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    model, optimizer = trained("adamw", orig)
    place, groups = groups_of(REPLICAS)
    if place:
        return
    checkpoint.save(folder / "model", model, process_group=groups[place])
    with pytest.raises(ShardMismatchError, match=r"checkpoint\.save.*ranks \[[23]\] did not"):
        checkpoint.save(folder / "both", model, optimizer, process_group=groups[place])


@pytest.mark.parametrize("orig", [False, True])
def test_a_replica_saves_a_model_alone_and_an_optimizer_only_with_the_others(tmp_path, orig):
    run_ranks(waits_for_the_others, 4, tmp_path, orig)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
