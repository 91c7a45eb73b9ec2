"""``no_sync`` and accumulation: the sum of what one process would have, no communication, in the reduce dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.recording import Event, Recording
from fsdp.errors import TrainingStateError
from tests.support.compare import GRADIENTS, TRAINED, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_ranks

EXPOSURES = (False, True)


def backwards(pattern, item):
    """One backward a letter: ``n`` inside no_sync, ``s`` outside."""

    def script(model, rank):
        for step, letter in enumerate(pattern):
            loss = item.loss  # bound before the context, which only matters for the wrapper
            if letter == "n" and isinstance(model, FSDP):
                with model.no_sync():
                    loss(model, item.make_batch(rank, step)).backward()
            else:
                loss(model, item.make_batch(rank, step)).backward()

    return script


def sums(strategy, names, patterns):
    ranks = range(dist.get_world_size())
    for name in names:
        item = entry(name)
        for pattern in patterns:
            script = backwards(pattern, item)
            expected = mean_grads(item.build(), script, ranks)
            for orig in EXPOSURES:
                model = wrap_entry(
                    item,
                    item.build(),
                    sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=orig,
                )
                script(model, dist.get_rank())
                try:
                    assert_close(expected, full_grads(model), GRADIENTS, none_is_zero=not orig)
                except AssertionError as error:
                    raise AssertionError(f"{name} {pattern} orig={orig}: {error}") from None


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_the_sum_over_micro_batches(strategy, world_size):
    run_ranks(sums, world_size, strategy, ["gpt_tied", "lora", "conv"], ["sns", "nns", "ss"])


def test_micro_batches_that_use_different_parameters_add_up():
    """Each micro-batch goes through another expert; the last one through none."""
    run_ranks(sums, 2, "FULL_SHARD", ["experts"], ["nnns", "snsn s".replace(" ", ""), "sss"])


def record(model):
    events: list[Event] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = Recording(unit.shard, unit.name, events)
        unit.replicate = Recording(unit.replicate, unit.name, events)
    return events


def silence():
    item = entry("mlp")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = wrap_entry(item, item.build(), sharding_strategy=ShardingStrategy[strategy])
        events = record(model)
        backwards("nn", item)(model, dist.get_rank())
        assert {event.op for event in events} <= {"all_gather"}, strategy
        events.clear()
        backwards("s", item)(model, dist.get_rank())
        reduces = [event.unit for event in events if event.op in ("reduce_scatter", "all_reduce")]
        assert len(reduces) == len(FSDP.fsdp_modules(model)), strategy


def test_no_gradient_is_communicated_inside_no_sync_and_all_in_one_reduction_a_unit_after_it():
    run_ranks(silence, 2)


def low_precision_sum():
    """1 + 40 * 2**-7 needs float32: in bfloat16 every addend of 2**-8 would be lost."""
    for orig in EXPOSURES:
        layer = torch.nn.Linear(3, 1, bias=False)
        model = FSDP(
            layer,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
            use_orig_params=orig,
        )
        with model.no_sync():
            model(torch.ones(1, 3)).sum().backward()
            for _ in range(39):
                model(torch.full((1, 3), 2.0**-9)).sum().backward()
        model(torch.full((1, 3), 2.0**-9)).sum().backward()
        (grad,) = full_grads(model).values()
        assert torch.equal(grad, torch.full((1, 3), 1 + 40 * 2.0**-9)), grad


def test_accumulation_is_in_the_reduce_dtype_not_in_the_compute_dtype():
    run_ranks(low_precision_sum, 2)


def restored():
    item = entry("mlp")
    rank = dist.get_rank()
    model = wrap_entry(item, item.build(), use_orig_params=True)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    with model.no_sync(), model.no_sync():
        pass
    backwards("s", item)(model, rank)
    expected = mean_grads(item.build(), backwards("s", item), range(dist.get_world_size()))
    assert_close(expected, full_grads(model), GRADIENTS)

    refused = []

    def hook(_module, _args):
        with pytest.raises(TrainingStateError, match="no_sync"), model.no_sync():
            pass
        refused.append(True)

    handle = model.blocks[0].register_forward_pre_hook(hook)
    model(item.make_batch(rank, 0)[0])
    handle.remove()
    assert refused


def test_no_sync_ends_with_its_context_even_by_an_exception_and_is_refused_in_a_forward():
    run_ranks(restored, 2)


def of_an_inner_unit():
    """Only that unit keeps its gradients back; the next synchronised backward brings them."""
    item = entry("mlp")
    rank = dist.get_rank()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        with model.blocks[1].no_sync():
            backwards("s", item)(model, rank)
        item.loss(model, item.make_batch(rank, 1)).backward()
        expected = mean_grads(item.build(), backwards("ss", item), range(dist.get_world_size()))
        assert_close(expected, full_grads(model), GRADIENTS)


def test_no_sync_of_an_inner_unit_holds_back_that_unit_only():
    run_ranks(of_an_inner_unit, 2)


def zeroed(set_to_none):
    item = entry("mlp")
    rank = dist.get_rank()
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        backwards("s", item)(model, rank)
        model.zero_grad(set_to_none=set_to_none)
        backwards("ns", item)(model, rank)
        expected = mean_grads(item.build(), backwards("ss", item), range(dist.get_world_size()))
        assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroing_before_an_accumulation_leaves_nothing_of_the_step_before(set_to_none):
    run_ranks(zeroed, 2, set_to_none)


def one_forward_in_each():
    """Forward inside, backward outside of no_sync, and the other way round: what counts is the backward."""
    item = entry("mlp")
    rank = dist.get_rank()
    model = wrap_entry(item, item.build())
    with model.no_sync():
        first = item.loss(model, item.make_batch(rank, 0))
    second = item.loss(model, item.make_batch(rank, 1))
    with model.no_sync():
        second.backward()
    first.backward()
    expected = mean_grads(item.build(), backwards("ss", item), range(dist.get_world_size()))
    assert_close(expected, full_grads(model), GRADIENTS)


def test_the_place_of_the_backward_decides_whether_it_synchronises():
    run_ranks(one_forward_in_each, 2)


def training():
    item = entry("gpt_tied")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = item.build()
    models = {"": dense}
    for pattern in ("nns", "sss"):
        models[pattern] = wrap_entry(item, item.build(), use_orig_params=True)
    for pattern, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            if model is dense:
                grads = mean_grads(model, backwards("sss", item), range(world_size))
                for name, grad in grads.items():
                    model.get_parameter(name).grad = grad
            else:
                backwards(pattern, item)(model, rank)
            optimizer.step()
        assert_close(dict(dense.state_dict()), dict(model.state_dict()), TRAINED)


def test_training_is_the_same_however_micro_batches_synchronise():
    run_ranks(training, 3)
