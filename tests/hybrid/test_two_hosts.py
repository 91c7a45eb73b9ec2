"""Hybrid sharding on two hosts: network namespaces joined by a link, two ranks in each.

Groups follow LOCAL_WORLD_SIZE, training equals the dense model, and the link carries the sums of shards only: no
parameter ever crosses it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import TRAINED, assert_close
from tests.support.models import entry
from tests.support.oracles import Recipe, train_dense, wrap_entry
from tests.support.ranks import run_ranks
from tools.bench import hosts

WORLD, PER_HOST = 4, 2
WIDTH = 96


@pytest.fixture
def two_hosts():
    """Names of two namespaces, 5 Gbit/s between them; skips, saying why, where the machine does not let us."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(f"two hosts: {reason}")
    made = hosts.linked_hosts(5.0)
    try:
        names = made.__enter__()
    except RuntimeError as error:
        if "not permitted" not in str(error) and "denied" not in str(error):
            raise
        pytest.skip(f"two hosts: root, but without the right to make network namespaces ({error})")
    yield names
    made.__exit__(None, None, None)


def join_from(names, folder):
    """Be one of four ranks, on the host that it belongs to, as torchrun would start it there."""
    rank = dist.FileStore(str(folder / "ranks"), WORLD).add("next", 1) - 1
    hosts.enter(names[rank // PER_HOST])
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.INTERFACE
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_HOST)
    os.environ["FSDP_SHARED_MEMORY"] = "0"  # both hosts are one machine, and would find each other
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    return rank


def sent_over_the_link():
    """Bytes that this host has sent so far."""
    with Path("/proc/self/net/dev").open() as table:
        for line in table:
            name, _, numbers = line.partition(":")
            if name.strip() == hosts.INTERFACE:
                return int(numbers.split()[8])
    raise AssertionError("no link")


def trained(names, folder, strategy):
    rank = join_from(names, folder)
    item, recipe = entry("gpt_tied"), Recipe(steps=3, clip=0.1)
    dense = train_dense("gpt_tied", WORLD, recipe)
    found = []
    for orig in (False, True):
        model = wrap_entry(
            item,
            item.build(seed=rank),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
            sync_module_states=True,
        )
        assert model.world_size == PER_HOST
        assert dist.get_process_group_ranks(model.process_group) == [
            rank // PER_HOST * PER_HOST + place for place in range(PER_HOST)
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        norms = []
        for step in range(recipe.steps):
            optimizer.zero_grad()
            item.loss(model, item.make_batch(rank, step)).backward()
            norms.append(model.clip_grad_norm_(recipe.clip).item())
            optimizer.step()
        assert norms == pytest.approx(dense.norms, rel=1e-5)
        assert_close(dense.params, dict(model.state_dict()), TRAINED)
        found.append(norms)
    return found


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_training_on_two_hosts_is_the_dense_models(two_hosts, tmp_path, strategy):
    by_rank = run_ranks(trained, WORLD, two_hosts, tmp_path, strategy, backend=None)
    assert all(norms == by_rank[0] for norms in by_rank)


def traffic(names, folder):
    """What each strategy sends over the link in a step, in units of the parameters' bytes, from this host."""
    rank = join_from(names, folder)
    shares = {}
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(12)))
        nbytes = sum(param.numel() for param in plain.parameters()) * 4
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(plain, auto_wrap_policy=policy, sharding_strategy=strategy)
        x = torch.randn(2, WIDTH)
        for _ in range(2):  # the first step meets, agrees and connects
            dist.barrier()
            before = sent_over_the_link()
            dist.barrier()  # nobody on this host sends before both have looked
            model(x).sum().backward()
            dist.barrier()
            shares[strategy.name] = (sent_over_the_link() - before) / nbytes
            dist.barrier()
    return rank, shares


def test_the_link_carries_sums_of_shards_and_no_parameters(two_hosts, tmp_path):
    for _, shares in run_ranks(traffic, WORLD, two_hosts, tmp_path, backend=None):
        # Hybrid: two ranks exchange half of the gradients each.  Full: two gathers and a reduction, two ranks that send
        # a quarter to two on the other host each.
        assert 0.9 < shares["HYBRID_SHARD"] < 1.4
        assert 2.8 < shares["FULL_SHARD"] < 3.8
