"""Encoder-decoders of transformers; see the package."""

from __future__ import annotations

from architectures.common_parts import (
    V,
    hf,
    s2s,
)

t5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
hf("t5", "t5", "T5ForConditionalGeneration", "T5Config", t5, s2s, ("T5Block",))
hf(
    "t5_gated_untied",
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    dict(t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    s2s,
    ("T5Block", "T5Stack"),
    gc=False,
)
hf("mt5", "mt5", "MT5ForConditionalGeneration", "MT5Config", dict(t5), s2s, ("MT5Block",))
hf("umt5", "umt5", "UMT5ForConditionalGeneration", "UMT5Config", dict(t5), s2s, ("UMT5Block",))
bart = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
hf(
    "bart",
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    bart,
    s2s,
    ("BartEncoderLayer", "BartDecoderLayer"),
)
hf(
    "bart_gc",
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    bart,
    s2s,
    ("BartEncoderLayer", "BartDecoderLayer"),
    gc=True,
)
hf(
    "pegasus",
    "pegasus",
    "PegasusForConditionalGeneration",
    "PegasusConfig",
    bart,
    s2s,
    ("PegasusEncoderLayer", "PegasusDecoderLayer"),
)
hf(
    "mbart_scaled",
    "mbart",
    "MBartForConditionalGeneration",
    "MBartConfig",
    dict(bart, scale_embedding=True),
    s2s,
    ("MBartDecoderLayer",),
)
hf(
    "marian",
    "marian",
    "MarianMTModel",
    "MarianConfig",
    dict(bart, decoder_vocab_size=V),
    s2s,
    ("MarianEncoderLayer", "MarianDecoderLayer"),
)
hf(
    "m2m",
    "m2m_100",
    "M2M100ForConditionalGeneration",
    "M2M100Config",
    dict(bart, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    s2s,
    ("M2M100EncoderLayer", "M2M100DecoderLayer"),
)
hf(
    "blenderbot",
    "blenderbot",
    "BlenderbotForConditionalGeneration",
    "BlenderbotConfig",
    bart,
    s2s,
    ("BlenderbotEncoderLayer", "BlenderbotDecoderLayer"),
)
hf(
    "led",
    "led",
    "LEDForConditionalGeneration",
    "LEDConfig",
    dict(
        {k: v for k, v in bart.items() if k != "max_position_embeddings"},
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    s2s,
    ("LEDEncoderLayer", "LEDDecoderLayer"),
    optimizers=("plain_sgd",),
)
hf(
    "prophetnet",
    "prophetnet",
    "ProphetNetForConditionalGeneration",
    "ProphetNetConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "ngram": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    s2s,
    ("ProphetNetEncoderLayer", "ProphetNetDecoderLayer"),
)
