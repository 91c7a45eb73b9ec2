"""What becomes of a parameter that no forward uses, alone or in a flat parameter with used ones, over a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from tests.optim_state.worlds import Form, Zoo, assert_close, build, one_step, wrap
from tests.support.ranks import run_kept_ranks

MAKERS = {
    "adagrad": lambda params: torch.optim.Adagrad(
        params, lr=0.1, lr_decay=0.3, initial_accumulator_value=0.5
    ),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2, lambd=0.1),
}


class Touching(Zoo):
    """Uses what :class:`Zoo` does not, times zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * (self.unused.weight.sum() + self.unused.bias.sum())


def plain(kind: type[Zoo]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def train(model, name, steps, start=0, saved=None):
    """The model's values and the optimizer's state, by name, after some steps, from what was ``saved`` if given."""
    optimizer = MAKERS[name](model.parameters())
    if saved is not None:
        model.load_state_dict(saved[0])
        FSDP.optim_state_dict_to_load(model, optimizer, saved[1], load_directly=True)
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def assert_states(expected, actual):
    """The same names, and the same values but for rounding and for torch's own casts on loading."""
    assert set(expected) == set(actual)
    for fqn, values in expected.items():
        assert set(values) == set(actual[fqn]), fqn
        for name, value in values.items():
            found = actual[fqn][name]
            torch.testing.assert_close(found, value, rtol=1e-7, atol=1e-9, check_dtype=False)


def resumes(form, name):
    """Equal to the dense model, in which the unused has a gradient of zero if others are in its flat parameter."""
    saved = train(wrap(form), name, 2)
    resumed = train(wrap(form), name, 2, 2, saved)
    is_alone = form.use_orig_params or form.wrapping == "every"
    expected = train(plain(Zoo if is_alone else Touching), name, 4)
    assert_close(expected[0], resumed[0])
    assert_states(expected[1]["state"], resumed[1]["state"])


@pytest.mark.parametrize(
    "form",
    [Form(2), Form(3, wrapping="root"), Form(2, wrapping="every"), Form(2, True)],
    ids=["layers", "root", "every", "original"],
)
@pytest.mark.parametrize("name", MAKERS)
def test_the_unused_decays_in_a_flat_parameter_as_with_a_gradient_of_zero_and_not_alone(form, name):
    run_kept_ranks(resumes, form.world_size, form, name)


def joins(first, form):
    """What was never stepped joins what was: as if it had always been there."""
    saved = train(wrap(first) if first else build(), "adagrad", 2)
    assert saved[1]["state"]["unused.weight"]["step"] == 0
    resumed = train(wrap(form), "adagrad", 2, 2, saved)
    expected = train(plain(Touching), "adagrad", 4)
    assert_close(expected[0], resumed[0])
    trained = {fqn for fqn in expected[1]["state"] if not fqn.startswith("frozen")}
    states = [{fqn: state["state"][fqn] for fqn in trained} for state in (expected[1], resumed[1])]
    assert_states(*states)
    assert resumed[1]["state"]["unused.weight"]["step"] == 4
    assert resumed[1]["state"]["unused.weight"]["sum"].unique().tolist() == [0.5]


@pytest.mark.parametrize(
    "first",
    [Form(2, wrapping="every", strategy="SHARD_GRAD_OP"), Form(2, True), None],
    ids=["every", "original", "plain"],
)
@pytest.mark.parametrize(
    "form", [Form(2), Form(2, wrapping="root", strategy="SHARD_GRAD_OP")], ids=["layers", "root"]
)
def test_what_was_never_stepped_takes_the_counters_of_the_flat_parameter_it_joins(first, form):
    run_kept_ranks(joins, 2, first, form)
