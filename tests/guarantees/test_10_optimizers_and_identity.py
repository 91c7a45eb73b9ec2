"""What users attach to parameters stays: the objects, attributes, hooks, optimizers and groups by original shape.

Identity, attributes and optimizers from before wrapping are proven in ``tests/dist/test_tied_and_identity.py``.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FsdpWarning, ShardingStrategy, StateDictType, split_decay_groups
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError, UsageError
from fsdp.names import clean_tensor_name
from tests.support.compare import TRAINED, assert_close
from tests.support.models import entry
from tests.support.oracles import full_grads, wrap_entry
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import assert_same_gradients, batch, build, dense_grads, wrap

STRATEGIES = ["FULL_SHARD", "NO_SHARD"]


def doubled(grad):
    return 2 * grad


def gradient_hooks(strategy):
    """A hook sees the whole gradient of this rank's data and may replace it; removed, it is gone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def script(model, rank_):
        model(batch(rank_)).square().sum().backward()

    dense = build()
    mine = copy.deepcopy(dense)
    script(mine, rank)
    changed = copy.deepcopy(dense)
    for name in ("blocks.1.up.weight", "inp.bias"):
        changed.get_parameter(name).register_hook(doubled)
    expected = {
        name: None
        if grad is None
        else grad * (2 if name in ("blocks.1.up.weight", "inp.bias") else 1)
        for name, grad in dense_grads(dense, script, world_size).items()
    }
    plain = dense_grads(dense, script, world_size)
    for orig in (False, True):
        model = build()
        seen = []
        weight = model.get_parameter("blocks.1.up.weight")
        handles = [
            weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone())),
            weight.register_hook(doubled),
            model.get_parameter("inp.bias").register_hook(doubled),
        ]
        model = wrap(model, use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
        script(model, rank)
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], mine.blocks[1].up.weight.grad)
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)
        for handle in handles:
            handle.remove()
        model.zero_grad()
        script(model, rank)
        assert len(seen) == 1
        assert_same_gradients(plain, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_hook_runs_on_the_whole_gradient_before_it_is_reduced(world_size, strategy):
    run_kept_ranks(gradient_hooks, world_size, strategy)


def stepping_in_the_backward(strategy):
    """An optimizer a parameter, stepped in its post-accumulate hook, trains as one optimizer after the backward."""
    dense = build()
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    world_size = dist.get_world_size()
    for orig in (False, True):
        model = wrap(build(), use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        calls = []

        def step(param, optimizers=optimizers, calls=calls):
            assert param.grad.shape == param.shape
            calls.append(param)
            optimizers[param].step()
            param.grad = None

        for param in optimizers:
            param.register_post_accumulate_grad_hook(step)
        with model.no_sync():
            model(batch(dist.get_rank(), 7)).square().mean().backward()
        assert not calls
        model.zero_grad()
        for number in range(2):
            calls.clear()
            model(batch(dist.get_rank(), number)).square().mean().backward()
            held = [p for p in optimizers if p.numel()]
            assert sorted(map(id, calls)) == sorted(map(id, held))
        if not orig:
            for number in range(2):
                plain.zero_grad()
                for rank in range(world_size):
                    (dense(batch(rank, number)).square().mean() / world_size).backward()
                plain.step()
        state = model.state_dict()
        assert_close(dense.state_dict(), state, TRAINED)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_post_accumulate_hook_runs_when_the_reduced_gradient_is_in_place(world_size, strategy):
    run_kept_ranks(stepping_in_the_backward, world_size, strategy)


class OneRankUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)
        self.b = nn.Linear(5, 3)

    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)


def used_elsewhere():
    model = wrap(build(OneRankUses), use_orig_params=True)
    calls = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    model(batch(0), both=dist.get_rank() == 1).sum().backward()
    held = [name for name, param in model.named_parameters() if param.numel()]
    assert sorted(calls) == sorted(held)


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_runs_on_a_rank_that_did_not_use_the_parameter_but_holds_it(world_size):
    run_kept_ranks(used_elsewhere, world_size)


def refused_hooks():
    model = build()
    model.inp.weight.register_post_accumulate_grad_hook(print)
    model = wrap(model)
    with pytest.raises(UsageError, match="use_orig_params=True") as caught:
        model(batch(0))
    assert caught.value.fqn == "inp.weight"
    model = wrap(build())
    next(model.parameters()).register_hook(print)
    with pytest.raises(UsageError, match="flat parameter"):
        model(batch(0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_hook_that_would_never_run_is_an_error_in_the_first_forward(world_size):
    run_kept_ranks(refused_hooks, world_size)


def hooked_while_whole():
    model = wrap(build())
    model(batch(0)).sum().backward()
    seen = []
    with FSDP.summon_full_params(model):
        for name, param in model.named_parameters():
            param.register_hook(lambda grad, name=name: seen.append(name))
    model(batch(0)).sum().backward()
    assert sorted(seen) == sorted(name for name, _ in build().named_parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hooks_put_on_whole_parameters_after_a_forward_run(world_size):
    run_kept_ranks(hooked_while_whole, world_size)


def whole_shapes():
    for name in ("mlp", "gpt_tied", "odd", "lora"):
        item = entry(name)
        before = {key: param.shape for key, param in item.build().named_parameters()}
        model = wrap_entry(item, item.build(), use_orig_params=True)
        for key, param in model.named_parameters():
            assert param.fsdp_fqn == key
            assert param.fsdp_shape == before[key]
            assert param.fsdp_ndim == len(before[key])
            assert param.fsdp_numel == before[key].numel()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_piece_says_what_it_is_a_piece_of(world_size):
    run_kept_ranks(whole_shapes, world_size)


def built_late(when, use_orig_params):
    """An optimizer that is built after a forward, while parameters are whole, or inside of summon_full_params."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = build()
    model = wrap(build(), use_orig_params=use_orig_params)
    if when == "after a forward":
        model(batch(rank))
    elif when == "between a forward and its backward":
        loss = model(batch(rank)).square().sum()
    context = contextlib.nullcontext()
    if when == "inside summon_full_params":
        context = FSDP.summon_full_params(model)
    # There flat mode shows the module's own parameters, whose place flat ones have outside.
    context_holds_others = when == "inside summon_full_params" and not use_orig_params
    with context:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if when == "between a forward and its backward":
        loss.backward()
        model.zero_grad()
    reference = torch.optim.AdamW(dense.parameters(), lr=0.05)
    for step in range(3):

        def script(net, rank_, step=step):
            net(batch(rank_, step)).square().sum().backward()

        for name, grad in dense_grads(dense, script, world_size).items():
            dense.get_parameter(name).grad = grad
        reference.step()
        optimizer.zero_grad()
        script(model, rank)
        if context_holds_others:
            with pytest.raises(UsageError, match="before wrapping"):
                optimizer.step()
            return
        optimizer.step()
    assert_close(dense.state_dict(), model.state_dict(), TRAINED)


@pytest.mark.parametrize(
    "when",
    ["after a forward", "between a forward and its backward", "inside summon_full_params"],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_that_is_built_at_any_moment_trains_or_is_refused(
    world_size, use_orig_params, when
):
    run_kept_ranks(built_late, world_size, when, use_orig_params)


def decay():
    for name in ("gpt_tied", "lora", "odd"):
        item = entry(name)
        dense = item.build()
        expected = [
            [
                key
                for key, p in dense.named_parameters()
                if p.requires_grad and (p.ndim >= 2) is wants
            ]
            for wants in (True, False)
        ]
        for model in (dense, wrap_entry(item, item.build(), use_orig_params=True)):
            names = {param: key for key, param in model.named_parameters()}
            groups = split_decay_groups(model, 0.5)
            assert [[names[p] for p in group["params"]] for group in groups] == expected
            assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
        with pytest.raises(ConfigError, match="use_orig_params=True"):
            split_decay_groups(wrap_entry(item, item.build()))
    flat = wrap(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)))
    groups = split_decay_groups(flat)
    assert groups[0]["params"] == list(flat.parameters())
    groups = split_decay_groups(flat, decays=lambda fqn, shape: False)
    assert groups[1]["params"] == list(flat.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weight_decay_is_split_by_original_dimensions(world_size):
    run_kept_ranks(decay, world_size)


MODELS = ("mlp", "gpt_tied", "shared", "lora", "odd")


def same_parameters(model):
    return set(model.parameters()) == set(model.module.parameters()) != set()


def through_the_module(use_orig_params):
    """Everything that is given ``model.module`` instead of ``model`` finds the same parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in MODELS:
        item = entry(name)
        for wrapping in ("root", "blocks"):
            dense = item.build()
            plain = torch.optim.SGD([p for p in dense.parameters() if p.requires_grad], lr=0.05)
            model = wrap_entry(item, item.build(), wrapping, use_orig_params=use_orig_params)
            names = [key for key, _ in model.named_parameters()]
            assert same_parameters(model), (name, wrapping)
            optimizer = torch.optim.SGD(
                [p for p in model.module.parameters() if p.requires_grad], lr=0.05
            )
            for number in range(3):
                plain.zero_grad()
                model.module.zero_grad()
                for who in range(world_size):
                    (item.loss(dense, item.make_batch(who, number)) / world_size).backward()
                item.loss(model, item.make_batch(rank, number)).backward()
                plain.step()
                optimizer.step()
            expected = {k: v for k, v in dense.state_dict().items() if not k.endswith("tracked")}
            state = model.state_dict()
            assert_close(expected, {key: state[key] for key in expected}, TRAINED)
            with FSDP.summon_full_params(model):
                whole = dict(model.module.named_parameters())
                assert sum(p.numel() for p in whole.values()) == sum(
                    p.numel() for p in dense.parameters()
                )
            assert same_parameters(model)
            assert [key for key, _ in model.named_parameters()] == names
            for param in model.module.parameters():
                param.requires_grad_(False)
            item.loss(model, item.make_batch(rank, 0))
            assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_parameters_of_the_wrapped_module_are_those_of_the_wrapper(world_size, use_orig_params):
    run_kept_ranks(through_the_module, world_size, use_orig_params)


def saved_and_copied(use_orig_params):
    """State dicts, copies and pickles know nothing of where flat parameters are shown."""
    rank = dist.get_rank()
    for name in MODELS:
        item = entry(name)
        keys = list(item.build().state_dict())
        model = wrap_entry(item, item.build(), use_orig_params=use_orig_params)
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with FSDP.state_dict_type(model, kind):
                for part in (model, model.module):
                    state = part.state_dict()
                    assert {clean_tensor_name(key) for key in state} == set(keys)
                    assert not [key for key in state if "flat_param" in key]
                    result = part.load_state_dict(state)
                    assert not result.missing_keys
                    assert not result.unexpected_keys
                assert same_parameters(model)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.01)
        twins = [copy.deepcopy((model, optimizer)), (pickle.loads(pickle.dumps(model)), None)]
        for twin, its in twins:
            assert same_parameters(twin)
            assert set(twin.parameters()).isdisjoint(model.parameters())
            if its is None:
                continue
            assert {p for group in its.param_groups for p in group["params"]} == set(
                twin.parameters()
            )
            its.param_groups[0]["lr"] = 0.0
            item.loss(twin, item.make_batch(rank, 0)).backward()
            its.step()
        item.loss(model, item.make_batch(rank, 0)).backward()
        before = model.state_dict()
        optimizer.step()
        after = model.state_dict()
        assert any(not torch.equal(before[key], after[key]) for key in keys)
    plain = nn.Sequential(nn.Linear(300, 300))
    size = len(pickle.dumps(plain)) / dist.get_world_size()
    assert len(pickle.dumps(FSDP(plain, use_orig_params=use_orig_params))) < 1.2 * size + 10_000


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_wrapped_module_shows_is_in_no_state_dict_and_in_each_copy_once(
    world_size, use_orig_params
):
    run_kept_ranks(saved_and_copied, world_size, use_orig_params)


class HasTheName(nn.Module):
    """A parameter of its own under the name that flat parameters are shown by."""

    def __init__(self):
        super().__init__()
        self.flat_param = nn.Parameter(torch.arange(5.0))
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return (x * self.flat_param).sum() * self.scale.sum()


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(5, 5)
        self.scale = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)

    def forward(self, x):
        return super().forward(x) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), Scaled()
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x).sum() + self.b(x).sum()


def shown_elsewhere():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = dense_grads(
        HasTheName(), lambda model, who: model(batch(who)).backward(), world_size
    )
    model = FSDP(HasTheName())
    model(batch(rank)).backward()
    assert_same_gradients(expected, full_grads(model), none_is_zero=True)
    state = model.state_dict()
    assert set(state) == {"flat_param", "scale"}
    assert torch.equal(state["flat_param"], torch.arange(5.0))
    assert {id(p) for p in model.parameters()} == {id(p) for p in model.params}
    copy.deepcopy(model)(batch(rank)).backward()

    plain = build(
        Tied
    )  # made by hand, wrappers give the tied parameter up: one of them a whole handle
    expected = dense_grads(plain, lambda net, who: net(batch(who)).backward(), world_size)
    plain.a, plain.b = FSDP(plain.a), FSDP(plain.b)
    model = FSDP(plain)
    assert same_parameters(model)
    assert "flat_param" not in model.module.a.module._parameters
    model(batch(rank)).backward()
    got = full_grads(model)
    assert_same_gradients(expected, {name: got[name] for name in expected}, none_is_zero=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_name_that_is_taken_and_handles_that_are_given_up(world_size):
    run_kept_ranks(shown_elsewhere, world_size)


def stepped(make, orig, strategy):
    """Whether one step warned, and of what."""
    model = wrap(build(), use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(batch(dist.get_rank())).square().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            closure()
            optimizer.step(closure)
    return [str(item.message) for item in caught if item.category is FsdpWarning]


def wants_whole_parameters(orig):
    class Lamb(torch.optim.SGD):
        """One by name."""

    for strategy in STRATEGIES:
        for make in (torch.optim.Adafactor, partial(Lamb, lr=0.1)):
            said = stepped(make, orig, strategy)
            name = getattr(make, "func", make).__name__
            differs = not orig or (strategy == "FULL_SHARD" and dist.get_world_size() > 1)
            assert len(said) == differs
            assert all(f"WholeParamOptimizer(model, {name}" in text for text in said)
        assert not stepped(torch.optim.AdamW, orig, strategy)
    search = partial(torch.optim.LBFGS, max_iter=2, lr=0.01)
    if dist.get_world_size() > 1:
        with pytest.raises(UsageError, match="LBFGS looks at all parameters at once"):
            stepped(search, orig, "FULL_SHARD")
    assert not stepped(search, orig, "NO_SHARD")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_optimizers_that_want_whole_parameters_say_so_on_shards(orig, world_size):
    run_kept_ranks(wants_whole_parameters, world_size, orig)
