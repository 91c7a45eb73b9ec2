"""Convolutions, generators of images, parametrized and complex weights, windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.parity.zoo.common import (
    DTYPE,
    Seq,
    Stack,
    add,
    ids,
    randn,
    regression,
    vectors,
)
from tests.support.zoo import Architecture, register

# -- convolutions --------------------


class Res(nn.Module):
    def __init__(self, c, norm):
        super().__init__()
        self.c1 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.n1 = norm(c)
        self.c2 = nn.Conv2d(c, c, 3, padding=1, groups=2, bias=False)
        self.n2 = norm(c)

    def forward(self, x):
        return F.relu(x + self.n2(self.c2(F.silu(self.n1(self.c1(x))))))


class ResNet(nn.Module):
    def __init__(self, norm, channels_last=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.layers = nn.Sequential(Res(4, norm), nn.MaxPool2d(2), Res(4, norm))
        self.fc = nn.Linear(4, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        if self.stem.weight.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def images(g):
    return (randn(g, 3, 11, 11), randn(g, 3))


add("resnet_bn", lambda: ResNet(nn.BatchNorm2d), images, regression, ("Res",))
add(
    "resnet_gn_cl", lambda: ResNet(lambda c: nn.GroupNorm(2, c), True), images, regression, ("Res",)
)
add(
    "resnet_in",
    lambda: ResNet(lambda c: nn.InstanceNorm2d(c, affine=True)),
    images,
    regression,
    ("Res",),
)


class ConvNeXtBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dw = nn.Conv2d(c, c, 5, padding=2, groups=c)
        self.norm = nn.LayerNorm(c)
        self.up, self.down = nn.Linear(c, 3 * c), nn.Linear(3 * c, c)
        self.gamma = nn.Parameter(1e-1 * torch.ones(c))

    def forward(self, x):
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.stages = nn.Sequential(
            *[nn.Sequential(ConvNeXtBlock(6), ConvNeXtBlock(6)) for _ in range(2)]
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


add("convnext", ConvNeXt, images, regression, ("ConvNeXtBlock",))


class Down(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.c = nn.Conv2d(a, b, 3, padding=1)
        self.emb = nn.Linear(4, b)
        self.n = nn.GroupNorm(1, b)

    def forward(self, x, t):
        return F.silu(self.n(self.c(x)) + self.emb(t)[:, :, None, None])


class Up(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.t = nn.ConvTranspose2d(a, b, 2, stride=2)
        self.body = Down(2 * b, b)

    def forward(self, x, skip, t):
        return self.body(torch.cat([self.t(x), skip], 1), t)


class UNet(nn.Module):
    """Noise prediction with skips and a time embedding that every block uses."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2, 4), nn.SiLU(), nn.Linear(4, 4))
        self.d1, self.d2, self.mid = Down(2, 3), Down(3, 4), Down(4, 5)
        self.u2, self.u1 = Up(5, 4), Up(4, 3)
        self.out = nn.Conv2d(3, 2, 1)

    def forward(self, x, t):
        e = self.time(torch.stack([t.sin(), t.cos()], -1))
        a = self.d1(x, e)
        b = self.d2(F.avg_pool2d(a, 2), e)
        c = self.mid(F.avg_pool2d(b, 2), e)
        return self.out(self.u1(self.u2(c, b, e), a, e))


def diffusion(model, batch):
    x, noise, t = batch
    return F.mse_loss(
        model(x * t.cos()[:, None, None, None] + noise * t.sin()[:, None, None, None], t), noise
    )


add(
    "unet_diffusion",
    UNet,
    lambda g: (randn(g, 2, 8, 8), randn(g, 2, 8, 8), randn(g)),
    diffusion,
    ("Down", "Up"),
)


# -- generative --------------------


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Seq(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 6))
        self.dec = Seq(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 5))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x, noise):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + noise * (logvar / 2).exp()
        return self.dec(z), mu, logvar, self.log_scale


def elbo(model, batch):
    x, noise = batch
    out, mu, logvar, scale = model(x, noise)
    dist = torch.distributions.Normal(out, scale.exp())
    return -dist.log_prob(x).mean() - 0.5 * (1 + logvar - mu.square() - logvar.exp()).mean()


add("vae", VAE, lambda g: (randn(g, 5), randn(g, 3)), elbo, ("Seq",))


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Seq(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.book = nn.Embedding(6, 4)
        self.dec = Seq(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x):
        z = self.enc(x)
        index = torch.cdist(z, self.book.weight).argmin(-1)
        q = self.book(index)
        extra = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.dec(z + (q - z).detach()), extra


def vq(model, x):
    out, extra = model(x)
    return F.mse_loss(out, x) + extra


add("vqvae", VQ, lambda g: randn(g, 5), vq, ("Seq",))


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 6))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])

    def forward(self, x):
        x = x @ self.mix
        a, b = x.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        return torch.cat([a, b * s.tanh().exp() + t], -1), s.tanh().sum(-1) + torch.linalg.slogdet(
            self.mix
        )[1]

    def inverse(self, y):
        a, b = y.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        return torch.cat([a, (b - t) * (-s.tanh()).exp()], -1) @ torch.linalg.inv(self.mix)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2) for i in range(3))
        self.prior = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        total = 0
        for step in self.steps:
            x, log = step(x)
            total = total + log
        return (x - self.prior).square().sum(-1).mean() / 2 - total.mean()


add("flow", Flow, lambda g: randn(g, 6), lambda m, x: m(x), ("Coupling",))


# -- tied transpose, hyper-networks, masks --------------------
class TiedAuto(nn.Module):
    def __init__(self):
        super().__init__()
        self.e1, self.e2 = nn.Linear(5, 9), nn.Linear(9, 4)
        self.b1, self.b2 = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        z = self.e2(self.e1(x).tanh())
        h = F.linear(z, self.e2.weight.t(), self.b1).tanh()
        return F.linear(h, self.e1.weight.t(), self.b2)


add(
    "tied_transpose",
    TiedAuto,
    lambda g: randn(g, 5),
    lambda m, x: F.mse_loss(m(x), x),
    wrappings=("root",),
)


class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = Seq(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5 * 3 + 3))
        self.z = nn.Parameter(torch.randn(4))
        self.base = nn.Linear(5, 3)

    def forward(self, x):
        made = self.maker(self.z)
        w, b = made[:15].view(3, 5), made[15:]
        return torch.func.functional_call(
            self.base, {"weight": self.base.weight + w, "bias": b}, (x,)
        )


add(
    "hypernetwork",
    Hyper,
    vectors,
    regression,
    ("Seq",),
    wrappings=("class", "root"),
    optimizers=("plain_sgd",),
)


class Masked(nn.Conv2d):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 2:] = 0
        mask[:, :, 2] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=1)


class PixelCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            Masked(1, 3, 3), nn.ELU(), Masked(3, 3, 3), nn.ELU(), Masked(3, 1, 3)
        )

    def forward(self, x):
        return self.layers(x)


add(
    "pixelcnn",
    PixelCNN,
    lambda g: randn(g, 1, 5, 5),
    lambda m, x: F.mse_loss(m(x), x.sin()),
    ("Masked",),
)


class WritesMask(Masked):
    def forward(self, x):
        self.weight.data *= self.mask
        return F.conv2d(x, self.weight, self.bias, padding=1)


class PixelCNN2(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(WritesMask(1, 3, 3), nn.ELU(), WritesMask(3, 1, 3))

    def forward(self, x):
        return self.layers(x)


add(
    "pixelcnn_writes",
    PixelCNN2,
    lambda g: randn(g, 1, 5, 5),
    lambda m, x: F.mse_loss(m(x), x.sin()),
    ("WritesMask",),
    backwards=("s", "ns"),
)


# -- vision transformers --------------------
class SwinBlock(nn.Module):
    def __init__(self, d, shift):
        super().__init__()
        self.shift = shift
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.bias_table = nn.Parameter(torch.zeros(9, 2))
        coords = torch.stack(
            torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
        ).flatten(1)
        rel = coords[:, :, None] - coords[:, None] + 1
        self.register_buffer("index", rel[0] * 3 + rel[1], persistent=False)
        self.tau = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x):  # b h w d
        b, h, w, d = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        q, k, v = self.qkv(y).view(-1, 4, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.tau + self.bias_table[
            self.index
        ].permute(2, 0, 1)
        y = self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, d))
        y = y.view(b, h // 2, w // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, d)
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 2, 2)
        self.cls = nn.Parameter(torch.zeros(1, 1, 1, 6))
        self.stages = nn.Sequential(SwinBlock(6, 0), SwinBlock(6, 1))
        self.merge = nn.Linear(24, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stages(self.patch(x).permute(0, 2, 3, 1) + self.cls)
        b, h, w, d = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, -1, 4 * d)
        return self.head(self.merge(x).mean(1))


add("swin_like", Swin, lambda g: (randn(g, 3, 8, 8), randn(g, 3)), regression, ("SwinBlock",))


# -- norms of weights, parametrizations --------------------


class Skew(nn.Module):
    def forward(self, x):
        return x.triu(1) - x.triu(1).mT


class NormBlock(nn.Module):
    def __init__(self, kind):
        super().__init__()
        lin = nn.Linear(7, 7)
        if kind == "old_wn":
            lin = nn.utils.weight_norm(lin)
        if kind == "wn":
            lin = parametrizations.weight_norm(lin)
        if kind == "old_sn":
            lin = nn.utils.spectral_norm(lin)
        if kind == "sn":
            lin = parametrizations.spectral_norm(lin)
        if kind == "orth":
            lin = parametrizations.orthogonal(lin)
        if kind == "skew":
            parametrize.register_parametrization(lin, "weight", Skew())
        self.lin = lin

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


add(
    "weight_norms",
    lambda: Stack(NormBlock("old_wn"), NormBlock("wn"), NormBlock("skew"), NormBlock("orth")),
    vectors,
    regression,
    ("NormBlock",),
)


# spectral norm updates its buffers in each forward of training: dense sees W forwards a step
def freeze_power(model):
    for m in model.modules():
        if isinstance(m, (NormBlock,)):
            m.eval()


add(
    "spectral_norms",
    lambda: Stack(NormBlock("old_sn"), NormBlock("sn")),
    vectors,
    regression,
    ("NormBlock",),
    prepare=freeze_power,
)


# -- recommenders: bags --------------------
class Dlrm(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                k: nn.EmbeddingBag(n, 4, mode=mode, sparse=sparse)
                for k, n, mode in (("a", 7, "sum"), ("b", 11, "mean"))
            }
        )
        self.bottom = Seq(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
        self.top = Seq(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x, a, b):
        parts = torch.stack([self.bottom(x), self.bags["a"](a), self.bags["b"](b)], 1)
        inter = (parts @ parts.mT)[:, [0, 0, 1], [1, 2, 2]]
        return self.top(torch.cat([parts[:, 0], inter], -1)).squeeze(-1)


def clicks(model, batch):
    x, a, b, y = batch
    return F.binary_cross_entropy_with_logits(model(x, a, b), (y > 0).to(DTYPE))


def recs(g):
    return (randn(g, 5), ids(g, 7, 3), ids(g, 11, 4), randn(g))


add("dlrm", Dlrm, recs, clicks, ("Seq",))


# -- complex --------------------
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cdouble) * 0.3)
        self.skip = nn.Conv1d(3, 3, 1)

    def forward(self, x):
        f = torch.fft.rfft(x)
        y = torch.einsum("bik,iok->bok", f[..., :4], self.w)
        return F.gelu(torch.fft.irfft(y, n=x.shape[-1]) + self.skip(x))


class Fno(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(1, 3, 1)
        self.layers = nn.Sequential(*[Spectral() for _ in range(3)])
        self.proj = nn.Conv1d(3, 1, 1)

    def forward(self, x):
        return self.proj(self.layers(self.lift(x[:, None])))[:, 0]


register(
    Architecture(
        "fno_complex",
        lambda: _keep_complex(Fno()),
        lambda g: (randn(g, 9), randn(g, 9)),
        regression,
        ("Spectral",),
        optimizers=("adamw", "plain_sgd"),
    )
)


def _keep_complex(model):
    for p in model.parameters():
        if not p.is_complex():
            p.data = p.data.double()
    return model
