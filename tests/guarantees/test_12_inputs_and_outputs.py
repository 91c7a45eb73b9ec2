"""Whatever a unit takes and returns, and wherever an intermediate is kept: gradients are those of the dense model."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision
from fsdp.errors import ShardedParameterError, UnsupportedError
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    Block,
    Net,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)


@dataclass
class Pair:
    """A dataclass with a field that is None."""

    hidden: torch.Tensor
    rest: Any = None


class Named(NamedTuple):
    """A named tuple."""

    hidden: torch.Tensor
    note: str


class ModelOutput(OrderedDict):
    """A mapping whose attributes are its items, as transformers has."""

    def __init__(self, **items):
        super().__init__(items)
        vars(self).update(items)


@dataclass
class DataOutput(OrderedDict):
    """A dataclass that is a mapping too."""

    hidden: torch.Tensor

    def __post_init__(self):
        for item in fields(self):
            self[item.name] = getattr(self, item.name)


class Box:
    """A class that torch's pytree knows."""

    def __init__(self, content):
        self.content = content


pytree.register_pytree_node(Box, lambda box: ([box.content], None), lambda items, _: Box(*items))


class Opaque:
    """A class nobody knows how to take apart."""

    def __init__(self, content):
        self.content = content


FORMS = {
    "dict": (lambda h: {"hidden": [h]}, lambda o: o["hidden"][0]),
    "dataclass": (Pair, lambda o: o.hidden),
    "nested": (lambda h: Pair(None, {"x": (Named(h, "n"), None)}), lambda o: o.rest["x"][0].hidden),
    "named_tuple": (lambda h: Named(h, "note"), lambda o: o.hidden),
    "model_output": (lambda h: ModelOutput(hidden=h), lambda o: o.hidden),
    "data_output": (DataOutput, lambda o: o["hidden"]),
    "registered": (lambda h: Box({"h": h}), lambda o: o.content["h"]),
    "opaque": (Opaque, lambda o: o.content),
    "view_written": (lambda h: h.view(-1), lambda o: o.mul_(1.0).view(4, 7)),
    "chunks_written": (lambda h: h.chunk(2), lambda o: torch.cat([o[0], o[1].clone().add_(1)])),
}


class FormBlock(Block):
    """Takes and returns its tensor in the given form."""

    form = "dict"

    def forward(self, x):
        pack, unpack = FORMS[self.form]
        return pack(super().forward(unpack(x)))


class FormNet(Net):
    """Every block of the same form."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(FormBlock(7) for _ in range(2))
        for block in self.blocks:
            block.form = form

    def forward(self, x):
        pack, unpack = FORMS[self.form]
        x = pack(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return pack(self.out(unpack(x)))


def forms(form):
    unpack = (lambda o: o) if "written" in form else FORMS[form][1]

    def script(model, rank):
        out = unpack(model(batch(rank)))
        out = torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out
        out.square().sum().backward()

    check_script(script, lambda: FormNet(form), {FormBlock})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_right_for_any_form_of_inputs_and_outputs(world_size, form):
    run_kept_ranks(forms, world_size, form)


def cast_forms(use_orig_params):
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    for form in (
        "dict",
        "dataclass",
        "nested",
        "named_tuple",
        "model_output",
        "data_output",
        "registered",
    ):
        pack, unpack = FORMS[form]
        seen = []

        class Look(nn.Linear):
            def forward(self, x, count, unpack=unpack, seen=seen):
                seen.append((unpack(x).dtype, count.dtype))
                return super().forward(unpack(x))

        model = wrap(Look(5, 3), mixed_precision=policy, use_orig_params=use_orig_params)
        given = pack(batch(0))
        assert model(given, count=torch.arange(3)).dtype is torch.bfloat16
        assert seen == [(torch.bfloat16, torch.int64)]
        assert unpack(given).dtype is torch.float32  # the caller's own object is not written to


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inputs_of_any_form_are_cast_and_integers_never(world_size, use_orig_params):
    run_kept_ranks(cast_forms, world_size, use_orig_params)


def inside(net):
    """Modules of the second block, wrapped or not."""
    block = getattr(net, "module", net).blocks[1]
    return getattr(block, "module", block), getattr(net, "module", net)


def kept_by_a_hook(where, part):
    def script(model, rank):
        kept = []
        block, net = inside(model)
        target = {"up": block.up, "down": block.down, "block": block, "out": net.out}[where]
        handle = target.register_forward_hook(lambda m, args, out: kept.append((args[0], out)))
        try:
            model(batch(rank))
            if where != "block":  # and with another forward in between
                model(batch(rank, 1))
            kept[0][part].square().sum().backward()
        finally:
            handle.remove()

    check_script(script)


@pytest.mark.parametrize("part", [0, 1], ids=["input", "output"])
@pytest.mark.parametrize("where", ["up", "down", "block", "out"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_of_what_a_forward_hook_kept_alone(world_size, where, part):
    run_kept_ranks(kept_by_a_hook, world_size, where, part)


def hooked_on_one_rank():
    """Such a hook changes no communication where the outputs are used: one rank may have it alone."""

    def script(model, rank):
        block, _ = inside(model)
        if rank == 0:
            block.up.register_forward_hook(lambda m, args, out: None)
        for step in range(2):
            model(batch(rank, step)).square().sum().backward()

    check_script(script)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_on_one_rank_alone_does_not_make_ranks_differ(world_size):
    run_kept_ranks(hooked_on_one_rank, world_size)


class CachingBlock(Block):
    """Puts an intermediate where it is told to."""

    def forward(self, x, cache=None):
        hidden = torch.tanh(self.up(self.norm(x)))
        self.history = [hidden]
        if cache is not None:
            put = (
                cache.append
                if isinstance(cache, list)
                else functools.partial(cache.__setitem__, len(cache))
            )
            put(hidden)
        return x + self.down(hidden)


class CachingNet(Net):
    """Hands a cache to its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock(7) for _ in range(2))

    def forward(self, x, cache=None):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, cache=cache)
        return self.out(x)


def cached(kind):
    def script(model, rank):
        if kind == "attribute":
            model(batch(rank))
            hidden = inside(model)[0].history[0]
        else:
            cache = [] if kind == "list" else {}
            model(batch(rank), cache)
            hidden = cache[1]
        hidden.square().sum().backward()

    check_script(script, CachingNet, {CachingBlock})


@pytest.mark.parametrize("kind", ["list", "dict", "attribute"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_of_what_a_forward_put_into_a_container(world_size, kind):
    run_kept_ranks(cached, world_size, kind)


class HandingOut(Block):
    """Returns its weight beside its output, in one of the ways models do."""

    ways = (
        lambda w: w,
        lambda w: w.detach(),
        lambda w: {"codes": w.t()[0]},
        lambda w: (None, w[:2]),
    )
    way = 0

    def forward(self, x):
        return super().forward(x), type(self).ways[self.way](self.up.weight)


class Collecting(Net):
    """Uses its blocks' weights after their forwards."""

    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(HandingOut(7) for _ in range(2))
        for block in self.blocks:
            block.way = way

    def forward(self, x):
        x, penalty = self.inp(x), 0.0
        for block in self.blocks:
            x, given = block(x)
            leaves = pytree.tree_leaves(given)
            penalty = penalty + sum(w.square().sum() for w in leaves if w is not None)
        return self.out(x) + penalty


def handed_out():
    for way in range(len(HandingOut.ways)):

        def script(model, rank):
            with torch.no_grad():
                assert model(batch(rank)).isfinite().all()
            for step in range(2):
                model(batch(rank, step)).square().sum().backward()

        check_script(script, functools.partial(Collecting, way), {HandingOut})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weight_that_a_unit_returns_is_whole_where_it_is_used(world_size):
    run_kept_ranks(handed_out, world_size)


ESCAPED: list[torch.Tensor] = []


class Hiding(Block):
    """Keeps an intermediate where nobody looks."""

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x)))
        ESCAPED.append(hidden)
        return x + self.down(hidden)


class HidingNet(Net):
    """Of such blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Hiding(7) for _ in range(2))


def escaped(use_orig_params, *, frozen):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = build(HidingNet)
    if frozen:
        plain.blocks.requires_grad_(False)
    reference = copy.deepcopy(plain)
    model = wrap(plain, {Hiding}, use_orig_params=use_orig_params)
    ESCAPED.clear()
    model(batch(rank))
    if world_size == 1:
        ESCAPED[1].square().sum().backward()
    else:
        with pytest.raises(
            RuntimeError
        ):  # a trained unit's is named where its first gradient arrives
            ESCAPED[1].square().sum().backward()

    def script(net, rank):
        net.zero_grad()
        net(batch(rank)).square().sum().backward()

    script(model, rank)  # and nothing of it is left
    assert_same_gradients(
        dense_grads(reference, script, world_size), full_grads(model), none_is_zero=True
    )


def escaped_first_layer():
    """A gradient that arrives first is what tells: there is nothing freed to read before it."""
    model = wrap(build(HidingNet), {nn.Linear, nn.LayerNorm})
    kept = []
    up = model.module.blocks[0].up.module
    forward = up.forward
    up.forward = lambda x: _noting(kept, up, forward(x))
    model(batch(dist.get_rank()))
    with pytest.raises(ShardedParameterError, match=r"blocks\.0\.up"):
        kept[0].sum().backward()


def _noting(kept, module, output):
    kept.append(module.bias + 1.0)
    return output


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_escaped_through_a_closure_is_an_error_and_never_a_crash(
    world_size, use_orig_params, frozen
):
    run_kept_ranks(escaped, world_size, use_orig_params, frozen=frozen)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_past_every_hook_is_refused_naming_the_unit(world_size):
    run_kept_ranks(escaped_first_layer, world_size)


class Renormed(nn.Module):
    """Looking rows up shrinks them, in the weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 6, max_norm=0.5)
        self.bag = nn.EmbeddingBag(10, 6, max_norm=0.5)

    def forward(self, x):
        tokens = (x.abs() * 3).long().clamp(max=9)
        return self.table(tokens).mean(1) * self.bag(tokens)


def renormed(use_orig_params):
    model = build(Renormed)
    if dist.get_world_size() > 1:
        with pytest.raises(UnsupportedError, match=r"max_norm=0\.5.*table\.weight"):
            FSDP(model, use_orig_params=use_orig_params)
        model.table.max_norm = None
        with pytest.raises(UnsupportedError, match=r"bag\.weight"):
            FSDP(model, use_orig_params=use_orig_params)
        FSDP(model, use_orig_params=use_orig_params, ignored_modules=[model.bag])
        return
    expected = build(Renormed)
    wrapped = FSDP(model, use_orig_params=use_orig_params)
    for net in (expected, wrapped):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for step in range(3):
            optimizer.zero_grad()
            net(batch(0, step)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(wrapped.state_dict(), expected.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_embeddings_that_shrink_rows_train_on_one_rank_and_are_refused_by_name_on_several(
    world_size, use_orig_params
):
    run_kept_ranks(renormed, world_size, use_orig_params)
