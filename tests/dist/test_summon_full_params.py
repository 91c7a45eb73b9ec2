"""``summon_full_params``: whole parameters under clean names; every argument does what it says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.errors import FsdpError, ShardedParameterError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import ENTRIES, entry
from tests.support.oracles import mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)


def named(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(name, strategy):
    item = ENTRIES[name]
    expected = named(item.build())
    for orig in EXPOSURES:
        for wrapping in ("root", "blocks", "size"):
            model = wrap_entry(
                item,
                item.build(),
                wrapping,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            before = dict(model.named_parameters())
            for _ in range(2):
                with FSDP.summon_full_params(model):
                    got = dict(model.named_parameters())
                    assert all(isinstance(param, nn.Parameter) for param in got.values())
                    assert_bitwise(expected, {key: param.detach() for key, param in got.items()})
                    flags = {key: param.requires_grad for key, param in got.items()}
                    assert flags == {
                        key: param.requires_grad for key, param in item.build().named_parameters()
                    }
                after = dict(model.named_parameters())
                assert list(after) == list(before)
                assert all(after[key] is before[key] for key in before)
            item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
            with FSDP.summon_full_params(model, writeback=False):
                assert_bitwise(expected, named(model))


@pytest.mark.parametrize("name", ENTRIES)
def test_every_model_is_whole_inside_and_as_before_outside(name):
    run_kept_ranks(whole, 2, name, "FULL_SHARD")


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_in_the_other_strategies_and_world_sizes(strategy, world_size):
    run_kept_ranks(whole, world_size, "gpt_tied", strategy)


def written(strategy, writeback):
    """Each rank writes its own value; what is kept is each rank's own part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for orig in EXPOSURES:
        item = entry("odd")
        model = wrap_entry(
            item,
            item.build(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
        )
        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            for param in model.parameters():
                param.fill_(rank + 10.0)
        persists = writeback or world_size == 1 or strategy == "NO_SHARD"
        state = model.state_dict()
        original = item.build().state_dict()
        for name, value in state.items():
            if not value.numel():
                continue
            if persists and strategy != "NO_SHARD":
                assert value.min() >= 10.0, name
                assert value.max() < 10.0 + world_size, name
            elif persists:
                assert (value == rank + 10.0).all(), name
            else:
                assert torch.equal(value, original[name]), name
        if persists and strategy != "NO_SHARD" and world_size > 1:
            seen = {item for value in state.values() for item in value.flatten().tolist()}
            assert seen == {10.0 + index for index in range(world_size)}


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_changes_are_kept_if_written_back_and_dropped_if_not(world_size, strategy, writeback):
    run_kept_ranks(written, world_size, strategy, writeback)


def one_level():
    item = entry("shared")
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        with FSDP.summon_full_params(model, recurse=False):
            assert model.module.inp.weight.shape == (7, 5)
            model.module.inp.weight.sum()
            inner = model.module.blocks[0].module.inner.module
            if not orig:
                with pytest.raises(ShardedParameterError, match=r"blocks\.0\.inner\.up\.weight"):
                    inner.up.weight.sum()
            with FSDP.summon_full_params(model.module.blocks[0]):
                assert inner.up.weight.shape == (15, 7)
                assert model.module.blocks[0].module.scale.shape == (7,)
            assert model.module.inp.weight.shape == (7, 5)


def test_recurse_false_summons_one_unit_and_contexts_nest():
    run_kept_ranks(one_level, 2)


def of_anything():
    """An inner unit, a plain submodule that contains units, a plain module around the root, one without any unit."""
    item = entry("mlp")
    expected = named(item.build())
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        with FSDP.summon_full_params(model.module.blocks[1]):
            for key, param in model.module.blocks[1].named_parameters():
                assert torch.equal(param, expected[f"blocks.1.{key}"]), key
        with FSDP.summon_full_params(model.module.blocks):
            shapes = [wrapper.module.up.weight.shape for wrapper in model.module.blocks]
            assert shapes == [(15, 7)] * 3
        with FSDP.summon_full_params(nn.ModuleDict({"m": model})):
            assert model.module.out.weight.shape == (3, 7)
        with FSDP.summon_full_params(nn.Linear(2, 2)):
            pass


def test_any_module_can_be_summoned():
    run_kept_ranks(of_anything, 2)


def on_rank_0(offload_to_cpu):
    item = entry("lora")
    expected = named(item.build())
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        outside = named(model)
        with FSDP.summon_full_params(
            model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu
        ):
            if dist.get_rank() == 0:
                assert_bitwise(expected, named(model))
            else:
                assert_bitwise(outside, named(model))
        assert_bitwise(outside, named(model))
        assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_rank0_only_shows_whole_parameters_to_rank_0_alone(offload_to_cpu):
    run_kept_ranks(on_rank_0, 2, offload_to_cpu)


def offloaded():
    """Offloaded parameters are copies: written back if asked, and never aliases of the shard."""
    item = entry("mlp")
    for orig in EXPOSURES:
        for writeback in (False, True):
            model = wrap_entry(item, item.build(), use_orig_params=orig)
            with (
                FSDP.summon_full_params(model, writeback=writeback, offload_to_cpu=True),
                torch.no_grad(),
            ):
                for param in model.parameters():
                    assert param.device.type == "cpu"
                    param.fill_(2.0)
            values = torch.cat([value.flatten() for value in model.state_dict().values()])
            assert bool((values == 2.0).all()) == (writeback or dist.get_world_size() == 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_parameters_are_written_back_too(world_size):
    run_kept_ranks(offloaded, world_size)


def gradients(strategy):
    ranks = range(dist.get_world_size())
    for name in ("gpt_tied", "lora", "experts"):
        item = entry(name)

        def script(model, rank, item=item):
            item.loss(model, item.make_batch(rank, 1)).backward()

        expected = mean_grads(item.build(), script, ranks)
        for orig in EXPOSURES:
            model = wrap_entry(
                item,
                item.build(),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            script(model, dist.get_rank())
            with FSDP.summon_full_params(model, with_grads=True):
                got = {key: param.grad for key, param in model.named_parameters()}
                assert_close(expected, got, GRADIENTS, none_is_zero=not orig)
                for grad in got.values():
                    if grad is not None:
                        grad.mul_(2)
            doubled = {key: None if g is None else 2 * g for key, g in expected.items()}
            with FSDP.summon_full_params(model, writeback=False, with_grads=True):
                again = {key: param.grad for key, param in model.named_parameters()}
                assert_close(doubled, again, GRADIENTS, none_is_zero=not orig)
                for grad in again.values():
                    if grad is not None:
                        grad.zero_()
            if strategy == "FULL_SHARD" and len(ranks) > 1:
                with FSDP.summon_full_params(model, with_grads=True):
                    third = {key: param.grad for key, param in model.named_parameters()}
                    assert_close(doubled, third, GRADIENTS, none_is_zero=not orig)
            with FSDP.summon_full_params(model):
                assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_whole_and_written_back(strategy, world_size):
    run_kept_ranks(gradients, world_size, strategy)


def refused():
    item = entry("mlp")
    model = wrap_entry(item, item.build())
    context = FSDP.summon_full_params(model, rank0_only=True, writeback=True)
    with pytest.raises(NotImplementedError, match="rank0_only") as caught, context:
        pass
    assert isinstance(caught.value, FsdpError)
    # Inside, the other things a user may call answer or are refused; nothing hangs, nothing is left behind.
    with FSDP.summon_full_params(model):
        inside = model.state_dict()
        with FSDP.summon_full_params(model):
            pass
        assert model.module.inp.weight.shape == (7, 5)
    assert_bitwise(dict(inside), dict(item.build().state_dict()))
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()


def test_wrong_combinations_are_refused_and_exceptions_inside_leave_it_usable():
    run_kept_ranks(refused, 2)


def no_grad_forward_inside():
    """Evaluating while summoned uses what was written inside."""
    item = entry("mlp")
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        dense = item.build()
        x, _ = item.make_batch(0, 0)
        with FSDP.summon_full_params(model), torch.no_grad():
            model.module.out.bias.add_(1.0)
            dense.out.bias.add_(1.0)
            torch.testing.assert_close(model(x), dense(x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), dense(x))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_without_grad_inside_sees_what_was_written_there(world_size):
    run_kept_ranks(no_grad_forward_inside, world_size)


def full_precision():
    item = entry("mlp")
    model = wrap_entry(item, item.build(), mixed_precision=MixedPrecision(torch.bfloat16))
    item.loss(model, (item.make_batch(0, 0)[0], item.make_batch(0, 0)[1].bfloat16())).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for key, param in model.named_parameters():
            assert param.dtype == param.grad.dtype == torch.float32, key
        assert_bitwise(named(item.build()), named(model))


def test_summoned_parameters_are_in_full_precision():
    run_kept_ranks(full_precision, 2)


def mutated_in_forms():
    """The usual ways to write weights: init functions, copy_, .data, vector_to_parameters."""
    item = entry("mlp")
    other = item.build(seed=5)
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        with FSDP.summon_full_params(model):
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(other.parameters()), model.parameters()
            )
        assert_bitwise(dict(other.state_dict()), dict(model.state_dict()))
        with FSDP.summon_full_params(model):
            for param in model.parameters():
                param.data = torch.full_like(param, 0.5)
        assert all((value == 0.5).all() for value in model.state_dict().values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_way_of_writing_is_kept(world_size):
    run_kept_ranks(mutated_in_forms, world_size)


def replaced_and_trained(use_orig_params, inner):
    """A new ``nn.Parameter`` in a parameter's place, inside the context, is what is trained from then on."""

    def stack():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 3)))

    def replace_weight(linear):
        linear.weight = nn.Parameter(torch.linspace(-1, 1, 15).reshape(5, 3))

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = stack()
    replace_weight(plain[0])
    train(plain)
    policy = ModuleWrapPolicy({nn.Linear}) if inner else None
    model = FSDP(stack(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    model(torch.ones(2, 3)).sum().backward()  # leaves and their hooks are there already
    model.zero_grad()
    with FSDP.summon_full_params(model):
        replace_weight(model.module[0].module if inner else model.module[0])
    train(model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("use_orig_params", EXPOSURES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_replaced_inside_the_context_is_trained(world_size, use_orig_params, inner):
    run_kept_ranks(replaced_and_trained, world_size, use_orig_params, inner)
