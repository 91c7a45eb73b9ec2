"""Backwards that come to a unit's parameters by ways its hooks do not see (oracle: the dense model)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import BackwardPrefetch, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.runtime.held import units_in
from fsdp.runtime.residency import Residency
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_kept_ranks, run_ranks_outcomes

WIDTH = 5
COLLECTED: list[torch.Tensor] = []


class Energy(nn.Module):
    """Computes with the slope of an energy, so its graph holds what a backward of its own has made."""

    def __init__(self, frozen):
        super().__init__()
        self.energy = nn.Linear(WIDTH, 7).requires_grad_(not frozen)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.energy(at)).square().sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        return x + self.out(slope)


def energies(frozen):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Energy(frozen), nn.Tanh(), Energy(frozen), nn.Linear(WIDTH, 3)
    ).double()


def rows(rank, step=0):
    generator = torch.Generator().manual_seed(17 * step + rank)
    x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def several_backwards(model, rank):
    """All of a graph and parts of it, again and again, with an evaluation in between."""
    x = rows(rank)
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(rows(rank, 1))
    model(rows(rank, 2)).square().sum().backward()
    loss.backward()
    return first, x.grad


def train_energies(orig, strategy, prefetch, frozen):
    model = FSDP(
        energies(frozen),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=strategy,
        backward_prefetch=prefetch,
        use_orig_params=orig,
    )
    slopes = several_backwards(model, model.rank)
    with FSDP.summon_full_params(model, with_grads=True):
        return slopes, [
            param.grad.clone() for param in model.parameters() if param.grad is not None
        ]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("world_size", "strategy", "prefetch"),
    [
        (1, ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE),
        (2, ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE),
        (2, ShardingStrategy.SHARD_GRAD_OP, BackwardPrefetch.BACKWARD_POST),
        (3, ShardingStrategy.FULL_SHARD, None),
    ],
)
def test_a_graph_with_a_backward_inside_may_be_used_again(
    world_size, strategy, prefetch, orig, frozen
):
    model = energies(frozen)
    wanted = [several_backwards(model, rank) for rank in range(world_size)]
    grads = [param.grad / world_size for param in model.parameters() if param.grad is not None]

    got = run_kept_ranks(train_energies, world_size, orig, strategy, prefetch, frozen)

    for rank, (slopes, found) in enumerate(got):
        torch.testing.assert_close(slopes, wanted[rank])
        torch.testing.assert_close(found, grads)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def residuals():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 3)
    ).double()


def evaluated(model, x):
    with torch.no_grad():
        return model(x)


def of_a_part(model, x):
    """A forward of one unit alone."""
    whole = model.module if isinstance(model, FSDP) else model
    return evaluated(whole[1], x)


def in_inference(model, x):
    with torch.inference_mode():
        return model(x)


BETWEEN = (evaluated, of_a_part, in_inference)


def slope_used_later(model, rank, between):
    """A slope is computed, something is evaluated, and the slope is part of losses."""
    x = rows(rank)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    between(model, rows(rank, 1).detach())
    slope.square().sum().backward(retain_graph=True)
    between(model, rows(rank, 2).detach())
    slope.pow(4).sum().backward()


def use_slopes_later(orig, strategy):
    found = []
    for between in BETWEEN:
        model = FSDP(
            residuals(),
            auto_wrap_policy=ModuleWrapPolicy({Residual}),
            sharding_strategy=strategy,
            use_orig_params=orig,
        )
        slope_used_later(model, model.rank, between)
        evaluated(model, rows(model.rank, 3))
        gathered = [unit for unit in units_in(model) if unit.unsharded_bytes]
        assert all(
            unit.residency is Residency.SHARDED for unit in gathered
        )  # nothing is left to read
        with FSDP.summon_full_params(model, with_grads=True):
            found.append([param.grad.clone() for param in model.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = rows(model.rank)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        optimizer.step()
        between(model, x.detach())
        with pytest.raises(RuntimeError, match="modified"):
            slope.square().sum().backward()
    return found


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.FULL_SHARD),
        (2, ShardingStrategy.SHARD_GRAD_OP),
        (2, ShardingStrategy.NO_SHARD),
        (3, ShardingStrategy.FULL_SHARD),
    ],
)
def test_a_slope_may_be_used_after_an_evaluation_and_not_after_a_step(world_size, strategy, orig):
    got = run_kept_ranks(use_slopes_later, world_size, orig, strategy)
    for number, between in enumerate(BETWEEN):
        model = residuals()
        for rank in range(world_size):
            slope_used_later(model, rank, between)
        wanted = [param.grad / world_size for param in model.parameters() if param.grad is not None]
        for found in got:
            torch.testing.assert_close(found[number], wanted)


class Leaking(nn.Module):
    """Leaves a loss where nobody looks; the backward comes to it before it comes to the module's output."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.main(x))
        y = y * self.side(y)
        COLLECTED.append(self.side(x).square().mean())
        return y


def use_leaked_losses(prefetch, orig, of_inputs):
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(*(Leaking() for _ in range(4))),
        auto_wrap_policy=ModuleWrapPolicy({Leaking}),
        backward_prefetch=prefetch,
        use_orig_params=orig,
    )
    x = rows(model.rank).float().detach().requires_grad_()
    loss = model(x).sum() + sum(COLLECTED)
    if of_inputs:
        torch.autograd.grad(loss, x)
    else:
        loss.backward()


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_parameters_that_are_still_being_gathered_are_never_read(prefetch, orig, of_inputs):
    for outcome in run_ranks_outcomes(use_leaked_losses, 2, prefetch, orig, of_inputs):
        assert outcome.raised(RuntimeError)


class Stopped(nn.Module):
    """Reads its parameters where they get no gradient, before it reads them where they do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, WIDTH))
        self.main = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(x * self.scale.detach(), self.main.weight.detach()))
        with torch.no_grad():
            view = self.scale.view(1, WIDTH)
        return self.main(x * view * self.scale.data) * self.scale


class Scaled(nn.Module):
    """Its frozen scale is read after all that is trained beside it, and its input wants no gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Stopped() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def tokens(rank):
    return (torch.arange(4) * (rank + 1)) % 7


def train_scaled(orig, strategy):
    torch.manual_seed(0)
    model = FSDP(
        Scaled(),
        auto_wrap_policy=ModuleWrapPolicy({Stopped}),
        sharding_strategy=strategy,
        use_orig_params=orig,
    )
    model(tokens(model.rank)).square().sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_stay_while_a_graph_reads_them_without_gradients(world_size, strategy, orig):
    torch.manual_seed(0)
    model = Scaled()
    for rank in range(world_size):
        (model(tokens(rank)).square().sum() / world_size).backward()
    wanted = [param.grad for param in model.parameters() if param.requires_grad]

    for got in run_kept_ranks(train_scaled, world_size, orig, strategy):
        torch.testing.assert_close(got, wanted)


def residencies_when_reduced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = FSDP(
        nn.Sequential(nn.Linear(8, 8), *(nn.TransformerEncoder(layer, 2).layers), nn.GRU(8, 8)),
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.GRU}),
    )
    root, found = model._unit.root, []
    start = type(root.reductions).start

    def look(self, unit):
        found.append((unit.name, unit.residency.name))
        start(self, unit)

    type(root.reductions).start = look
    for _ in range(2):
        model(torch.ones(2, 3, 8) * model.rank)[0].sum().backward()
    return found


def test_parameters_of_ordinary_layers_are_freed_before_their_gradients_are_reduced():
    for found in run_kept_ranks(residencies_when_reduced, 2):
        assert len(found) == 8
        assert {residency for _, residency in found} == {"SHARDED"}


class Partly(nn.Module):
    """Reentrant checkpoints around a part of a unit, so a part of its gradients come in backwards of their own."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = nn.Sequential(
            nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, WIDTH)
        )
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.norm(torch.tanh(self.inp(x)))
        return self.out(x + checkpoint(self.inside, x, use_reentrant=True))


def partly_checkpointed():
    torch.manual_seed(0)
    return Partly().double()


def sum_of_forwards(model, rank):
    sum(model(rows(rank, step)).square().sum() * (step + 1) for step in range(3)).backward()


def train_partly(orig):
    model = FSDP(partly_checkpointed(), use_orig_params=orig)
    sum_of_forwards(model, model.rank)
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_come_several_times_are_not_taken_for_all_of_them(world_size, orig):
    model = partly_checkpointed()
    for rank in range(world_size):
        sum_of_forwards(model, rank)
    wanted = [param.grad / world_size for param in model.parameters()]

    for got in run_kept_ranks(train_partly, world_size, orig):
        torch.testing.assert_close(got, wanted)


class Concealed(nn.Module):
    """Keeps its loss where no hook is put, behind a unit with a backward of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        out = self.out(checkpoint(self.inner, x, use_reentrant=True))
        COLLECTED.append(out.square().sum())
        return out.detach()


def concealed():
    torch.manual_seed(0)
    return Concealed().double()


def train_concealed(model, rank):
    COLLECTED.clear()
    for step in range(2):
        model(rows(rank, step))
        COLLECTED.pop().backward()


def train_concealed_sharded(orig):
    model = FSDP(
        concealed(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=orig,
    )
    train_concealed(model, model.rank)
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_begins_past_the_hooks_is_not_lost_to_one_inside_it(world_size, orig):
    model = concealed()
    for rank in range(world_size):
        train_concealed(model, rank)
    wanted = [param.grad / world_size for param in model.parameters()]

    for got in run_kept_ranks(train_concealed_sharded, world_size, orig):
        torch.testing.assert_close(got, wanted)


class Equilibrium(nn.Module):
    """A deep equilibrium layer: a hook on its output runs backwards through a graph of its own."""

    def __init__(self):
        super().__init__()
        self.inp, self.map = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inp(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(0.3 * self.map(z) + x)
        at = z.requires_grad_()
        again = torch.tanh(0.3 * self.map(at) + x.detach())
        z = torch.tanh(0.3 * self.map(z.detach()) + x)

        def solve(grad):
            y = grad
            for _ in range(5):
                y = torch.autograd.grad(again, at, y, retain_graph=True)[0] + grad
            return y

        z.register_hook(solve)
        return z


def equilibria():
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), Equilibrium(), Equilibrium(), nn.Linear(WIDTH, 3))
    return nn.Sequential(*layers).double()


def train_equilibria(orig, prefetch):
    model = FSDP(
        equilibria(),
        auto_wrap_policy=ModuleWrapPolicy({Equilibrium}),
        use_orig_params=orig,
        backward_prefetch=prefetch,
    )
    model(rows(model.rank)).square().sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("world_size", "prefetch"),
    [(1, None), (2, BackwardPrefetch.BACKWARD_PRE), (3, BackwardPrefetch.BACKWARD_POST), (2, None)],
)
def test_hooks_that_module_code_puts_on_its_output_find_whole_parameters(
    world_size, prefetch, orig
):
    model = equilibria()
    for rank in range(world_size):
        model(rows(rank)).square().sum().backward()
    wanted = [param.grad / world_size for param in model.parameters()]

    for got in run_kept_ranks(train_equilibria, world_size, orig, prefetch):
        torch.testing.assert_close(got, wanted)
