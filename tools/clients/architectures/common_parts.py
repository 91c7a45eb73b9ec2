"""What the families share: configurations, inputs, and how a model is entered."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn

from tests.support.zoo import ROWS, Architecture, register

FAMILIES: dict[str, list[str]] = {}
V = 31  # vocabulary


def ids(generator, *shape, low=3, high=V):
    """Tokens; the first three are special."""
    return torch.randint(low, high, (ROWS, *shape), generator=generator)


def randn(generator, *shape):
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)


def in_float64(model):
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.double()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.double())
    return model


def hf(name, module, model_class, config_class, config, batch, blocks, loss=None, gc=None, **rest):
    """Enter a model by the names of its classes; ``gc``: checkpointing, and whether it is reentrant."""

    def build() -> nn.Module:
        found = importlib.import_module(f"transformers.models.{module}")
        made = config(found) if callable(config) else config
        model = in_float64(getattr(found, model_class)(getattr(found, config_class)(**made)))
        model.train()
        if gc is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": gc})
        return model

    rest = {"tolerance": 1e-9, **rest}
    register(
        Architecture(
            name, build, batch, loss or out_loss, tuple(blocks), table="architectures", **rest
        )
    )
    family = str(sys._getframe(1).f_globals["__name__"]).rpartition(".")[2]
    FAMILIES.setdefault(family, []).append(name)


def out_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def lm(generator):
    tokens = ids(generator, 7)
    return {"input_ids": tokens, "labels": tokens}


def s2s(generator):
    return {"input_ids": ids(generator, 6), "labels": ids(generator, 5)}


def captions(generator, tokens):
    return {"input_ids": tokens, "pixel_values": randn(generator, 3, 16, 16), "labels": tokens}


def predictions(model, batch):
    """A loss on all that a Decision Transformer predicts."""
    out = model(**batch)
    return sum(o.square().mean() for o in (out.state_preds, out.action_preds, out.return_preds))


eager = {"experts_implementation": "eager"}
small = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
kv = dict(small, **eager, num_key_value_heads=2)
nodrop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

bert = dict(small, **nodrop)
moe = {"kwargs": (("allow_unused", "any_rank"),), "optimizers": ("plain_sgd",), "tolerance": 1e-7}
