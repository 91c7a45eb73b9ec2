"""Modules and loops that look after weights, graphs or state in ways of their own, each equal to the dense model.

A program is a model, the sets of classes to cut it into units by, and a script that runs on it plain and wrapped.
All of them run in one world, with both exposures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ShardedParameterError
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, assert_same_gradients, batch, build, full_grads, wrap


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        make: Builds the model.
        script: Leaves gradients on the model, plain or wrapped.
        units: Sets of classes that become units; each is tried.
    """

    make: Callable[[], nn.Module]
    script: Callable[[nn.Module, int], Any]
    units: Sequence[set[type[nn.Module]]] = ({Block},)


def loss(model, rank, step=0):
    return model(batch(rank, step)).square().sum()


def plain(model):
    return getattr(model, "module", model)


def block(model, index):
    return plain(plain(model).blocks[index])


def steps(model, rank):
    for step in range(2):
        loss(model, rank, step).backward()


def evaluated_between(model, rank):
    loss(model, rank).backward()
    model.eval()
    with torch.no_grad():
        loss(model, rank, 1)
    with torch.inference_mode():
        loss(model, rank, 2)
    model.train()
    loss(model, rank, 3).backward()


# -- attention: in evaluation torch reads weights past the forwards of the modules that hold them ----------------------


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` between two layers."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.inp(x).unsqueeze(0)
        return self.out(self.attention(hidden, hidden, hidden)[0].squeeze(0))


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with a mask of padding, which evaluation turns into nested tensors."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        padding = torch.zeros(1, x.shape[0], dtype=torch.bool)
        padding[0, -1] = True
        hidden = self.encoder(self.inp(x).unsqueeze(0), src_key_padding_mask=padding)
        return self.out(hidden.squeeze(0)[:3])


class Translator(nn.Module):
    """``nn.Transformer``, encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 9, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.inp(x).unsqueeze(0)
        return self.out(self.body(hidden, hidden)).squeeze(0)


def encoded(model, rank):
    reference = build(Encoder).eval()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = batch(rank, 1)
            torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
    model.train()
    evaluated_between(model, rank)
    model.eval()
    loss(model, rank, 4).backward()


# -- weights that are computed, renormalised, sparse, complex, scalar --------------------------------------------------


class Parametrized(nn.Module):
    """Two layers whose weight is made of others, in one of torch's ways."""

    def __init__(self, way):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.mid = nn.Sequential(way(nn.Linear(7, 7)), nn.Tanh())
        self.out = way(nn.Linear(7, 3))

    def forward(self, x):
        return self.out(self.mid(self.inp(x)))


WAYS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm_by_hook": nn.utils.spectral_norm,
    "weight_norm_by_hook": nn.utils.weight_norm,
    "pruned": functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
}


def computed_once(model, rank):
    """Two forwards share the weight that the first one computed."""
    with parametrize.cached():
        (loss(model, rank) + loss(model, rank, 1)).backward()
    loss(model, rank, 2).backward()


class Tables(nn.Module):
    """Embeddings that scale their gradients or give sparse ones."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode="sum")
        self.table = nn.Embedding(10, 6, scale_grad_by_freq=True)
        self.sparse = nn.Embedding(10, 6, sparse=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        tokens = (x.abs() * 3).long().clamp(max=9)
        rows = self.table(tokens) + self.sparse(tokens)
        return self.out(self.bag(tokens) + rows.mean(1))


class Complex(nn.Module):
    """Complex matrices and a complex scalar beside real ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.cfloat))
        self.mid = nn.Linear(7, 7, dtype=torch.cfloat)
        self.scale = nn.Parameter(torch.tensor(0.3 + 0.1j))
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out((self.mid(x.cfloat() @ self.weight) * self.scale).abs())


class Scale(nn.Module):
    """One parameter without dimensions."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return x * self.value


class Scales(nn.Module):
    """Nothing but scalars: most ranks hold none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scale(0.5), Scale(2.0)
        self.logit = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.second(self.first(x)).tanh() * self.logit.exp()


class Lists(nn.Module):
    """Parameters in torch's containers, one of them under a second name."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(7, 7) for _ in range(3))
        self.others = nn.ParameterDict({"a": nn.Parameter(torch.randn(7)), "b": torch.tensor(1.0)})
        self.alias = self.weights[0]

    def forward(self, x):
        start = x
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.others["a"] + self.others["b"] + start @ self.alias


class ListsNet(nn.Module):
    """Such modules in a dictionary, run by key."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.parts = nn.ModuleDict({"k": Lists(), "j": Lists()})
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        for key in self.parts:
            x = self.parts[key](x)
        return self.out(x)


# -- recurrent, with state that outlives a forward ---------------------------------------------------------------------


class Recurrent(nn.Module):
    """Packed sequences through a GRU, then a cell step by step."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, 6, bidirectional=True)
        self.cell = nn.LSTMCell(12, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        packed, _ = self.gru(nn.utils.rnn.pack_sequence([x, x[:2]]))
        states = None
        for row in nn.utils.rnn.pad_packed_sequence(packed)[0]:
            states = self.cell(row, states)
        return self.out(states[0])


class Carrying(nn.Module):
    """Takes its state and gives it back."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(5, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x, hidden=None):
        hidden = self.cell(x, hidden)
        return self.out(hidden), hidden


def truncated_through_time(model, rank):
    hidden, total = None, 0.0
    for step in range(4):
        out, hidden = model(batch(rank, step), hidden)
        total = total + out.square().sum()
        if step == 1:
            total.backward()
            hidden, total = hidden.detach(), 0.0
    total.backward()


# -- graphs of the user's own ------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Keeps its weight past autograd's saved tensors."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x)
        ctx.weight, ctx.module = weight, module
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.weight if ctx.module is None else ctx.module.weight
        return grad @ weight, grad.t() @ x, None


class ProductBlock(Block):
    """Its backward reads the weight that the context holds."""

    looked_up = False

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x)))
        module = self.down if self.looked_up else None
        return x + Product.apply(hidden, self.down.weight, module)


class LookingUpBlock(ProductBlock):
    """Its backward looks the weight up on the module."""

    looked_up = True


class MappedBlock(Block):
    """Uses torch.func on activations, with its parameters as they are."""

    def forward(self, x):
        hidden = torch.vmap(lambda row: F.linear(row, self.up.weight, self.up.bias))(self.norm(x))
        slope = torch.func.vmap(torch.func.grad(self.energy))(x)
        return x + torch.vmap(self.down)(torch.tanh(hidden)) + slope

    def energy(self, row):
        return self.down(torch.tanh(self.up(row))).square().sum()


class LearningBlock(Block):
    """One step of learning inside the forward, and the gradient through it (MAML)."""

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x)))
        error = self.down(hidden).square().mean()
        own = dict(self.down.named_parameters())
        grads = torch.autograd.grad(error, list(own.values()), create_graph=True)
        fast = {
            name: param - 0.1 * grad for (name, param), grad in zip(own.items(), grads, strict=True)
        }
        return x + torch.func.functional_call(self.down, fast, (hidden,))


class AutocastBlock(Block):
    """Lowers its own precision."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class ModesBlock(Block):
    """Runs itself without and with gradients, whatever is set around it."""

    def forward(self, x):
        with torch.no_grad():
            target = super().forward(x)
        with torch.enable_grad():
            return super().forward(x) * target


class RichBlock(Block):
    """Returns None, itself computed, its input, an index, a detached tensor and a number."""

    def forward(self, x):
        out = super().forward(x)
        return None, out, x, out.argmax(), [], out.detach(), 3


class IdleBlock(Block):
    """Computes with its parameters, for nothing."""

    def forward(self, x):
        super().forward(x)
        return x * 2


def net_of(cls):
    """A :class:`Net` of two blocks of a class."""

    class Of(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(cls(7) for _ in range(2))

        def forward(self, x):
            x = self.inp(x)
            for part in self.blocks:
                x = part(x)
                if isinstance(x, tuple):
                    _, out, before, index, _, detached, _ = x
                    x = out + before * detached + index
            return self.out(x)

    return Of


class IndexNet(Net):
    """Slices, reverses and repeats its list of blocks, and calls one by its forward method."""

    def forward(self, x):
        x = self.inp(x)
        for part in (*self.blocks[1:], *reversed(self.blocks), self.blocks[-1]):
            x = part(x)
        return self.out.forward(self.blocks[0].forward(x))


class IterableNet(Net):
    """Takes an iterable of inputs and options by keyword only."""

    def forward(self, xs=None, *, scale=1.0, extra=None):
        return sum(super(IterableNet, self).forward(x) for x in xs) * scale


def iterables(model, rank):
    model(batch(rank, step) for step in range(3)).square().sum().backward()
    model(xs=iter([batch(rank)]), scale=2.0, extra=object()).square().sum().backward()
    model(xs=[batch(rank)], extra={"call": print, "set": {1, 2}, "none": None}).sum().backward()


class FrozenParts(Net):
    """Checkpoints, one inside another, over frozen, partly frozen and trained units."""

    reentrant = False

    def __init__(self):
        super().__init__()
        for part in (self.inp, self.blocks[0], self.blocks[2].up):
            part.requires_grad_(False)

    def run(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.inp(x).requires_grad_(self.reentrant)
        x = self.run(lambda y: self.blocks[1](self.run(self.blocks[0], y)), x)
        return self.out(self.run(self.blocks[2], x))


class FrozenPartsReentrant(FrozenParts):
    """The same with the older kind of checkpoints."""

    reentrant = True


class Statistics(nn.Module):
    """Buffers that the forward changes, in place and by assignment."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("average", torch.zeros(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        hidden = self.norm(self.inp(x))
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.calls += 1
        self.average = self.average * 1.0
        return self.out(hidden - self.average * self.calls)


class Shared(nn.Module):
    """Two models around one encoder, in one loss."""

    def __init__(self):
        super().__init__()
        self.encoder = Net()
        self.left = nn.Sequential(self.encoder, nn.Linear(3, 3))
        self.right = nn.Sequential(self.encoder, nn.Linear(3, 3))

    def forward(self, x):
        return self.left(x) * self.right(x * 2)


# -- loops -------------------------------------------------------------------------------------------------------------


def autocast_over_two_forwards(model, rank):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = loss(model, rank) + loss(model, rank, 1)
    total.float().backward()


def scaled(model, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(model, rank)).backward()


def for_inputs_alone_first(model, rank):
    x = batch(rank).requires_grad_()
    total = model(x).square().sum()
    total.backward(inputs=[x], retain_graph=True)
    total.backward()


def balanced_at_a_hidden_layer(model, rank):
    """Losses weighted by the norms of their gradients at an intermediate result (GradNorm)."""
    kept = []
    handle = block(model, 1).register_forward_hook(lambda m, args, out: kept.append(out))
    out = model(batch(rank))
    handle.remove()
    terms = out[:, 0].square().sum(), out[:, 1].abs().sum()
    slopes = [torch.autograd.grad(term, kept[0], retain_graph=True)[0] for term in terms]
    sum(term / slope.norm() for term, slope in zip(terms, slopes, strict=True)).backward()


def retained_at_a_hidden_layer(model, rank):
    kept = []

    def keep(module, args, out):
        out.retain_grad()
        kept.append(out)

    handle = block(model, 0).register_forward_hook(keep)
    with torch.autograd.set_detect_anomaly(True):
        loss(model, rank).backward()
    handle.remove()
    assert kept[0].grad is not None


def hooks_of_every_module(model, rank):
    from torch.nn.modules import module

    handles = [
        module.register_module_forward_hook(
            lambda m, args, out: out * 2 if isinstance(m, Block) else None
        ),
        module.register_module_full_backward_hook(lambda m, grads, outs: None),
        block(model, 1).register_forward_hook(
            lambda m, args, kwargs, out: out + 1, with_kwargs=True, always_call=True
        ),
    ]
    try:
        loss(model, rank).backward()
    finally:
        for handle in handles:
            handle.remove()


def no_rows(model, rank):
    model(batch(rank)[:0]).square().sum().backward()
    loss(model, rank).backward()


def summoned_in_evaluation(model, rank):
    model.eval()
    whole = contextlib.nullcontext()
    if isinstance(model, FSDP):
        whole = FSDP.summon_full_params(model, writeback=False)
    with torch.no_grad(), whole:
        model(batch(rank))
        assert sum(param.numel() for param in model.parameters()) >= sum(
            param.numel() for param in build().parameters()
        )
    model.train()
    loss(model, rank).backward()


def frozen_with_gradients(model, rank):
    """A block is frozen after it has a gradient, which it keeps, and thawed again."""
    loss(model, rank).backward()
    for part, step in ((False, 1), (True, 2)):
        plain(model).blocks[1].requires_grad_(part)
        loss(model, rank, step).backward()


class Failing(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("on purpose")


def exceptions_in_tensor_hooks_and_functions(model, rank):
    out = model(batch(rank))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    handle = block(model, 0).register_forward_hook(lambda m, args, out: Failing.apply(out))
    with pytest.raises(KeyError):
        loss(model, rank).backward()
    handle.remove()
    model.zero_grad()
    loss(model, rank).backward()


def forward_mode(model, rank):
    """Directional derivatives of the output, and the gradient through them."""
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(batch(rank), torch.ones(4, 5))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(model(x))
        (primal.square().sum() + tangent.square().sum()).backward()


LINEAR_OR_CELLS = ({nn.Linear}, {nn.GRUCell}, set())
PROGRAMS = {
    "attention": Program(SelfAttention, evaluated_between, ({nn.MultiheadAttention}, set())),
    "encoder": Program(
        Encoder,
        encoded,
        ({nn.TransformerEncoderLayer}, {nn.MultiheadAttention}),
    ),
    "encoder, norms apart": Program(Encoder, encoded, ({nn.LayerNorm},)),
    "transformer": Program(
        Translator,
        evaluated_between,
        ({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},),
    ),
    **{
        name: Program(
            functools.partial(Parametrized, way),
            evaluated_between,
            ({nn.Sequential}, {nn.Linear}),
        )
        for name, way in WAYS.items()
    },
    "computed once": Program(
        functools.partial(Parametrized, parametrizations.weight_norm),
        computed_once,
        ({nn.Sequential}, set()),
    ),
    "tables": Program(Tables, steps, ({nn.EmbeddingBag, nn.Embedding}, set())),
    "complex": Program(Complex, steps, ({nn.Linear}, set())),
    "double": Program(
        lambda: Net().double(),
        lambda model, rank: model(batch(rank).double()).square().sum().backward(),
    ),
    "scalars": Program(Scales, steps, ({Scale}, set())),
    "lists of parameters": Program(ListsNet, steps, ({Lists}, set())),
    "recurrent": Program(Recurrent, evaluated_between, ({nn.GRU, nn.LSTMCell}, set())),
    "carried state": Program(Carrying, truncated_through_time, LINEAR_OR_CELLS),
    "weight in a context": Program(net_of(ProductBlock), steps, ({ProductBlock}, set())),
    "weight looked up in a backward": Program(
        net_of(LookingUpBlock), steps, ({LookingUpBlock}, set())
    ),
    "vmap and grad inside": Program(net_of(MappedBlock), steps, ({MappedBlock}, set())),
    "learning inside": Program(net_of(LearningBlock), steps, ({LearningBlock}, set())),
    "autocast inside": Program(net_of(AutocastBlock), steps, ({AutocastBlock},)),
    "modes inside": Program(net_of(ModesBlock), evaluated_between, ({ModesBlock},)),
    "rich outputs": Program(net_of(RichBlock), steps, ({RichBlock},)),
    "idle units": Program(net_of(IdleBlock), steps, ({IdleBlock}, {nn.Linear, nn.LayerNorm})),
    "indexing": Program(IndexNet, steps),
    "iterables": Program(IterableNet, iterables),
    "frozen parts": Program(FrozenParts, steps),
    "frozen parts, reentrant": Program(FrozenPartsReentrant, steps),
    "statistics": Program(Statistics, steps, ({nn.BatchNorm1d}, {nn.Linear}, set())),
    "shared": Program(Shared, steps, ({Net}, {nn.Sequential}, {Block}, {nn.Sequential, Net})),
    **{
        script.__name__: Program(Net, script)
        for script in (
            autocast_over_two_forwards,
            scaled,
            for_inputs_alone_first,
            balanced_at_a_hidden_layer,
            retained_at_a_hidden_layer,
            hooks_of_every_module,
            no_rows,
            summoned_in_evaluation,
            frozen_with_gradients,
            exceptions_in_tensor_hooks_and_functions,
            forward_mode,
        )
    },
}


def mean_grads(make, script, world_size):
    """As ``dense_grads``, for models that can not be copied and gradients that may be sparse."""
    total: dict[str, torch.Tensor | None] = {}
    for rank in range(world_size):
        replica = build(make)
        script(replica, rank)
        for name, param in replica.named_parameters():
            before = total.setdefault(name, None)
            if param.grad is not None:
                part = param.grad.to_dense() / world_size
                total[name] = part if before is None else before + part
    return total


def every_program():
    for name, run in PROGRAMS.items():
        torch.manual_seed(0)
        expected = mean_grads(run.make, run.script, dist.get_world_size())
        for classes in run.units:
            for orig in (False, True):
                try:
                    model = wrap(build(run.make), classes, use_orig_params=orig)
                    run.script(model, dist.get_rank())
                    assert_same_gradients(expected, full_grads(model), none_is_zero=not orig)
                except BaseException as error:
                    error.add_note(f"in {name}, units {classes}, use_orig_params={orig}")
                    raise


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_program_computes_what_the_dense_model_does(world_size):
    run_kept_ranks(every_program, world_size, timeout=200)


class YieldingBlock(Block):
    """A generator: its forward runs when it is read, after the unit's."""

    def forward(self, x):
        yield super().forward(x)


class YieldingNet(Net):
    """Reads the generators of its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(YieldingBlock(7) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for part in self.blocks:
            x = sum(part(x))
        return self.out(x)


def read_late(use_orig_params):
    """What a forward leaves to run after it, or modules that others read past their forwards, finds no weights."""
    alone = use_orig_params and dist.get_world_size() == 1  # the piece is the whole
    for make, classes in (
        (YieldingNet, {YieldingBlock}),
        (SelfAttention, {nn.Linear}),  # reads `out_proj.weight`, never calls `out_proj`
    ):
        model = wrap(build(make), classes, use_orig_params=use_orig_params)
        if alone:
            torch.testing.assert_close(model(batch(0)), build(make)(batch(0)))
            continue
        with pytest.raises(ShardedParameterError) as caught:
            model(batch(0))
        assert caught.value.fqn in ("blocks.0.norm.weight", "attention.out_proj.weight")


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_that_are_read_past_their_units_forward_are_refused_by_name(
    world_size, use_orig_params
):
    run_kept_ranks(read_late, world_size, use_orig_params)
