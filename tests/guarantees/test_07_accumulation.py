"""``no_sync`` and accumulation: the sum of what one process would have, no communication, in the reduce dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.errors import TrainingStateError, UsageError
from tests.dist.test_engine_features import record
from tests.support.compare import GRADIENTS, TRAINED, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

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
    run_kept_ranks(sums, world_size, strategy, ["gpt_tied", "lora", "conv"], ["sns", "nns", "ss"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_that_use_different_parameters_add_up(world_size):
    """Each micro-batch goes through another expert; the last one through none."""
    run_kept_ranks(sums, world_size, "FULL_SHARD", ["experts"], ["nnns", "snsns", "sss"])


def silence(use_orig_params):
    item = entry("mlp")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = wrap_entry(
            item,
            item.build(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        events = record(model)
        backwards("nn", item)(model, dist.get_rank())
        assert {event.op for event in events} <= {"all_gather"}, strategy
        events.clear()
        backwards("s", item)(model, dist.get_rank())
        # With original parameters one small message more, of units that nobody used, goes with the backward.
        reduced = [e.unit for e in events if "float32" in e.dtypes and e.op != "all_gather"]
        units = len(FSDP.fsdp_modules(model))
        assert len(reduced) == (units if dist.get_world_size() > 1 else 0), strategy


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_gradient_is_communicated_inside_no_sync_and_all_in_one_reduction_a_unit_after_it(
    world_size, use_orig_params
):
    run_kept_ranks(silence, world_size, use_orig_params)


def only_accumulated(use_orig_params):
    item = entry("mlp")
    model = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backwards("nn", item)(model, dist.get_rank())
    with pytest.raises(UsageError, match="no_sync"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match="unreduced"):
        optimizer.step()
    backwards("s", item)(model, dist.get_rank())
    assert model.clip_grad_norm_(1.0) > 0
    optimizer.step()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_and_stepping_after_no_sync_backwards_only_is_refused(world_size, use_orig_params):
    """For one rank as well, whose gradients would be whole: a script that is wrong for two is told by one."""
    run_kept_ranks(only_accumulated, world_size, use_orig_params)


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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulation_is_in_the_reduce_dtype_not_in_the_compute_dtype(world_size):
    run_kept_ranks(low_precision_sum, world_size)


def restored(use_orig_params):
    item = entry("mlp")
    rank = dist.get_rank()
    model = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
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


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_ends_with_its_context_even_by_an_exception_and_is_refused_in_a_forward(
    world_size, use_orig_params
):
    run_kept_ranks(restored, world_size, use_orig_params)


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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_of_an_inner_unit_holds_back_that_unit_only(world_size):
    run_kept_ranks(of_an_inner_unit, world_size)


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
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_zeroing_before_an_accumulation_leaves_nothing_of_the_step_before(world_size, set_to_none):
    run_kept_ranks(zeroed, world_size, set_to_none)


def one_forward_in_each(use_orig_params):
    """Forward inside, backward outside of no_sync, and the other way round: what counts is the backward."""
    item = entry("mlp")
    rank = dist.get_rank()
    model = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
    with model.no_sync():
        first = item.loss(model, item.make_batch(rank, 0))
    second = item.loss(model, item.make_batch(rank, 1))
    with model.no_sync():
        second.backward()
    first.backward()
    expected = mean_grads(item.build(), backwards("ss", item), range(dist.get_world_size()))
    assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_place_of_the_backward_decides_whether_it_synchronises(world_size, use_orig_params):
    run_kept_ranks(one_forward_in_each, world_size, use_orig_params)


def sharded_sums(use_orig_params):
    """Bytes this rank holds for gradients between backwards: after k of them inside no_sync, and outside."""
    item = entry("mlp")
    held = {}
    for letter in "ns":
        for count in (1, 4):
            model = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
            backwards(letter * count, item)(model, dist.get_rank())
            kept = [
                collected.buffer.flat.numel()
                for wrapper in FSDP.fsdp_modules(model)
                for collected, _ in wrapper._unit.gradients.kept.values()
            ]
            grads = [p.grad.numel() for p in model.parameters() if p.grad is not None]
            held[letter, count] = sum(kept), sum(grads)
    whole = sum(param.numel() for param in item.build().parameters())
    return held, whole


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])  # alone, a shard is the whole
def test_synchronised_backwards_accumulate_shards_only_however_many_they_are(
    world_size, use_orig_params
):
    for held, whole in run_kept_ranks(sharded_sums, world_size, use_orig_params):
        for count in (1, 4):
            kept, grads = held["s", count]
            assert kept == 0
            assert grads <= whole / world_size + 4 * 64
            assert held["n", count][0] >= whole  # what no_sync costs
        assert held["s", 1] == held["s", 4]


def training(use_orig_params):
    item = entry("gpt_tied")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = item.build()
    models = {"": dense}
    for pattern in ("nns", "sss"):
        models[pattern] = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
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


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_is_the_same_however_micro_batches_synchronise(world_size, use_orig_params):
    run_kept_ranks(training, world_size, use_orig_params)
