"""Decoders of transformers; see the package."""

from __future__ import annotations

from architectures.common_parts import (
    V,
    hf,
    ids,
    kv,
    lm,
    nodrop,
    small,
)

hf(
    "gpt2",
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Config",
    {
        "vocab_size": V,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    lm,
    ("GPT2Block",),
    gc=True,
)
hf(
    "gpt2_double_heads",
    "gpt2",
    "GPT2DoubleHeadsModel",
    "GPT2Config",
    {
        "vocab_size": V,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
        "num_labels": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    lambda g: {
        "input_ids": ids(g, 2, 5),
        "labels": ids(g, 2, 5),
        "mc_labels": ids(g, low=0, high=2),
    },
    ("GPT2Block",),
    optimizers=("plain_sgd",),
)
hf(
    "gpt_neo",
    "gpt_neo",
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "window_size": 4,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    lm,
    ("GPTNeoBlock",),
)
hf(
    "gpt_neox",
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "GPTNeoXConfig",
    dict(small, hidden_dropout=0.0, attention_dropout=0.0),
    lm,
    ("GPTNeoXLayer",),
    gc=False,
)
hf(
    "gptj",
    "gptj",
    "GPTJForCausalLM",
    "GPTJConfig",
    {
        "vocab_size": V,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "rotary_dim": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    lm,
    ("GPTJBlock",),
)
hf(
    "opt",
    "opt",
    "OPTForCausalLM",
    "OPTConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 8,
        "dropout": 0.0,
        "pad_token_id": 0,
    },
    lm,
    ("OPTDecoderLayer",),
)
hf(
    "bloom",
    "bloom",
    "BloomForCausalLM",
    "BloomConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    },
    lm,
    ("BloomBlock",),
    gc=True,
)
hf(
    "llama",
    "llama",
    "LlamaForCausalLM",
    "LlamaConfig",
    dict(kv, tie_word_embeddings=True),
    lm,
    ("LlamaDecoderLayer",),
    gc=False,
)
hf(
    "llama_bias",
    "llama",
    "LlamaForCausalLM",
    "LlamaConfig",
    dict(kv, attention_bias=True, mlp_bias=True),
    lm,
    ("LlamaAttention", "LlamaMLP"),
)
hf(
    "mistral",
    "mistral",
    "MistralForCausalLM",
    "MistralConfig",
    dict(kv, sliding_window=4),
    lm,
    ("MistralDecoderLayer",),
)
hf("qwen2", "qwen2", "Qwen2ForCausalLM", "Qwen2Config", kv, lm, ("Qwen2DecoderLayer",))
hf(
    "qwen3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Config",
    dict(kv, head_dim=4),
    lm,
    ("Qwen3DecoderLayer",),
)
hf(
    "gemma",
    "gemma",
    "GemmaForCausalLM",
    "GemmaConfig",
    dict(kv, head_dim=4),
    lm,
    ("GemmaDecoderLayer",),
)
hf(
    "gemma2",
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    dict(kv, head_dim=4, sliding_window=4, query_pre_attn_scalar=4),
    lm,
    ("Gemma2DecoderLayer",),
    gc=True,
)
hf(
    "gemma3_text",
    "gemma3",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    dict(kv, head_dim=4, sliding_window=4, num_hidden_layers=3),
    lm,
    ("Gemma3DecoderLayer",),
)
hf(
    "phi",
    "phi",
    "PhiForCausalLM",
    "PhiConfig",
    dict(kv, partial_rotary_factor=0.5, qk_layernorm=True, resid_pdrop=0.0),
    lm,
    ("PhiDecoderLayer",),
)
hf("phi3", "phi3", "Phi3ForCausalLM", "Phi3Config", dict(kv), lm, ("Phi3DecoderLayer",))
hf(
    "falcon",
    "falcon",
    "FalconForCausalLM",
    "FalconConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": True,
        "new_decoder_architecture": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    lm,
    ("FalconDecoderLayer",),
)
hf(
    "mpt",
    "mpt",
    "MptForCausalLM",
    "MptConfig",
    {
        "vocab_size": V,
        "d_model": 16,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 32,
        "expansion_ratio": 2,
        "resid_pdrop": 0.0,
    },
    lm,
    ("MptBlock",),
)
hf(
    "stablelm",
    "stablelm",
    "StableLmForCausalLM",
    "StableLmConfig",
    dict(kv, use_parallel_residual=True, qk_layernorm=True),
    lm,
    ("StableLmDecoderLayer",),
)
hf(
    "cohere",
    "cohere",
    "CohereForCausalLM",
    "CohereConfig",
    dict(kv, use_qk_norm=True),
    lm,
    ("CohereDecoderLayer",),
)
hf("olmo2", "olmo2", "Olmo2ForCausalLM", "Olmo2Config", kv, lm, ("Olmo2DecoderLayer",))
hf(
    "starcoder2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    "Starcoder2Config",
    dict(kv, residual_dropout=0.0, embedding_dropout=0.0),
    lm,
    ("Starcoder2DecoderLayer",),
)
hf("glm", "glm", "GlmForCausalLM", "GlmConfig", dict(kv, head_dim=4), lm, ("GlmDecoderLayer",))
hf(
    "ctrl",
    "ctrl",
    "CTRLLMHeadModel",
    "CTRLConfig",
    {
        "vocab_size": V,
        "n_positions": 32,
        "n_embd": 16,
        "dff": 24,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    lm,
    ("EncoderLayer",),
)
hf(
    "biogpt",
    "biogpt",
    "BioGptForCausalLM",
    "BioGptConfig",
    dict(small, **nodrop, activation_dropout=0.0, layerdrop=0.0),
    lm,
    ("BioGptDecoderLayer",),
)
hf(
    "diffllama",
    "diffllama",
    "DiffLlamaForCausalLM",
    "DiffLlamaConfig",
    kv,
    lm,
    ("DiffLlamaDecoderLayer",),
)
