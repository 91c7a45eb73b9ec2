"""Save in any world, wrapping, exposure and strategy; go on in any other: equal to never having stopped.

Oracles: the dense model in one process, uninterrupted; and, where both worlds are the same, the uninterrupted wrapped
run, bit by bit.  Sampled by hypothesis, always the same samples.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.optim_state.worlds import OPTIMIZERS, Form, assert_close, assert_equal, dense, wrapped

# Under its old name: the samples of a derandomized test follow from the text of its body.
from tests.support.ranks import run_kept_ranks as run_ranks

WORLDS = {"FULL_SHARD": (1, 2, 3), "SHARD_GRAD_OP": (2,), "NO_SHARD": (2,), "HYBRID_SHARD": (4,)}

# When torch loads ASGD's float32 `eta` it casts it to the parameter's dtype, for plain models as well.
BITWISE = [name for name in OPTIMIZERS if name != "asgd"]


@st.composite
def forms(draw):
    strategy = draw(st.sampled_from(["FULL_SHARD", "FULL_SHARD", "FULL_SHARD", *WORLDS]))
    return Form(
        draw(st.sampled_from(WORLDS[strategy])),
        draw(st.booleans()),
        draw(st.sampled_from(["layers", "root", "every"])),
        strategy,
        draw(st.booleans()),
    )


@settings(max_examples=20, derandomize=True, deadline=None)
@example(Form(3, use_orig_params=True), Form(2), "adam-amsgrad")
@example(Form(4, True, strategy="HYBRID_SHARD"), Form(3, wrapping="every"), "momentum")
@example(Form(2), Form(4, True, strategy="HYBRID_SHARD"), "adamw-fused")
@example(Form(2), Form(2), "asgd")
@example(Form(2, True), Form(2, strategy="SHARD_GRAD_OP"), "adagrad")
@given(forms(), forms(), st.sampled_from(list(OPTIMIZERS)))
def test_resuming_in_any_other_form_equals_never_stopping(first, second, name):
    states = run_ranks(wrapped, first.world_size, first, name, 2)[0]
    resumed, _ = run_ranks(wrapped, second.world_size, second, name, 2, 2, states)[0]
    assert_close(dense(name, 4)[0], resumed)


def stop_and_go_on(name):
    for use_orig_params in (False, True):
        form = Form(2, use_orig_params)
        states = wrapped(form, name, 2)
        expected = wrapped(form, name, 4)
        assert_equal(expected, wrapped(form, name, 2, 2, states))
        # Unused parameters have state with flat parameters only; what is trained is the same.
        other = wrapped(Form(2, not use_orig_params, "every"), name, 2, 2, states)
        assert_equal(expected[0], other[0])


@pytest.mark.parametrize("name", BITWISE)
def test_resuming_in_the_same_world_is_bitwise_never_stopping(name):
    run_ranks(stop_and_go_on, 2, name)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_units_inside_a_plain_module_resume(use_orig_params):
    form = Form(2, use_orig_params, beside=True)
    states = run_ranks(wrapped, 2, form, "adam-amsgrad", 2)[0]
    resumed, _ = run_ranks(wrapped, 3, Form(3, not use_orig_params), "adam-amsgrad", 2, 2, states)[
        0
    ]
    assert_close(dense("adam-amsgrad", 4)[0], resumed)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("name", ["adam-amsgrad", "momentum", "smooth"])
def test_a_plain_state_dict_loads_and_the_saved_one_loads_into_a_plain_optimizer(
    name, use_orig_params
):
    form = Form(3, use_orig_params)
    wrapped_states = run_ranks(wrapped, 3, form, name, 2, 1, dense(name, 1))[0]
    # torch's load_state_dict goes by position: the saved names are in the order of model.parameters().
    assert_close(dense(name, 5)[0], dense(name, 2, 3, wrapped_states)[0])
