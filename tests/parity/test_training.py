"""Training equals one-process training on the whole batch.

Oracle: the dense model (``tests.support.oracles.train_dense``): parameters after four AdamW steps, the loss and the
gradient norm of each step.  All cases of a world size and exposure run in one world; each is a test of its own.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest

from tests.support.compare import TRAINED, assert_bitwise, assert_close
from tests.support.models import ENTRIES
from tests.support.oracles import WRAPPINGS, Case, Recipe, Trajectory, train_cases, train_dense
from tests.support.ranks import run_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
CLIPPED = Recipe(clip=0.1)


def _main_cases(use_orig_params: bool) -> list[Case]:
    """Every strategy and wrapping, with and without clipping, with and without tied weights."""
    axes = itertools.product(("mlp", "gpt_tied"), STRATEGIES, WRAPPINGS, (Recipe(), CLIPPED))
    return [
        Case(name, strategy, wrapping, use_orig_params, recipe)
        for name, strategy, wrapping, recipe in axes
    ]


def _model_cases(use_orig_params: bool) -> list[Case]:
    """Every other model by block, in the two sharded strategies and in one unit."""
    return [
        Case(name, strategy, wrapping, use_orig_params, CLIPPED)
        for name in ENTRIES
        if name not in ("mlp", "gpt_tied")
        for strategy, wrapping in (
            ("FULL_SHARD", "blocks"),
            ("SHARD_GRAD_OP", "size"),
            ("NO_SHARD", "blocks"),
            ("FULL_SHARD", "root"),
        )
    ]


def _recipe_cases(use_orig_params: bool) -> list[Case]:
    """Other norms, accumulation."""
    recipes = [
        Recipe(clip=0.1, norm_type=1.0),
        Recipe(clip=0.1, norm_type=3.0),
        Recipe(clip=0.01, norm_type=math.inf),
        Recipe(steps=3, micro_batches=3, clip=0.1),
    ]
    return [
        Case(name, strategy, "blocks", use_orig_params, recipe)
        for name in ("mlp", "gpt_tied", "lora", "odd")
        for strategy in ("FULL_SHARD", "NO_SHARD")
        for recipe in recipes
    ]


def _cases(use_orig_params: bool) -> list[Case]:
    return [
        case
        for make in (_main_cases, _model_cases, _recipe_cases)
        for case in make(use_orig_params)
    ]


@functools.cache
def trained(world_size: int, use_orig_params: bool) -> list[dict[Case, Trajectory]]:
    """Every case of one world size and exposure, for each rank."""
    return run_ranks(train_cases, world_size, _cases(use_orig_params), timeout=110)


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="W{}".format)
@pytest.mark.parametrize("case", [*_cases(False), *_cases(True)], ids=str)
def test_training_equals_one_process_training(case, world_size):
    by_rank = [results[case] for results in trained(world_size, case.use_orig_params)]
    errors = [result.error for result in by_rank if result.error]
    assert not errors, errors[0]
    expected = train_dense(case.entry, world_size, case.recipe)
    assert_close(expected.params, by_rank[0].params, TRAINED)
    for result in by_rank:
        assert result.losses == pytest.approx(expected.losses, rel=1e-4)
        assert result.norms == pytest.approx(expected.norms, rel=1e-4)
        assert result.norms == by_rank[0].norms  # equal on every rank, to the bit
        assert_bitwise(by_rank[0].params, result.params)
    if case.recipe.clip is not None:
        assert max(expected.norms) > case.recipe.clip, "the recipe does not clip anything"
