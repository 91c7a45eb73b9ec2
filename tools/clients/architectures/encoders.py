"""Encoders of transformers; see the package."""

from __future__ import annotations

from architectures.common_parts import (
    V,
    bert,
    hf,
    ids,
    lm,
    small,
)

mlm = lm
hf("bert_mlm", "bert", "BertForMaskedLM", "BertConfig", bert, mlm, ("BertLayer",))
hf(
    "bert_pretraining",
    "bert",
    "BertForPreTraining",
    "BertConfig",
    bert,
    lambda g: dict(lm(g), next_sentence_label=ids(g, low=0, high=2)),
    ("BertLayer",),
)
hf(
    "roberta",
    "roberta",
    "RobertaForMaskedLM",
    "RobertaConfig",
    bert,
    mlm,
    ("RobertaLayer",),
    gc=True,
)
hf(
    "albert",
    "albert",
    "AlbertForMaskedLM",
    "AlbertConfig",
    dict(bert, embedding_size=8, num_hidden_layers=4, inner_group_num=2, num_hidden_groups=2),
    mlm,
    ("AlbertLayer",),
)
hf(
    "albert_group",
    "albert",
    "AlbertForMaskedLM",
    "AlbertConfig",
    dict(bert, embedding_size=8, num_hidden_layers=4),
    mlm,
    ("AlbertLayerGroup",),
)
hf(
    "electra",
    "electra",
    "ElectraForPreTraining",
    "ElectraConfig",
    dict(bert, embedding_size=8),
    lambda g: {"input_ids": ids(g, 7), "labels": ids(g, 7, low=0, high=2)},
    ("ElectraLayer",),
)
hf(
    "electra_mlm",
    "electra",
    "ElectraForMaskedLM",
    "ElectraConfig",
    dict(bert, embedding_size=8),
    mlm,
    ("ElectraLayer",),
)
hf(
    "distilbert",
    "distilbert",
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    {
        "vocab_size": V,
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    },
    mlm,
    ("TransformerBlock",),
)
hf(
    "deberta_v2",
    "deberta_v2",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    dict(
        bert,
        relative_attention=True,
        pos_att_type="p2c|c2p",
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    mlm,
    ("DebertaV2Layer",),
)
hf(
    "modernbert",
    "modernbert",
    "ModernBertForMaskedLM",
    "ModernBertConfig",
    dict(
        small,
        num_hidden_layers=3,
        cls_token_id=1,
        sep_token_id=2,
        reference_compile=False,
        attn_implementation="eager",
        local_attention=4,
    ),
    mlm,
    ("ModernBertEncoderLayer",),
)
hf(
    "xlnet",
    "xlnet",
    "XLNetLMHeadModel",
    "XLNetConfig",
    {"vocab_size": V, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, "dropout": 0.0},
    lm,
    ("XLNetLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "funnel",
    "funnel",
    "FunnelForMaskedLM",
    "FunnelConfig",
    {
        "vocab_size": V,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 16,
        "n_head": 4,
        "d_head": 4,
        "d_inner": 24,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    },
    mlm,
    ("FunnelLayer",),
)
hf(
    "mobilebert",
    "mobilebert",
    "MobileBertForMaskedLM",
    "MobileBertConfig",
    dict(bert, embedding_size=16, intra_bottleneck_size=8, true_hidden_size=8, num_hidden_layers=2),
    mlm,
    ("MobileBertLayer",),
)
hf(
    "fnet",
    "fnet",
    "FNetForMaskedLM",
    "FNetConfig",
    {
        "vocab_size": V,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 32,
        "type_vocab_size": 2,
    },
    mlm,
    ("FNetLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "nystromformer",
    "nystromformer",
    "NystromformerForMaskedLM",
    "NystromformerConfig",
    dict(bert, num_landmarks=2, segment_means_seq_len=8),
    lambda g: dict(zip(("input_ids", "labels"), (ids(g, 8),) * 2, strict=False)),
    ("NystromformerLayer",),
)
hf(
    "big_bird_full",
    "big_bird",
    "BigBirdForMaskedLM",
    "BigBirdConfig",
    dict(bert, attention_type="original_full"),
    mlm,
    ("BigBirdLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "longformer",
    "longformer",
    "LongformerForMaskedLM",
    "LongformerConfig",
    dict(bert, attention_window=4),
    lambda g: dict(zip(("input_ids", "labels"), (ids(g, 8),) * 2, strict=False)),
    ("LongformerLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "squeezebert",
    "squeezebert",
    "SqueezeBertForMaskedLM",
    "SqueezeBertConfig",
    dict(bert, embedding_size=16),
    mlm,
    ("SqueezeBertModule",),
    optimizers=("plain_sgd",),
)
hf(
    "esm",
    "esm",
    "EsmForMaskedLM",
    "EsmConfig",
    dict(bert, mask_token_id=2, position_embedding_type="rotary"),
    mlm,
    ("EsmLayer",),
    optimizers=("plain_sgd",),
)
hf("mpnet", "mpnet", "MPNetForMaskedLM", "MPNetConfig", bert, mlm, ("MPNetLayer",))
