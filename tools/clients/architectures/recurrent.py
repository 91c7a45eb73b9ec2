"""Recurrent of transformers; see the package."""

from __future__ import annotations

from architectures.common_parts import (
    V,
    hf,
    kv,
    lm,
    moe,
)

hf(
    "mamba",
    "mamba",
    "MambaForCausalLM",
    "MambaConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    },
    lm,
    ("MambaBlock",),
    tolerance=1e-8,
)
hf(
    "mamba2",
    "mamba2",
    "Mamba2ForCausalLM",
    "Mamba2Config",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "pad_token_id": 0,
    },
    lm,
    ("Mamba2Block",),
    tolerance=1e-7,
    optimizers=("plain_sgd",),
)
hf(
    "rwkv",
    "rwkv",
    "RwkvForCausalLM",
    "RwkvConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "attention_hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "context_length": 32,
    },
    lm,
    ("RwkvBlock",),
    tolerance=1e-7,
    backwards=("s",),
)
hf(
    "recurrent_gemma",
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    "RecurrentGemmaConfig",
    dict(kv, num_hidden_layers=3, lru_width=16, attention_window_size=4, head_dim=4),
    lm,
    ("RecurrentGemmaDecoderLayer",),
    tolerance=1e-6,
)
hf(
    "jamba",
    "jamba",
    "JambaForCausalLM",
    "JambaConfig",
    dict(
        kv,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    ),
    lm,
    ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
    **moe,
)
hf(
    "bamba",
    "bamba",
    "BambaForCausalLM",
    "BambaConfig",
    dict(
        kv,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
        attn_rotary_emb=4,
    ),
    lm,
    ("BambaDecoderLayer",),
    tolerance=1e-6,
    optimizers=("plain_sgd",),
)
