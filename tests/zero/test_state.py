"""State dicts: canonical, complete, loadable anywhere, and copies.  Oracle: the plain optimizer's own state dict."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, ConfigError, UsageError
from fsdp.optim import ZeroRedundancyOptimizer
from tests.support.ranks import run_kept_ranks
from tests.zero.support import assert_same_parameters, bytes_sent, make_model, make_pair, train

LAYOUTS = {
    "plain": {},
    "views": {"parameters_as_bucket_view": True},
    "element": {"partition": "element"},
}


def trained(world_options, iterations=3):
    pair = make_pair(torch.optim.Adam, lr=0.05, **world_options)
    train(*pair, iterations=range(iterations))
    return pair


def save(layout):
    _, zero, _, plain = trained(LAYOUTS[layout])
    return zero.state_dict(consolidate=True), plain.state_dict()


def load_and_train(layout, saved):
    wrapped, zero, dense, plain = make_pair(torch.optim.Adam, lr=0.9, **LAYOUTS[layout])
    zero.load_state_dict(saved)
    plain.load_state_dict(copy.deepcopy(saved))
    train(wrapped, zero, dense, plain)
    assert_same_parameters(wrapped, dense)
    return zero.param_groups[0]["lr"], zero.optim.param_groups[0]["lr"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_saved_by_some_ranks_it_loads_on_any_other_number(layout, world_size):
    saved, expected = run_kept_ranks(save, 4 if world_size == 1 else 2, layout)[0]
    torch.testing.assert_close(saved["state"], expected["state"], rtol=1e-4, atol=1e-6)
    assert saved["param_groups"] == expected["param_groups"]
    for other in LAYOUTS:
        results = run_kept_ranks(load_and_train, world_size, other, saved)
        assert [(0.05, 0.05)] * world_size == results


def successive(layout):
    _, zero, _, plain = trained(LAYOUTS[layout])
    for rank in range(dist.get_world_size()):
        zero.consolidate_state_dict(to=rank)
    first = zero.state_dict()
    expected = copy.deepcopy(plain.state_dict())
    for group in zero.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    zero.step()
    torch.testing.assert_close(first["state"], expected["state"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(zero.state_dict()["state"], first["state"], rtol=0, atol=0)
    return zero.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_target_keeps_its_copy_and_later_steps_leave_it_alone(layout):
    run_kept_ranks(successive, 3, layout)


def loading(layout):
    _, zero, _, plain = trained(LAYOUTS[layout])
    given = copy.deepcopy(plain.state_dict())
    kept = copy.deepcopy(given)
    zero.load_state_dict(given)
    zero.load_state_dict(given)
    for group in zero.param_groups:
        group["lr"] = 7.0
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    zero.step()
    torch.testing.assert_close(given["state"], kept["state"], rtol=0, atol=0)
    assert given["param_groups"] == kept["param_groups"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_changes_neither_the_dict_nor_its_tensors_then_or_later(layout):
    run_kept_ranks(loading, 2, layout)


def one_target():
    _, zero, _, _ = trained({})
    return sorted(zero.state_dict(consolidate=True, to=1))


def test_a_collective_state_dict_for_one_rank_is_empty_on_the_others():
    assert [[], ["param_groups", "state"], []] == run_kept_ranks(one_target, 3)


def consolidation_traffic():
    params = [nn.Parameter(torch.zeros(100_000)) for _ in range(12)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    before = bytes_sent()
    zero.consolidate_state_dict(to=0)
    return bytes_sent() - before


def test_consolidation_sends_each_owners_state_to_the_target_and_nothing_else():
    share = 2 * 4 * 100_000 * 4  # two moments of four parameters each
    target, *owners = run_kept_ranks(consolidation_traffic, 3)
    assert target < 0.01 * share
    assert all(share <= sent < 1.01 * share for sent in owners)


def unconsolidated():
    _, zero, _, _ = trained({})
    with pytest.raises(
        UsageError, match=rf"consolidate_state_dict\(to={dist.get_rank()}\)"
    ) as info:
        zero.state_dict()
    assert isinstance(info.value, RuntimeError)
    with pytest.raises(ConfigError, match="to=5"):
        zero.consolidate_state_dict(to=5)


def test_a_state_dict_that_was_never_collected_here_names_the_call_that_does():
    run_kept_ranks(unconsolidated, 2)


def misfits():
    zero = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)
    saved = zero.state_dict(consolidate=True)
    two = {**saved, "param_groups": saved["param_groups"] * 2}
    with pytest.raises(ValueError, match="number of parameter groups: expected 1, got 2"):
        zero.load_state_dict(two)
    short = copy.deepcopy(saved)
    short["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"param_groups\[0\] has 8 parameters here, 7 there"):
        zero.load_state_dict(short)
    with pytest.raises(CheckpointError, match="'state'"):
        zero.load_state_dict({"param_groups": []})
    cut = ZeroRedundancyOptimizer(
        [nn.Parameter(torch.zeros(4, 4))], torch.optim.SGD, partition="element"
    )
    bad = {
        "state": {0: {"momentum_buffer": torch.zeros(3)}},
        "param_groups": cut.state_dict(consolidate=True)["param_groups"],
    }
    with pytest.raises(CheckpointError, match=r"state\[0\]\['momentum_buffer'\] has shape \(3,\)"):
        cut.load_state_dict(bad)


def test_a_dict_that_does_not_fit_is_refused_with_what_was_expected():
    run_kept_ranks(misfits, 1)


def torch_format():
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    dense, ours = make_model(), make_model()
    theirs = TorchZero(dense.parameters(), torch.optim.Adam, lr=0.05)
    zero = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.9)
    for _ in range(2):
        for model, optimizer in ((dense, theirs), (ours, zero)):
            optimizer.zero_grad()
            model(torch.ones(3, 5)).sum().backward()
            optimizer.step()
    for rank in range(dist.get_world_size()):
        theirs.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            saved = theirs.state_dict()
    zero.load_state_dict(saved)
    ours.load_state_dict(dense.state_dict())
    mine = zero.state_dict(consolidate=True)
    theirs.load_state_dict(copy.deepcopy(mine))
    for model, optimizer in ((dense, theirs), (ours, zero)):
        optimizer.zero_grad()
        model(torch.ones(3, 5)).sum().backward()
        optimizer.step()
    for one, other in zip(dense.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_torchs_own_checkpoints_load_here_and_ours_load_there():
    run_kept_ranks(torch_format, 2)


def hooks():
    _, zero, _, plain = trained({})
    seen = []
    zero.register_state_dict_pre_hook(lambda optimizer: seen.append("pre save"))
    zero.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "extra": 1})
    zero.register_load_state_dict_pre_hook(lambda optimizer, saved: seen.append("pre load"))
    zero.register_load_state_dict_post_hook(lambda optimizer: seen.append("post load"))
    assert zero.state_dict(consolidate=True)["extra"] == 1
    zero.load_state_dict(plain.state_dict())
    assert seen == ["pre save", "pre load", "post load"]


def test_state_dict_hooks_run():
    run_kept_ranks(hooks, 2)


def named(layout):
    def build(names):
        model = make_model()
        params = dict(model.named_parameters())
        pairs = [(name, params[name]) for name in names(params)]
        return model, ZeroRedundancyOptimizer(pairs, torch.optim.Adam, lr=0.1, **LAYOUTS[layout])

    model, zero = build(list)
    model(torch.ones(2, 5)).square().sum().backward()
    zero.step()
    saved = zero.state_dict(consolidate=True, keys="name")
    assert list(saved["state"]) == [name for name, _ in model.named_parameters()]
    assert saved["param_groups"][0]["params"] == list(saved["state"])

    backwards = build(lambda params: list(reversed(params)))[1]
    backwards.load_state_dict(saved)
    loaded = backwards.state_dict(consolidate=True, keys="name")
    assert list(loaded["state"]) == list(reversed(saved["state"]))
    torch.testing.assert_close(dict(loaded["state"]), dict(saved["state"]), rtol=0, atol=0)

    by_place = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.Adam, lr=0.1)
    by_place.load_state_dict(saved)  # no names here: the order decides
    torch.testing.assert_close(
        list(by_place.state_dict(consolidate=True)["state"].values()),
        list(saved["state"].values()),
        rtol=0,
        atol=0,
    )
    with pytest.raises(ConfigError, match="named_parameters"):
        by_place.state_dict(consolidate=True, keys="name")
    with pytest.raises(ConfigError, match="'index' or 'name'"):
        by_place.state_dict(keys="fqn")
    saved["param_groups"][0]["params"][0] = "other"
    with pytest.raises(CheckpointError, match=r"only there 'other'; only here '0.weight'"):
        zero.load_state_dict(saved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keyed_by_name_the_order_of_parameters_does_not_matter(layout):
    run_kept_ranks(named, 2, layout)


def exchanged_with_fsdp():
    wrapped = FSDP(make_model(), use_orig_params=True)
    adam = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 5)).square().sum().backward()
    adam.step()
    sharded = FSDP.optim_state_dict(wrapped, adam)

    model = make_model()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.9)
    zero.load_state_dict(sharded)
    ours = zero.state_dict(consolidate=True, keys="name")
    torch.testing.assert_close(ours["state"], sharded["state"], rtol=0, atol=0)
    adam.load_state_dict(FSDP.optim_state_dict_to_load(wrapped, adam, ours))
    again = FSDP.optim_state_dict(wrapped, adam)
    torch.testing.assert_close(again["state"], sharded["state"], rtol=0, atol=0)


def test_optimizer_state_moves_between_the_wrapper_and_ddp_with_zero_by_name():
    run_kept_ranks(exchanged_with_fsdp, 2)
