"""Whatever is called first, and however: parameters are gathered, and gradients are those of the plain model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.support.models import MlpBlock, Outer, SharedLayer
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    Net,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)


class Methods(Net):
    """Uses its own parameters in methods that are no forward."""

    def generate(self, x):
        for _ in range(2):
            x = x + self(x).sum()
        return self.inp(x)

    def encode(self, x):
        return self.features(x)


def methods():
    dense = build(Methods)
    for use_orig_params in (False, True):
        model = wrap(build(Methods), use_orig_params=use_orig_params)
        with torch.no_grad():
            torch.testing.assert_close(model.generate(batch(0)), dense.generate(batch(0)))
            with FSDP.summon_full_params(model, writeback=False):
                torch.testing.assert_close(model.generate(batch(0)), dense.generate(batch(0)))
        model.register_forward_method("encode")
        for entry in (model, model.module):
            torch.testing.assert_close(entry.encode(batch(0)), dense.encode(batch(0)))
        with pytest.raises(ValueError, match="nonsense"):
            model.register_forward_method("nonsense")
        model.zero_grad()
        model.encode(batch(dist.get_rank())).square().sum().backward()
        expected = dense_grads(
            build(Methods),
            lambda m, r: m.encode(batch(r)).square().sum().backward(),
            dist.get_world_size(),
        )
        assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_methods_that_are_no_forward_gather_and_train(world_size):
    run_kept_ranks(methods, world_size)


def around_the_wrapper(model, rank):
    """Past the outermost wrapper; ``.module`` of the dense model is itself."""
    inner = model.module if isinstance(model, FSDP) else model
    inner(batch(rank)).square().sum().backward()


def inner_unit_first(model, rank):
    """A block that is a unit is called, trained and evaluated before the root ever was."""
    inner = model.module if isinstance(model, FSDP) else model
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        inner.blocks[2](x)
    inner.blocks[1](x).square().sum().backward()
    model(batch(rank)).square().sum().backward()


def pieces_of_the_root(model, rank):
    """A submodule that is no unit, inside and outside the forward of its own unit."""
    model(batch(rank)).square().sum().backward()
    with torch.no_grad():
        for _ in range(2):
            model(batch(rank, 1))
    model(batch(rank, 2)).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("script", [around_the_wrapper, inner_unit_first, pieces_of_the_root])
def test_any_entry_gives_the_gradients_of_the_plain_model(script, strategy, world_size):
    run_kept_ranks(check_script, world_size, script, sharding_strategy=ShardingStrategy[strategy])


def looked_at_first(use_orig_params):
    """state_dict, summoning and check_is_root of an inner unit before any forward."""
    expected = dense_grads(
        build(), lambda m, r: m(batch(r)).sum().backward(), dist.get_world_size()
    )
    model = wrap(build(), use_orig_params=use_orig_params)
    inner = model.module.blocks[1]
    assert not inner.check_is_root()
    assert model.check_is_root()
    names = list(dict(build().blocks[1].named_parameters()))
    assert list(inner.state_dict()) == names
    with FSDP.summon_full_params(inner):
        assert [name for name, _ in inner.named_parameters()] == names
    model(batch(dist.get_rank())).sum().backward()
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_inner_unit_may_be_looked_at_before_the_root_has_run(use_orig_params, world_size):
    run_kept_ranks(looked_at_first, world_size, use_orig_params)


def shared_unit(model, rank):
    """A unit that several others use, called by itself before the root ever was."""
    inner = model.module if isinstance(model, FSDP) else model
    inner.shared(torch.ones(2, 7)).square().sum().backward()
    model(batch(rank)).square().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_that_several_units_share_may_be_called_by_itself(world_size):
    classes = {Outer, MlpBlock}
    run_kept_ranks(check_script, world_size, shared_unit, SharedLayer, classes)
