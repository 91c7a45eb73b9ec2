"""Encoder-decoders, recurrences, experts, state spaces, two towers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.zoo.common import (
    DTYPE,
    Mlp,
    Stack,
    add,
    ids,
    randn,
    regression,
    vectors,
)


# -- encoder-decoder of torch, tied three ways --------------------
class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(13, 8, padding_idx=0)
        self.core = nn.Transformer(8, 2, 2, 2, 13, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=DTYPE)
        out = self.core(self.emb(src), self.emb(tgt), tgt_mask=mask, src_key_padding_mask=None)
        return self.head(out)


def translation(model, batch):
    src, tgt = batch
    return F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())


def norm_first():
    model = Translator()
    model.core = nn.Transformer(
        8, 4, 1, 3, 9, dropout=0.0, batch_first=True, norm_first=True, bias=False, activation="gelu"
    )
    return model


add(
    "translator",
    Translator,
    lambda g: (ids(g, 13, 5), ids(g, 13, 6)),
    translation,
    ("TransformerEncoderLayer", "TransformerDecoderLayer"),
)
add(
    "translator_norm_first",
    norm_first,
    lambda g: (ids(g, 13, 5), ids(g, 13, 6)),
    translation,
    ("TransformerEncoder", "TransformerDecoderLayer"),
)


# -- recurrent --------------------
class Recurrent(nn.Module):
    def __init__(self, cls, **kw):
        super().__init__()
        self.rnn = cls(5, 7, batch_first=True, **kw)
        width = (kw.get("proj_size") or 7) * (2 if kw.get("bidirectional") else 1)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        seq = torch.stack([x, x * 2, -x], 1)
        y, _ = self.rnn(seq)
        return self.out(y[:, -1])


add(
    "lstm_proj_bi",
    lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4),
    vectors,
    regression,
    ("LSTM",),
)
add("gru", lambda: Recurrent(nn.GRU, num_layers=3), vectors, regression, ("GRU",))
add(
    "rnn_relu",
    lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False),
    vectors,
    regression,
    ("RNN",),
)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = nn.LSTM(6, 7, batch_first=True)
        self.cell = nn.LSTMCell(7, 5)
        self.gcell = nn.GRUCell(7, 5)
        self.out = nn.Linear(5, 11)

    def forward(self, tokens):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.emb(tokens), [4] * len(tokens), batch_first=True
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        h = c = g = torch.zeros(len(tokens), 5, dtype=y.dtype)
        outs = []
        for t in range(y.shape[1]):
            h, c = self.cell(y[:, t], (h, c))
            g = self.gcell(y[:, t], g)
            outs.append(self.out(h + g))
        return torch.stack(outs, 1)


add(
    "packed_cells",
    Packed,
    lambda g: ids(g, 11, 5),
    lambda m, t: F.cross_entropy(m(t).flatten(0, 1), t[:, 1:].flatten()),
    ("LSTM", "LSTMCell", "GRUCell"),
)


# -- ELECTRA-like sharing --------------------
class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(13, 6)
        self.pos = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, t):
        return self.norm(self.word(t) + self.pos.weight[: t.shape[1]])


class Tower(nn.Module):
    def __init__(self, embeddings, dim):
        super().__init__()
        self.embeddings = embeddings
        self.proj = nn.Linear(6, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 11, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, t):
        x = self.proj(self.embeddings(t))
        for layer in self.layers:
            x = layer(x)
        return x


class Electra(nn.Module):
    def __init__(self):
        super().__init__()
        e = Embeddings()
        self.generator, self.discriminator = Tower(e, 4), Tower(e, 8)
        self.back = nn.Linear(4, 6)
        self.bias = nn.Parameter(torch.zeros(13))
        self.head = nn.Linear(8, 1)

    def forward(self, t):
        masked = t.clone()
        masked[:, ::3] = 0
        logits = F.linear(
            self.back(self.generator(masked)), self.generator.embeddings.word.weight, self.bias
        )
        filled = torch.where(masked == t, t, logits.argmax(-1))
        judged = self.head(self.discriminator(filled)).squeeze(-1)
        return logits, judged, filled == t


def electra(model, t):
    logits, judged, same = model(t)
    return F.cross_entropy(
        logits.flatten(0, 1), t.flatten()
    ) + 5 * F.binary_cross_entropy_with_logits(judged, same.to(judged))


add("electra", Electra, lambda g: ids(g, 13, 7), electra, ("Tower",))
add("electra_layers", Electra, lambda g: ids(g, 13, 7), electra, ("TransformerEncoderLayer",))


# -- experts --------------------
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return self.b(F.silu(self.a(x)))


class Routed(nn.Module):
    def __init__(self, k=1, shared=False, empty_calls=False):
        super().__init__()
        self.gate = nn.Linear(6, 5, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(5))
        self.shared = Expert() if shared else None
        self.k, self.empty_calls = k, empty_calls

    def forward(self, x):
        flat = x.flatten(0, -2)
        p = self.gate(flat).softmax(-1)
        w, idx = p.topk(self.k, -1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = (idx == e).nonzero(as_tuple=True)
            if len(rows) or self.empty_calls:
                out = out.index_add(0, rows, expert(flat[rows]) * w[rows, slot, None])
        if self.shared is not None:
            out = out + self.shared(flat)
        load = F.one_hot(idx, 5).double().mean((0, 1))
        return x + out.view_as(x), 5 * (load * p.mean(0)).sum()


class MoeLM(nn.Module):
    def __init__(self, **kw):
        super().__init__()
        self.emb = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(Routed(**kw) for _ in range(2))
        self.head = nn.Linear(6, 13)

    def forward(self, t):
        x, aux = self.emb(t), 0
        for layer in self.layers:
            x, a = layer(x)
            aux = aux + a
        return self.head(x), aux


def moe_loss(model, t):
    logits, aux = model(t[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten()) + 0.01 * aux


def tokens(g):
    return ids(g, 13, 3)


any_rank = {"kwargs": (("allow_unused", "any_rank"),), "optimizers": ("plain_sgd",)}
add("moe_top1", MoeLM, tokens, moe_loss, ("Routed",), **any_rank)
add("moe_top1_experts", MoeLM, tokens, moe_loss, ("Expert",), **any_rank)
add(
    "moe_top2_shared",
    lambda: MoeLM(k=2, shared=True),
    tokens,
    moe_loss,
    ("Expert", "Routed"),
    **any_rank,
)
add(
    "moe_empty_calls",
    lambda: MoeLM(k=2, empty_calls=True),
    tokens,
    moe_loss,
    ("Expert",),
    optimizers=("plain_sgd",),
)


class Stacked(nn.Module):
    """Experts in one three-dimensional parameter."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 6, 9) * 0.3)
        self.w2 = nn.Parameter(torch.randn(4, 9, 6) * 0.3)

    def forward(self, x):
        flat = x.flatten(0, -2)
        p = self.gate(flat).softmax(-1)
        w, idx = p.max(-1)
        h = torch.bmm(flat[:, None], self.w1[idx]).relu()
        return x + torch.bmm(h, self.w2[idx])[:, 0].mul(w[:, None]).view_as(x), p.sum() * 0


class StackedLM(MoeLM):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Stacked() for _ in range(2))


add("moe_stacked", StackedLM, tokens, moe_loss, ("Stacked",))


# -- state spaces, RWKV, xLSTM --------------------
class Ssm(nn.Module):
    def __init__(self, d=6, n=3):
        super().__init__()
        self.inp = nn.Linear(d, 2 * d, bias=False)
        self.conv = nn.Conv1d(d, d, 3, groups=d, padding=2)
        self.x = nn.Linear(d, 1 + 2 * n, bias=False)
        self.dt = nn.Linear(1, d)
        self.a_log = nn.Parameter(torch.arange(1.0, n + 1).log().repeat(d, 1))
        self.d = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, u):
        x, gate = self.inp(u).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., : u.shape[1]].mT)
        dt, b, c = self.x(x).split([1, 3, 3], -1)
        dt = F.softplus(self.dt(dt))
        a = -self.a_log.exp()
        h = torch.zeros(len(u), x.shape[-1], 3, dtype=u.dtype)
        ys = []
        for t in range(u.shape[1]):
            h = (dt[:, t, :, None] * a).exp() * h + dt[:, t, :, None] * b[:, t, None] * x[
                :, t, :, None
            ]
            ys.append((h * c[:, t, None]).sum(-1))
        return u + self.out((torch.stack(ys, 1) + self.d * x) * F.silu(gate))


class TimeMix(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-2, 1, d))
        self.first = nn.Parameter(torch.zeros(d))
        self.mix = nn.ParameterDict({k: nn.Parameter(torch.rand(1, 1, d)) for k in "kvr"})
        self.k, self.v, self.r, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        last = F.pad(x, (0, 0, 1, -1))
        k, v, r = (getattr(self, n)(x * self.mix[n] + last * (1 - self.mix[n])) for n in "kvr")
        num = den = torch.zeros_like(x[:, 0])
        w = -self.decay.exp()
        out = []
        for t in range(x.shape[1]):
            e = (self.first + k[:, t]).exp()
            out.append((num + e * v[:, t]) / (den + e))
            num = w.exp() * num + k[:, t].exp() * v[:, t]
            den = w.exp() * den + k[:, t].exp()
        return x + self.o(r.sigmoid() * torch.stack(out, 1))


class SLstm(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.w = nn.Linear(d, 4 * d)
        self.r = nn.Parameter(torch.randn(2, d // 2, 2 * d) * 0.3)
        self.norm = nn.GroupNorm(2, d)

    def forward(self, x):
        h = c = n = m = torch.zeros_like(x[:, 0])
        outs = []
        for t in range(x.shape[1]):
            rec = torch.einsum("bhd,hde->bhe", h.view(len(x), 2, -1), self.r).flatten(1)
            z, i, f, o = (self.w(x[:, t]) + rec).chunk(4, -1)
            m2 = torch.maximum(F.logsigmoid(f) + m, i)
            i2, f2 = (i - m2).exp(), (F.logsigmoid(f) + m - m2).exp()
            c, n, m = f2 * c + i2 * z.tanh(), f2 * n + i2, m2
            h = o.sigmoid() * c / n.clamp(min=1e-6)
            outs.append(h)
        return x + self.norm(torch.stack(outs, 1).flatten(0, 1)).view_as(x)


class SeqLM(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.emb = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, t):
        x = self.emb(t)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lm(model, t):
    return F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())


def seqs(g):
    return ids(g, 13, 6)


add("mamba_like", lambda: SeqLM(Ssm(), Ssm()), seqs, lm, ("Ssm",))
add("rwkv_like", lambda: SeqLM(TimeMix(), TimeMix()), seqs, lm, ("TimeMix",))
add("xlstm_like", lambda: SeqLM(SLstm(), Ssm(), SLstm()), seqs, lm, ("SLstm", "Ssm"))


# -- two towers --------------------
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Stack(Mlp(), Mlp(), inp=10, out=4)
        self.text = SeqLM(Ssm())
        self.proj = nn.Parameter(torch.randn(13, 4) * 0.3)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0))

    def encode_text(self, t):
        return F.normalize(self.text(t).mean(1) @ self.proj, dim=-1)

    def forward(self, x, t):
        a, b = F.normalize(self.image(x), dim=-1), self.encode_text(t)
        return self.logit_scale.exp() * a @ b.T + self.logit_bias


def siglip(model, batch):
    logits = model(*batch)
    sign = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
    return -F.logsigmoid(sign * logits).mean()


def pairs(g):
    return (randn(g, 10), ids(g, 13, 4))


add("clip_blocks", Clip, pairs, siglip, ("Mlp", "Ssm"))
add("clip_towers", Clip, pairs, siglip, ("Stack", "SeqLM"))


# -- heads of all kinds --------------------
class AdaptiveHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(31, 8, mode="mean")
        self.bil = nn.Bilinear(8, 8, 8)
        self.soft = nn.AdaptiveLogSoftmaxWithLoss(8, 31, [5, 13], div_value=2.0)

    def forward(self, t, y):
        x = self.emb(t)
        return self.soft(self.bil(x, x), y).loss


add(
    "adaptive_softmax",
    AdaptiveHead,
    lambda g: (ids(g, 31, 4), ids(g, 31)),
    lambda m, b: m(*b),
    ("AdaptiveLogSoftmaxWithLoss",),
    optimizers=("plain_sgd",),
    backwards=("s",),
    wrappings=("class", "root"),
    kwargs=(("allow_unused", "any_rank"),),
)


class MhaVariants(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
        self.b = nn.MultiheadAttention(8, 4, kdim=5, vdim=3, batch_first=True, bias=False)
        self.q = nn.Parameter(torch.randn(1, 4, 8))
        self.c = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, y):
        q = self.q.expand(len(x), -1, -1)
        h, _ = self.a(q, x, x)
        h2, w = self.b(h, y[..., :5], y[..., 5:])
        return (h + h2 + self.c(h2, h, h, need_weights=False)[0]).mean((1, 2)) + w.sum((1, 2)) * 0.1


add(
    "attention_variants",
    MhaVariants,
    lambda g: (randn(g, 3, 8), randn(g, 4, 8), randn(g)),
    lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]),
    ("MultiheadAttention",),
)


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 8))
        self.cross = nn.TransformerDecoderLayer(8, 2, 9, dropout=0.0, batch_first=True)
        self.self_ = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        z = self.latents.expand(len(x), -1, -1)
        for _ in range(3):
            z = self.self_(self.cross(z, x))
        return self.out(z.mean(1))


add(
    "perceiver",
    Perceiver,
    lambda g: (randn(g, 5, 8), randn(g, 3)),
    regression,
    ("TransformerDecoderLayer", "TransformerEncoderLayer"),
)
