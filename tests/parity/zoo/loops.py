"""Programs: two players, equilibria, penalties, reversible layers, frozen and shared parts, several losses."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from tests.parity.zoo.common import (
    DTYPE,
    Mlp,
    Seq,
    SmoothMlp,
    Stack,
    add,
    randn,
    regression,
    vectors,
)
from tests.support.zoo import Architecture, Session, ordinary_step, register

# -- GANs: two optimizers --------------------


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = Seq(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 5))
        self.d = Seq(nn.Linear(5, 9), nn.Softplus(), nn.Linear(9, 1))

    def forward(self, which, real, noise):
        if which == "g":
            return -self.d(self.g(noise)).mean()
        with torch.no_grad():
            fake = self.g(noise)
        mix = (real * 0.3 + fake * 0.7).requires_grad_()
        (slope,) = torch.autograd.grad(self.d(mix).sum(), mix, create_graph=True)
        return (
            self.d(fake).mean() - self.d(real).mean() + 3 * (slope.norm(dim=-1) - 1).square().mean()
        )


def gan_step(session: Session):
    session.optimizer.zero_grad()
    loss = session.backward(lambda m, b: m("d", *b))
    for _p in session.model.parameters():  # the generator's are untouched
        pass
    norm = session.clip(1.0)
    session.optimizer.step()
    session.optimizer.zero_grad()
    loss += session.backward(lambda m, b: m("g", *b))
    norm += session.clip(1.0)
    session.optimizer.step()
    return loss, norm


add(
    "wgan_gp",
    Gan,
    lambda g: (randn(g, 5), randn(g, 3)),
    regression,
    ("Seq",),
    step=gan_step,
    optimizers=("plain_sgd",),
)


# -- equilibrium, many applications --------------------


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(7, 7)
        self.u = nn.Linear(7, 7)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.w(z) + self.u(x))


class Equilibrium(nn.Module):
    """Implicit gradients: a fixed point without a graph, one step with it, and a hook that solves the backward."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.cell = Cell()
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if torch.is_grad_enabled():
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x)

            def solve(grad):
                g = grad
                for _ in range(10):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return self.out(z)


add("equilibrium", Equilibrium, vectors, regression, ("Cell",))


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(5, 7), Cell(), nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        z = x
        for _ in range(9):
            z = self.cell(z, x)
        return self.out(z)


add("unrolled", Unrolled, vectors, regression, ("Cell",))


# -- reinforcement: several forwards, one backward --------------------
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Seq(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh())
        self.actor, self.critic = nn.Linear(9, 4), nn.Linear(9, 1)
        self.log_std = nn.Parameter(torch.full((4,), -0.3))

    def forward(self, x):
        h = self.body(x)
        return self.actor(h), self.critic(h).squeeze(-1), self.log_std.exp().expand(len(x), 4)


def ppo(model, batch):
    x, y = batch
    with torch.no_grad():
        old = model(x)
    total = 0
    state = x
    for _ in range(3):
        mean, value, std = model(state)
        d = torch.distributions.Normal(mean, std)
        logp = d.log_prob(y).sum(-1)
        ratio = (logp - torch.distributions.Normal(old[0], old[2]).log_prob(y).sum(-1)).exp()
        adv = (y.sum(-1) - old[1]).detach()
        total = (
            total
            - torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            + (value - y.sum(-1)).square().mean()
            - 0.01 * d.entropy().mean()
        )
        state = state + 0.1 * torch.cat([mean, mean[:, :1]], -1)
    return total / 3


add("actor_critic", ActorCritic, lambda g: vectors(g, 5, 4), ppo, ("Seq",))


# -- LoRA and frozen parts --------------------
class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class LoraBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up, self.down = LoraLinear(nn.Linear(7, 13)), LoraLinear(nn.Linear(13, 7))
        self.norm.requires_grad_(False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


add(
    "lora",
    lambda: Stack(LoraBlock(), LoraBlock(), LoraBlock()),
    vectors,
    regression,
    ("LoraBlock",),
)


def _frozen_first():
    m = Stack(*[Mlp() for _ in range(4)])
    m.inp.requires_grad_(False)
    m.blocks[0].requires_grad_(False)
    m.blocks[2].requires_grad_(False)
    return m


add("frozen_alternating", _frozen_first, vectors, regression, ("Mlp",))


def _bitfit():
    m = Stack(*[Mlp() for _ in range(3)])
    for name, p in m.named_parameters():
        p.requires_grad_("bias" in name)
    return m


add("bitfit", _bitfit, vectors, regression, ("Mlp",))


# -- scalars, containers --------------------
class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.by_name = nn.ModuleDict(
            {
                "first": nn.ModuleDict({"x": nn.Linear(5, 7)}),
                "list": nn.ModuleList([Mlp(), nn.ModuleList([Mlp()])]),
            }
        )
        self.vectors = nn.ParameterList(
            [
                nn.Parameter(torch.randn(7)),
                nn.Parameter(torch.tensor(0.3)),
                nn.Parameter(torch.randn(1, 1)),
            ]
        )
        self.table = nn.ParameterDict(
            {
                "scale": nn.Parameter(torch.tensor(1.1)),
                "shift": nn.Parameter(torch.randn(3)),
                "w": nn.Parameter(torch.randn(3, 7)),
            }
        )
        self.nested = nn.ParameterList(
            [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(2, 3))]
        )

    def forward(self, x):
        x = self.by_name["first"]["x"](x)
        x = self.by_name["list"][0](x) * self.vectors[0] + self.vectors[1]
        x = self.by_name["list"][1][0](x) + self.vectors[2]
        return (
            F.linear(x, self.table["w"]) * self.table["scale"]
            + self.table["shift"]
            + sum(p.sum() for p in self.nested)
        )


add("containers", Containers, vectors, regression, ("Mlp",))


# -- checkpointing --------------------
class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if i != 2 else block(x)
        return self.out(x)


add("checkpoint_reentrant", lambda: Checkpointed(True), vectors, regression, ("Mlp",))
add("checkpoint_saved_hooks", lambda: Checkpointed(False), vectors, regression, ("Mlp",))


# -- graphs --------------------
class Gnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.msg = nn.ModuleList(nn.Linear(14, 7) for _ in range(2))
        self.upd = nn.ModuleList(nn.GRUCell(7, 7) for _ in range(2))
        self.inp, self.out = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        n = len(x)
        src, dst = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
        h = self.inp(x)
        for m, u in zip(self.msg, self.upd, strict=False):
            e = F.relu(m(torch.cat([h[src], h[dst]], -1)))
            h = u(torch.zeros_like(h).index_add(0, dst, e), h)
        return self.out(h)


add("gnn", Gnn, vectors, regression, ("GRUCell",))


# -- physics-informed, energy --------------------
class Pinn(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Stack(SmoothMlp(), SmoothMlp(), inp=2, out=1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (dduu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        return u, du, dduu


def pde(model, x):
    u, du, dduu = model(x)
    return (du[:, 1] - dduu[:, 0]).square().mean() + u.square().mean()


add("pinn", Pinn, lambda g: randn(g, 2), pde, ("SmoothMlp",))


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Stack(SmoothMlp(), SmoothMlp(), inp=5, out=1)

    def forward(self, x):
        for _ in range(3):  # langevin steps, differentiated through
            x = x.requires_grad_() if not x.requires_grad else x
            (g,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            x = x - 0.1 * g
        return x


add(
    "energy_unrolled", Energy, vectors, lambda m, b: m(b[0].clone()).square().mean(), ("SmoothMlp",)
)


# -- reversible, custom functions --------------------
class RevFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, f, g, *params):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        y1, y2 = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y1 = y1.requires_grad_()
            gy = ctx.g(y1)
        gy.backward(d2)
        with torch.no_grad():
            x2 = y2 - gy
        d1 = d1 + y1.grad
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            fx = ctx.f(x2)
        fx.backward(d1)
        d2 = d2 + x2.grad
        return (d1, d2, None, None)


class RevNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 14)
        self.f = nn.ModuleList(SmoothMlp() for _ in range(2))
        self.g = nn.ModuleList(SmoothMlp() for _ in range(2))
        self.out = nn.Linear(14, 3)

    def forward(self, x):
        a, b = self.inp(x).chunk(2, -1)
        for f, g in zip(self.f, self.g, strict=False):
            a, b = RevFunction.apply(a, b, f, g)
        return self.out(torch.cat([a, b], -1))


add("reversible", RevNet, vectors, regression, ("SmoothMlp",))


class Ste(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, scale):
        ctx.save_for_backward(w, scale)
        return (w / scale).round().clamp(-3, 3) * scale

    @staticmethod
    def backward(ctx, grad):
        w, scale = ctx.saved_tensors
        inside = ((w / scale).abs() <= 3).to(w)
        return grad * inside, (
            grad * ((w / scale).round().clamp(-3, 3) - inside * w / scale)
        ).sum().reshape(())


class Quant(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(0.11))

    def forward(self, x):
        return x + torch.tanh(F.linear(x, Ste.apply(self.lin.weight, self.scale), self.lin.bias))


add(
    "quantized_ste",
    lambda: Stack(Quant(), Quant()),
    vectors,
    regression,
    ("Quant",),
    wrappings=("class", "lambda", "root"),
)


# -- depth, exits, heads --------------------
class Exits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.heads = nn.ModuleDict({str(i): nn.Linear(7, 3) for i in range(3)})

    def forward(self, x):
        x = self.inp(x)
        outs = {}
        for i, block in enumerate(self.blocks):
            x = block(x)
            outs[i] = self.heads[str(i)](x)
        return outs


add(
    "deep_supervision",
    Exits,
    vectors,
    lambda m, b: sum(F.mse_loss(o, b[1]) for o in m(b[0]).values()),
    ("Mlp",),
)


class LayerDrop(nn.Module):
    """Layers left out in turn, the same on every rank."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.out = nn.Linear(7, 3)

    def forward(self, x, drop):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if i != drop:
                x = block(x)
        return self.out(x)


def layerdrop_step(session):
    session.optimizer.zero_grad()
    loss = session.backward(lambda m, b: F.mse_loss(m(b[0], session.number % 5), b[1]))
    norm = session.clip(0.5)
    session.optimizer.step()
    return loss, norm


add(
    "layerdrop",
    LayerDrop,
    vectors,
    regression,
    ("Mlp",),
    step=layerdrop_step,
    optimizers=("plain_sgd",),
)


# -- SAM, EMA, several losses, schedules, L-BFGS-like closures --------------------
def sam_step(session):
    loss_fn = session._case.architecture.loss
    session.optimizer.zero_grad()
    session.backward(loss_fn)
    norm = session.clip(1e9)
    params = [p for g in session.optimizer.param_groups for p in g["params"]]
    moves = [None if p.grad is None else p.grad * (0.05 / (norm + 1e-12)) for p in params]
    with torch.no_grad():
        for p, m in zip(params, moves, strict=False):
            if m is not None:
                p.add_(m)
    session.optimizer.zero_grad()
    loss = session.backward(loss_fn)
    with torch.no_grad():
        for p, m in zip(params, moves, strict=False):
            if m is not None:
                p.sub_(m)
    norm = session.clip(0.5)
    session.optimizer.step()
    return loss, norm


add("sam", lambda: Stack(Mlp(), Mlp()), vectors, regression, ("Mlp",), step=sam_step)


def closure_step(session):
    loss_fn = session._case.architecture.loss
    norms = []

    def closure():
        session.optimizer.zero_grad()
        value = session.backward(loss_fn)
        norms.append(session.clip(0.5))
        return torch.tensor(value)

    loss = session.optimizer.step(closure)
    return float(loss), norms[-1]


add("closure", lambda: Stack(Mlp(), Mlp()), vectors, regression, ("Mlp",), step=closure_step)


def scheduled_step(session):
    if session.number == 0 or not hasattr(session, "schedule"):
        o = session.optimizer
        session.schedule = torch.optim.lr_scheduler.OneCycleLR(
            o, 0.02, total_steps=10, cycle_momentum=False
        )
    out = ordinary_step(session)
    session.schedule.step()
    return out


add("scheduled", lambda: Stack(Mlp(), Mlp()), vectors, regression, ("Mlp",), step=scheduled_step)


def two_losses_step(session):
    session.optimizer.zero_grad()
    loss = session.backward(lambda m, b: F.mse_loss(m(b[0]), b[1]), sync=False)
    loss += session.backward(lambda m, b: m(b[0]).abs().mean())
    loss += session.backward(lambda m, b: m(b[0] * 2).square().mean(), micro=1)
    norm = session.clip(0.5)
    session.optimizer.step()
    return loss, norm


add("two_losses", lambda: Stack(Mlp(), Mlp()), vectors, regression, ("Mlp",), step=two_losses_step)


# -- BYOL: a target with its own forward, no grads --------------------
class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = Stack(SmoothMlp()), Stack(SmoothMlp())
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.pred = nn.Linear(3, 3)

    def forward(self, a, b):
        with torch.no_grad():
            t = self.target(b)
        return -F.cosine_similarity(self.pred(self.online(a)), t).mean()


def byol_step(session):
    session.optimizer.zero_grad()
    loss = session.backward(lambda m, b: m(*b))
    norm = session.clip(0.5)
    session.optimizer.step()
    module = session.model
    summon = (
        FSDP.summon_full_params(module) if isinstance(module, FSDP) else contextlib.nullcontext()
    )
    with summon, torch.no_grad():
        inner = module.module if isinstance(module, FSDP) else module
        for o, t in zip(inner.online.parameters(), inner.target.parameters(), strict=False):
            t.lerp_(o, 0.1)
    return loss, norm


add("byol", Byol, lambda g: (randn(g, 5), randn(g, 5)), regression, ("SmoothMlp",), step=byol_step)


# -- mixed dtypes, odd layouts --------------------
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 7).float()
        self.c = nn.Linear(7, 7).bfloat16().requires_grad_(False)
        self.d = nn.Linear(7, 3)

    def forward(self, x):
        x = self.a(x)
        x = x + self.b(x.float()).double()
        with torch.no_grad():
            y = self.c(x.bfloat16()).double()
        return self.d(x + 0.1 * y.round(decimals=1))


def _mixed():
    m = Mixed()
    m.a.double(), m.d.double()
    return m


register(Architecture("mixed_dtypes", _mixed, vectors, regression, ("Linear",), tolerance=1e-5))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(7), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3)
        )
        self.net.double()
        self.net(torch.zeros(2, 5, dtype=DTYPE))

    def forward(self, x):
        return self.net(x)


add("lazy", Lazy, vectors, regression, ("Linear",))


class Kan(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.coef = nn.Parameter(torch.randn(b, a, 5) * 0.2)
        self.base = nn.Parameter(torch.randn(b, a) * 0.3)
        self.register_buffer("grid", torch.linspace(-2, 2, 5))

    def forward(self, x):
        basis = torch.exp(-(x[..., None] - self.grid).square())
        return F.silu(x) @ self.base.T + torch.einsum("nak,bak->nb", basis, self.coef)


class KanNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Kan(5, 4), Kan(4, 6), Kan(6, 3))

    def forward(self, x):
        return self.layers(x)


add("kan", KanNet, vectors, regression, ("Kan",))
