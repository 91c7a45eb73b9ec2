"""Groups that are not the world: units shard and average over their own group only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import DeviceError
from fsdp.init.build import compute_device
from fsdp.init.ignored import resolve_ignored
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks

EXPOSURES = (False, True)


def halves(strategy):
    """Ranks 0 and 3 train one model, rank 2 and 1 another; names of groups and order of ranks differ."""
    members = ([0, 3], [1, 2])
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if dist.get_rank() in members[0] else 1
    item = entry("gpt_tied")

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    expected = mean_grads(item.build(seed=mine), script, members[mine])
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(seed=mine),
            process_group=groups[mine],
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        assert model.world_size == 2
        assert model.rank == members[mine].index(dist.get_rank())
        script(model, dist.get_rank())
        assert_close(expected, full_grads(model), GRADIENTS)
        norm = model.clip_grad_norm_(1e9)
        squares = sum(grad.square().sum() for grad in expected.values())
        torch.testing.assert_close(norm, squares.sqrt(), rtol=1e-4, atol=0)
        assert_bitwise(dict(item.build(seed=mine).state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_two_halves_train_two_models(strategy):
    run_kept_ranks(halves, 4, strategy)


def one_rank_each():
    """A group of one: nothing is communicated, everything works."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    item = entry("mlp")
    expected = mean_grads(
        item.build(), lambda m, r: item.loss(m, item.make_batch(r, 0)).backward(), [rank]
    )
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), process_group=groups[rank], use_orig_params=orig)
        item.loss(model, item.make_batch(rank, 0)).backward()
        assert_close(expected, full_grads(model), GRADIENTS)


def test_groups_of_one_rank_train_alone():
    run_kept_ranks(one_rank_each, 2)


def mixed():
    """An inner unit sharded over a part of the ranks, inside a root sharded over all."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    item = entry("mlp")
    plain = item.build()
    plain.blocks[1] = FSDP(plain.blocks[1], process_group=pairs[rank // 2])
    model = FSDP(plain)

    def script(m, who):
        item.loss(m, item.make_batch(who, 0)).backward()

    script(model, rank)
    everyone = mean_grads(item.build(), script, range(4))
    pair = mean_grads(item.build(), script, [rank // 2 * 2, rank // 2 * 2 + 1])
    expected = {name: (pair if "blocks.1" in name else everyone)[name] for name in everyone}
    assert_close(expected, full_grads(model), GRADIENTS)


def test_nested_units_may_have_groups_of_their_own():
    run_kept_ranks(mixed, 4)


def sub_world():
    """A rank outside of the group cannot build the wrapper, and hears so."""
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        wrap_entry(entry("mlp"), entry("mlp").build(), process_group=group)
        return
    with pytest.raises(ValueError, match="group"):
        wrap_entry(entry("mlp"), entry("mlp").build(), process_group=group)


def test_a_rank_outside_of_the_group_is_told_so():
    run_kept_ranks(sub_world, 2)


def on_the_cpu_beside_a_group_of_accelerators():
    plain = nn.Linear(3, 3)
    with pytest.raises(DeviceError, match="tensors on cpu.*device_id"):
        FSDP(plain)
    assert not plain._forward_pre_hooks
    assert plain(torch.ones(1, 3)).shape == (1, 3)


def beside_an_accelerator(expected):
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.current_device_index = lambda: 1
    nothing = resolve_ignored(nn.Linear(3, 3), None, None, is_wrapped=lambda _: False)
    for device_id, device in ((None, expected), (torch.device("cpu"), "cpu")):
        found = compute_device(nn.Linear(3, 3), device_id, nothing, dist.group.WORLD)
        assert found == torch.device(device)


@pytest.mark.parametrize(("backend", "expected"), [("cuda:gloo", "cuda:1"), ("gloo", "cpu")])
def test_a_module_on_the_cpu_goes_to_the_accelerator_that_the_group_needs(backend, expected):
    """``torch.cuda.set_device`` and ``init_process_group("nccl")`` say where it is to compute."""
    run_ranks(beside_an_accelerator, 1, expected, backend=backend)


def test_a_module_on_the_cpu_is_refused_where_the_group_only_knows_accelerators():
    """As NCCL is: ``init_process_group("nccl")`` and a module that nobody moved."""
    run_ranks(on_the_cpu_beside_a_group_of_accelerators, 2, backend="cuda:gloo")
