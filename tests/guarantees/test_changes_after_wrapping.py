"""What is put into a model after wrapping trains like the rest, or is an error by name on every rank alike.

Oracle: the dense model with the same change, on the whole batch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import StateDictType
from fsdp.errors import FsdpWarning, UsageError
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.support.scripts import (
    Block,
    Net,
    assert_same_gradients,
    batch,
    build,
    dense_grads,
    full_grads,
    wrap,
)

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])
EXPOSURES = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


class OpenBlock(Block):
    """Its forward runs what was put into it, too."""

    def forward(self, x):
        x = super().forward(x)
        for name, child in self.named_children():
            if name.startswith("extra"):
                x = child(x)
        return x * self.scale if hasattr(self, "scale") else x


class OpenNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(OpenBlock(7) for _ in range(3))


class Adapter(nn.Module):
    """Holds the layer that it was put in the place of, as PEFT's do."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


def linear(inp, out):
    torch.manual_seed(5)
    return nn.Linear(inp, out)


def adapted(base):
    torch.manual_seed(6)
    return Adapter(base)


def unwrapped(module):
    return module.module if isinstance(module, FSDP) else module


def inside(model, index=0):
    """A block of the wrapped or the plain model."""
    return unwrapped(unwrapped(model).blocks[index])


ADDITIONS = {
    "attribute": (lambda m: setattr(inside(m), "extra", linear(7, 7)), "blocks.0.extra.weight"),
    "add_module": (lambda m: inside(m, 2).add_module("extra", linear(7, 7)), "blocks.2.extra."),
    "deep": (
        lambda m: setattr(inside(m), "extra", nn.Sequential(nn.Tanh(), linear(7, 7))),
        "blocks.0.extra.1.weight",
    ),
    "register_parameter": (
        lambda m: inside(m, 1).register_parameter("scale", nn.Parameter(torch.full((7,), 0.5))),
        "blocks.1.scale",
    ),
    "parameter": (
        lambda m: setattr(inside(m, 1), "scale", nn.Parameter(torch.full((7,), 0.5))),
        "blocks.1.scale",
    ),
    "append": (lambda m: unwrapped(m).blocks.append(linear(7, 7)), "blocks.3.weight"),
    "head": (lambda m: setattr(unwrapped(m), "out", linear(7, 4)), "out.weight"),
    "adapter": (lambda m: setattr(inside(m), "up", adapted(inside(m).up)), "blocks.0.up.low"),
    "root_adapter": (lambda m: setattr(unwrapped(m), "out", adapted(unwrapped(m).out)), "out.low"),
    "unit": (lambda m: unwrapped(m).blocks.__setitem__(1, OpenBlock(7)), "blocks.1.norm.weight"),
}


def step(model, rank, number=0):
    model(batch(rank, number)).square().sum().backward()


def added(use_orig_params):
    """With one rank there is nothing to average; with more every kind of addition is refused, in every forward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, (add, fqn) in ADDITIONS.items():
        model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
        step(model, rank)
        model.zero_grad()
        torch.manual_seed(7)
        add(model)
        if world_size == 1:
            plain = build(OpenNet)
            torch.manual_seed(7)
            add(plain)
            expected = dense_grads(plain, step, 1)
            step(model, rank)
            got = full_grads(model)
            for key, grad in expected.items():
                torch.testing.assert_close(
                    got[key], grad, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
                )
            continue
        before = {unit: unit.residency for unit in model._unit.root.units}
        for context in (torch.enable_grad, torch.no_grad, torch.enable_grad):
            with context(), pytest.raises(UsageError, match="added to the model after") as caught:
                model(batch(rank))
            assert caught.value.fqn.startswith(fqn), name
            assert "wrap a new module with FSDP" in str(caught.value)
            assert {unit: unit.residency for unit in model._unit.root.units} == before


@EXPOSURES
@WORLDS
def test_what_is_added_and_trained_is_right_on_one_rank_and_refused_on_more(
    world_size, use_orig_params
):
    run_kept_ranks(added, world_size, use_orig_params)


def harmless(use_orig_params):
    """Frozen and parameterless additions, and whatever is below an ignored module, need nobody's average."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def script(model, who):
        inside(model).extra = nn.Sequential(nn.Tanh(), linear(7, 7).requires_grad_(False))
        inside(model, 1).register_buffer("table", torch.ones(3))
        inside(model, 2).extra = nn.Identity()
        unwrapped(model).out.note = "not a module"
        for number in range(2):
            step(model, who, number)

    expected = dense_grads(build(OpenNet), script, world_size)
    model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
    step(model, rank)
    model.zero_grad()
    script(model, rank)
    got = full_grads(model)
    assert_same_gradients(
        expected, {name: got[name] for name in expected}, none_is_zero=not use_orig_params
    )
    layer = inside(model).extra[1]
    layer.requires_grad_(True)
    if world_size == 1:
        step(model, rank)
        return
    with pytest.raises(UsageError, match=r"blocks\.0\.extra\.1\.weight"):
        model(batch(rank))
    layer.requires_grad_(False)
    step(model, rank)
    layer.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"blocks\.0\.extra\.1\.weight"):
        model(batch(rank))
    del inside(model).extra
    step(model, rank)
    assert not model._unit.root.changed


@EXPOSURES
@WORLDS
def test_frozen_additions_are_fine_until_they_are_thawed(world_size, use_orig_params):
    run_kept_ranks(harmless, world_size, use_orig_params)


def below_ignored(use_orig_params):
    plain = build(OpenNet)
    plain.blocks[2].extra = nn.Sequential(linear(7, 7))
    plain.blocks[2].extra.requires_grad_(False)
    model = wrap(
        plain, {OpenBlock}, use_orig_params=use_orig_params, ignored_modules=[plain.blocks[2].extra]
    )
    inside(model, 2).extra.append(linear(7, 7))
    step(model, dist.get_rank())
    assert (
        inside(model, 2).extra[1].weight.grad is not None
    )  # the user's own business, as documented
    inside(model, 2).extra[0].weight = nn.Parameter(torch.ones(7, 7))
    step(model, dist.get_rank())
    plain = build(OpenNet)
    plain.blocks[0].scale = nn.Parameter(torch.ones(7), requires_grad=False)
    model = wrap(
        plain,
        {OpenBlock},
        use_orig_params=use_orig_params,
        ignored_states=[plain.blocks[0].scale],
    )
    inside(model).extra = nn.Identity()  # something that has the tree looked at
    inside(model).scale.requires_grad_(True)
    step(model, dist.get_rank())
    assert inside(model).scale.grad is not None


@EXPOSURES
def test_what_is_ignored_stays_ignored(use_orig_params):
    run_kept_ranks(below_ignored, 2, use_orig_params)


def taken_out(use_orig_params):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for take_out in (
        lambda m: unwrapped(m).blocks.__delitem__(1),
        lambda m: setattr(unwrapped(m), "blocks", nn.ModuleList(list(unwrapped(m).blocks)[::2])),
        lambda m: setattr(inside(m), "down", nn.Linear(15, 7, bias=False).requires_grad_(False)),
        lambda m: setattr(unwrapped(m), "inp", nn.Identity()),
    ):
        plain = build(OpenNet)
        torch.manual_seed(3)
        take_out(plain)
        wide = isinstance(plain.inp, nn.Identity)

        def script(model, who, wide=wide):
            x = batch(who)
            model(torch.cat([x, x[:, :2]], 1) if wide else x).square().sum().backward()

        expected = dense_grads(plain, script, world_size)
        model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
        step(model, rank)
        model.zero_grad()
        torch.manual_seed(3)
        take_out(model)
        script(model, rank)
        script(model, rank)
        got = {name: grad for name, grad in full_grads(model).items() if name in expected}
        doubled = {name: None if g is None else 2 * g for name, g in expected.items()}
        assert_same_gradients(doubled, got, none_is_zero=not use_orig_params)
        before, after = plain.state_dict(), model.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) for name in before)
        model.load_state_dict(after)
        script(copy.deepcopy(model), rank)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            assert list(model.state_dict()) == list(before)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        state = FSDP.optim_state_dict(model, optimizer)
        assert set(state["state"]) == {n for n, p in plain.named_parameters() if p.requires_grad}


@EXPOSURES
@WORLDS
def test_what_is_taken_out_leaves_the_rest_as_it_was(world_size, use_orig_params):
    run_kept_ranks(taken_out, world_size, use_orig_params)


def parameter_taken_out(use_orig_params):
    ways = [lambda m: delattr(inside(m).up, "bias")]
    if use_orig_params:  # in flat mode a None stands there anyway
        ways.append(lambda m: setattr(inside(m).up, "bias", None))
    for take_out in ways:
        model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
        step(model, dist.get_rank())
        take_out(model)
        with pytest.raises(UsageError, match=r"blocks\.0\.up\.bias"):
            model(batch(dist.get_rank()))


@EXPOSURES
@WORLDS
def test_a_parameter_that_is_taken_out_is_named(world_size, use_orig_params):
    run_kept_ranks(parameter_taken_out, world_size, use_orig_params)


def wrapped(module, **kwargs):
    return FSDP(module, **kwargs)


JOINS = {
    "append": lambda m, wrapper: unwrapped(m).blocks.append(wrapper(linear(7, 7))),
    "head": lambda m, wrapper: setattr(unwrapped(m), "out", wrapper(linear(7, 4))),
    "replaced_unit": lambda m, wrapper: unwrapped(m).blocks.__setitem__(0, wrapper(linear(7, 7))),
    "inside": lambda m, wrapper: setattr(
        inside(m), "extra", nn.Sequential(nn.Tanh(), wrapper(linear(7, 7)))
    ),
}


def joined(use_orig_params):
    """A module that is wrapped before it is put in becomes a unit of the model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, put in JOINS.items():
        plain = build(OpenNet)
        put(plain, lambda module: module)
        model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
        step(model, rank)
        model.zero_grad()
        put(model, lambda module: FSDP(module, use_orig_params=use_orig_params))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
        for number in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for who in range(world_size):
                (plain(batch(who, number)).square().sum() / world_size).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            step(model, rank, number)
            torch.testing.assert_close(model.clip_grad_norm_(1.0), norm, rtol=1e-4, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
        assert len(FSDP.fsdp_modules(model, root_only=True)) == 1, name
        units = model._unit.root.units
        assert all(unit.root is units[0].root for unit in units)
        assert [unit.index for unit in units] == list(range(len(units)))
        expected, state = plain.state_dict(), model.state_dict()
        assert list(expected) == list(state)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=2e-4, atol=4e-6)
        model.load_state_dict(state)
        saved = FSDP.optim_state_dict(model, optimizers[1])
        optimizers[1].load_state_dict(FSDP.optim_state_dict_to_load(model, optimizers[1], saved))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(batch(rank)), model(batch(rank)))
        assert "extra" in str(model.explain()) or name != "inside"


@EXPOSURES
@WORLDS
def test_a_wrapper_that_is_put_into_a_wrapped_model_joins_it(world_size, use_orig_params):
    run_kept_ranks(joined, world_size, use_orig_params)


def part_of_another(use_orig_params):
    model, other = (
        wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params) for _ in range(2)
    )
    step(model, dist.get_rank())
    unwrapped(model).blocks[1] = unwrapped(other).blocks[1]
    with pytest.raises(UsageError, match="part of another one"):
        model(batch(dist.get_rank()))
    step(other, dist.get_rank())


@EXPOSURES
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_of_another_model_is_refused(world_size, use_orig_params):
    run_kept_ranks(part_of_another, world_size, use_orig_params)


def tied_late(use_orig_params):
    model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
    step(model, dist.get_rank())
    holder = nn.Linear(7, 7)
    if not use_orig_params:
        with pytest.raises(TypeError, match="Parameter"):
            holder.weight = inside(model, 1).up.weight
        return
    holder.weight = inside(model, 1).up.weight
    inside(model).extra = holder
    with pytest.raises(
        UsageError, match=r"'blocks\.1\.up\.weight' was registered at a second place"
    ):
        model(batch(dist.get_rank()))


@EXPOSURES
@WORLDS
def test_a_managed_parameter_at_a_second_place_is_refused(world_size, use_orig_params):
    run_kept_ranks(tied_late, world_size, use_orig_params)


def unmarked(use_orig_params):
    """Nothing that a wrapper or a training loop does has the tree looked at."""
    rank = dist.get_rank()
    model = build(OpenNet)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, use_orig_params=use_orig_params)
    model = FSDP(model, use_orig_params=use_orig_params)
    root = model._unit.root
    looks = []
    follow = type(root.tree).follow

    def counted(tree, **kwargs):
        looks.append(tree._changed)
        return follow(tree, **kwargs)

    type(root.tree).follow = counted
    step(model, rank)
    assert looks == [False]
    assert [unit.name for unit in root.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    looks.clear()
    optimizer = torch.optim.AdamW(model.parameters())
    state = model.state_dict()
    model.load_state_dict(state)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(model.state_dict())
    with FSDP.summon_full_params(model, with_grads=True):
        inside(model).up.weight.data.mul_(0.5)
    model.eval()
    with torch.no_grad():
        model(batch(rank))
    model.train()
    model.double()
    model.float()
    optimizer.step()
    optimizer.zero_grad()
    step(model, rank)
    assert looks == []
    nn.Linear(3, 3)  # elsewhere
    step(model, rank)
    assert looks == []
    model.module.blocks[0] = checkpoint_wrapper(model.module.blocks[0])
    looks.clear()
    step(model, rank)
    step(model, rank)
    assert looks == [True]


@EXPOSURES
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_nobody_changes_is_not_looked_at(world_size, use_orig_params):
    run_kept_ranks(unmarked, world_size, use_orig_params)


def copied(use_orig_params):
    rank = dist.get_rank()
    model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
    inside(model).extra = linear(7, 7).requires_grad_(False)
    step(model, rank)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        step(twin, rank)
        inside(twin, 1).extra = linear(7, 7)
        with pytest.raises(UsageError, match=r"blocks\.1\.extra"):
            twin(batch(rank))
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"blocks\.1\.extra"):
                duplicate(twin)
    step(model, rank)
    inner = FSDP(OpenBlock(5), use_orig_params=use_orig_params)
    inner.module.extra = linear(5, 5)
    with pytest.raises(UsageError, match=r"'extra\.weight', 'extra\.bias'"):
        FSDP(nn.Sequential(inner), use_orig_params=use_orig_params)


@EXPOSURES
def test_a_copy_of_a_changed_model_is_refused_as_its_forward_is(use_orig_params):
    run_kept_ranks(copied, 2, use_orig_params)


def forgotten():
    from fsdp.runtime import tree

    before = len(tree._trees)
    for use_orig_params in (False, True):
        model = wrap(build(OpenNet), {OpenBlock}, use_orig_params=use_orig_params)
        step(model, 0)
        assert len(tree._trees) == before + sum(1 for _ in model.modules())
        del model
        gc.collect()
        assert len(tree._trees) == before


def test_nothing_is_left_of_a_deleted_model():
    run_kept_ranks(forgotten, 1)


def put_back(use_orig_params):
    """A module that was taken out for the wrapping: each rank trains its own, and is told so once."""
    rank = dist.get_rank()
    plain = build(OpenNet)
    extra = linear(7, 7)
    model = wrap(plain, {OpenBlock}, use_orig_params=use_orig_params)
    inside(model).extra = extra
    with pytest.warns(FsdpWarning, match=r"nobody averages.*blocks\.0\.extra\.weight"):
        step(model, rank)
    alone = build(OpenNet)
    inside(alone).extra = linear(7, 7)
    step(alone, rank)
    torch.testing.assert_close(extra.weight.grad, inside(alone).extra.weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, rank, 1)
    inside(model, 1).extra = linear(7, 7)
    with pytest.raises(UsageError, match=r"blocks\.1\.extra"):
        model(batch(rank))


@EXPOSURES
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_put_back_before_the_first_forward_is_ignored_with_a_warning(
    world_size, use_orig_params
):
    run_ranks(put_back, world_size, use_orig_params)
