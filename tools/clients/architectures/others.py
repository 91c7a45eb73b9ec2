"""Others of transformers; see the package."""

from __future__ import annotations

import torch

from architectures.common_parts import (
    ROWS,
    V,
    bert,
    hf,
    ids,
    lm,
    predictions,
    randn,
)

hf(
    "layoutlm",
    "layoutlm",
    "LayoutLMForMaskedLM",
    "LayoutLMConfig",
    dict(bert, max_2d_position_embeddings=32),
    lambda g: dict(
        lm(g),
        bbox=torch.randint(0, 15, (ROWS, 7, 2), generator=g).repeat(1, 1, 2)
        + torch.tensor([0, 0, 3, 3]),
    ),
    ("LayoutLMLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "decision_transformer",
    "decision_transformer",
    "DecisionTransformerModel",
    "DecisionTransformerConfig",
    {
        "state_dim": 3,
        "act_dim": 2,
        "hidden_size": 16,
        "n_layer": 2,
        "n_head": 4,
        "max_ep_len": 16,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    lambda g: {
        "states": randn(g, 4, 3),
        "actions": randn(g, 4, 2),
        "rewards": randn(g, 4, 1),
        "returns_to_go": randn(g, 4, 1),
        "timesteps": ids(g, 4, low=0, high=16),
        "attention_mask": torch.ones(ROWS, 4),
    },
    ("DecisionTransformerGPT2Block",),
    loss=predictions,
    optimizers=("plain_sgd",),
)
hf(
    "musicgen",
    "musicgen",
    "MusicgenForCausalLM",
    "MusicgenDecoderConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_codebooks": 2,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 0,
    },
    lambda g: {"input_ids": ids(g, 2, 5, high=20), "labels": ids(g, 5, 2, high=20)},
    ("MusicgenDecoderLayer",),
    loss=lambda m, b: m(input_ids=b["input_ids"].flatten(0, 1), labels=b["labels"]).loss,
    optimizers=("plain_sgd",),
)
