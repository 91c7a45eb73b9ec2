"""Offloading changes where tensors rest and nothing else.

Oracles: the dense one-process model (the bounds of tests/parity), and the same script without offloading, bit by bit.
"""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
import torch.distributed as dist

import fsdp.flat.home
from fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm.process_group import PointToPointCollectives
from fsdp.config import StateDictType
from fsdp.flat.home import is_mapped
from fsdp.optim.paged import PagedOptimizer
from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.parity.test_training import TRAINED
from tests.support.compare import assert_bitwise, assert_close
from tests.support.models import ENTRIES
from tests.support.oracles import (
    Case,
    Recipe,
    full_grads,
    full_params,
    train_cases,
    train_dense,
    wrap_entry,
)
from tests.support.ranks import run_kept_ranks, run_ranks

KINDS = {
    "params": {"offload_params": True},
    "optimizer": {"offload_optimizer": True},
    "files": {"offload_params": True, "folder": tempfile.gettempdir()},
    "files_optimizer": {"offload_optimizer": True, "folder": tempfile.gettempdir()},
}
EXPOSURES = (False, True)
RECIPE = Recipe(steps=3, micro_batches=2, clip=0.1)


def map_everything():
    """Small tensors too, so that tiny models say something about mapped files."""
    fsdp.flat.home._SMALLEST_MAPPED = 1


# -- against the dense model -----------------------------------------------------------------------------------------


@functools.cache
def cases(world_size):
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    return [
        Case(name, strategy, "blocks", orig, RECIPE, (("cpu_offload", CPUOffload(**KINDS[kind])),))
        for name in ("mlp", "odd")
        for strategy in strategies
        for kind in ("params", "optimizer")
        for orig in EXPOSURES
    ]


def train(world_size):
    map_everything()
    return train_cases(cases(world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_one_process_training(world_size):
    by_rank = run_ranks(train, world_size, world_size, timeout=110)
    for case in cases(world_size):
        results = [found[case] for found in by_rank]
        assert not any(result.error for result in results), results[0].error
        expected = train_dense(case.entry, world_size, case.recipe)
        assert_close(expected.params, results[0].params, TRAINED)
        for result in results:
            assert result.norms == pytest.approx(expected.norms, rel=1e-4)
            assert_bitwise(results[0].params, result.params)


# -- against the same without offloading -----------------------------------------------------------------------------


def wrap(offload, orig, strategy="FULL_SHARD", entry="mlp", **kwargs):
    item = ENTRIES[entry]
    return item, wrap_entry(
        item,
        item.build(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        cpu_offload=offload,
        **kwargs,
    )


def backward(item, model, step):
    item.loss(model, item.make_batch(dist.get_rank(), step)).backward()


def accumulated(offload, orig, strategy, pattern):
    """Gradients after backwards outside (``s``) and inside (``n``) of ``no_sync``, then a step, then the same again."""
    item, model = wrap(offload, orig, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    found = []
    for round_ in range(2):
        optimizer.zero_grad()
        for step, kind in enumerate(pattern):
            if kind == "n":
                with model.no_sync():
                    backward(item, model, 10 * round_ + step)
            else:
                backward(item, model, 10 * round_ + step)
        found.append({k: v for k, v in full_grads(model).items() if v is not None})
        found.append({"norm": model.clip_grad_norm_(0.05)})
        optimizer.step()
    found.append(full_params(model))
    return found


def accumulated_alike():
    map_everything()
    patterns = ["ss", "nns", "snsns"]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for orig in EXPOSURES:
            for pattern in patterns:
                expected = accumulated(CPUOffload(), orig, strategy, pattern)
                for kind in ("params", "files_optimizer"):
                    actual = accumulated(CPUOffload(**KINDS[kind]), orig, strategy, pattern)
                    for one, other in zip(expected, actual, strict=True):
                        assert_bitwise(one, other)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_accumulate_in_every_mixture_of_sync_and_no_sync(world_size):
    run_ranks(accumulated_alike, world_size, timeout=110)


def saved_and_loaded(offload, orig):
    """Everything that a run saves, then a run that goes on from it."""
    found = []
    item, model = wrap(offload, orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    backward(item, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    _, other = wrap(offload, orig)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    for kind in StateDictType:
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            state = model.state_dict()
            found.append(
                {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
            )
            other.load_state_dict(state)
            states = FSDP.optim_state_dict(model, optimizer)
            other_optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(other, other_optimizer, states)
            )
    with FSDP.summon_full_params(other):
        for param in other.parameters():
            param.data.mul_(0.5)
    backward(item, other, 1)
    other_optimizer.step()
    found.append(full_params(other))
    return found


def saved_alike():
    map_everything()
    for orig in EXPOSURES:
        expected = saved_and_loaded(CPUOffload(), orig)
        for kind in ("params", "optimizer", "files"):
            for one, other in zip(
                expected, saved_and_loaded(CPUOffload(**KINDS[kind]), orig), strict=True
            ):
                assert_bitwise(one, other)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_state_dict_is_that_of_the_model_without_offloading(world_size):
    run_ranks(saved_alike, world_size)


def low_precision(offload, orig, hybrid):
    kwargs = {"process_group": None}
    if hybrid:
        ranks = dist.get_rank() // 2 * 2
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        kwargs["process_group"] = (pairs[ranks // 2], across[dist.get_rank() % 2])
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategy = "HYBRID_SHARD" if hybrid else "FULL_SHARD"
    item, model = wrap(offload, orig, strategy, mixed_precision=policy, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = ShardedGradScaler("cpu", init_scale=16.0, growth_interval=2)
    for step in range(3):
        loss = item.loss(model, item.make_batch(dist.get_rank(), step)).float()
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 0:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            item.loss(model, item.make_batch(dist.get_rank(), step))
        model.train()
    return {"scale": torch.tensor(scaler.get_scale()), **full_params(model)}


def low_precision_alike(hybrid):
    for orig in EXPOSURES:
        expected = low_precision(CPUOffload(), orig, hybrid)
        for kind in ("params", "optimizer"):
            assert_bitwise(expected, low_precision(CPUOffload(**KINDS[kind]), orig, hybrid))


@pytest.mark.parametrize(("world_size", "hybrid"), [(2, False), (4, True)])
def test_masters_on_the_host_are_gathered_in_the_low_dtype_and_scaled_losses_skip_alike(
    world_size, hybrid
):
    run_kept_ranks(low_precision_alike, world_size, hybrid)


def empty_shards():
    """A rank that holds nothing of any parameter trains along, with fused optimizers and files."""
    map_everything()
    for kind in KINDS.values():
        for orig in EXPOSURES:
            torch.manual_seed(0)
            layer = torch.nn.Linear(1, 1, bias=False)
            model = FSDP(layer, use_orig_params=orig, cpu_offload=CPUOffload(**kind))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            if "folder" in kind:
                optimizer = PagedOptimizer(optimizer, folder=kind["folder"])
            before = full_params(model)["weight"]
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
                model.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert full_params(model)["weight"] < before


def test_a_rank_without_elements_trains_along():
    run_ranks(empty_shards, 3)


def never_sent():
    """Collectives are given memory of the device: what rests in a file is seen by none of them."""
    map_everything()

    def checking(method):
        @functools.wraps(method)
        def checked(self, *args, **kwargs):
            for tensor in torch.utils._pytree.tree_leaves(args):
                held = [tensor]
                if not isinstance(tensor, torch.Tensor):
                    held = [getattr(tensor, name, None) for name in ("whole", "out")]
                for each in held:
                    assert not isinstance(each, torch.Tensor) or not is_mapped(each), method
            return method(self, *args, **kwargs)

        return checked

    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange"):
        setattr(PointToPointCollectives, name, checking(getattr(PointToPointCollectives, name)))
    for orig in EXPOSURES:
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            accumulated(CPUOffload(**KINDS["files"]), orig, strategy, "sns")
        saved_and_loaded(CPUOffload(**KINDS["files"]), orig)


def test_nothing_that_rests_on_the_host_is_given_to_a_collective():
    run_ranks(never_sent, 2)


def rest():
    for orig in EXPOSURES:
        item, model = wrap(CPUOffload(**KINDS["files"]), orig)
        map_everything()
        item, model = wrap(CPUOffload(**KINDS["files"]), orig)
        optimizer = PagedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            folder=tempfile.gettempdir(),
            part_bytes=100,
        )
        backward(item, model, 0)
        optimizer.step()
        for param in model.parameters():
            if param.numel():
                states = [v for v in optimizer.state[param].values() if v.dim()]
                assert all(map(is_mapped, [param.data, param.grad, *states]))


def test_shards_gradients_and_states_rest_in_files():
    run_ranks(rest, 2)
