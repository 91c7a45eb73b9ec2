"""Vision of transformers; see the package."""

from __future__ import annotations

import torch

from architectures.common_parts import (
    ROWS,
    V,
    hf,
    ids,
    nodrop,
    randn,
)


def pix(c=3, s=16):
    return lambda g: {"pixel_values": randn(g, c, s, s), "labels": ids(g, low=0, high=2)}


vit = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    image_size=16,
    patch_size=4,
    num_labels=2,
    **nodrop,
)
hf("vit", "vit", "ViTForImageClassification", "ViTConfig", vit, pix(), ("ViTLayer",))
hf(
    "deit",
    "deit",
    "DeiTForImageClassification",
    "DeiTConfig",
    vit,
    pix(),
    ("DeiTLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "dinov2",
    "dinov2",
    "Dinov2ForImageClassification",
    "Dinov2Config",
    vit,
    pix(),
    ("Dinov2Layer",),
    optimizers=("plain_sgd",),
)
hf(
    "beit",
    "beit",
    "BeitForImageClassification",
    "BeitConfig",
    dict(vit, drop_path_rate=0.0, use_relative_position_bias=True, layer_scale_init_value=0.1),
    pix(),
    ("BeitLayer",),
)
hf(
    "swin",
    "swin",
    "SwinForImageClassification",
    "SwinConfig",
    dict(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=2,
        drop_path_rate=0.0,
        num_labels=2,
        **nodrop,
    ),
    pix(),
    ("SwinLayer",),
)
hf(
    "swinv2",
    "swinv2",
    "Swinv2ForImageClassification",
    "Swinv2Config",
    dict(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=2,
        drop_path_rate=0.0,
        num_labels=2,
        **nodrop,
    ),
    pix(),
    ("Swinv2Layer",),
)
hf(
    "convnext",
    "convnext",
    "ConvNextForImageClassification",
    "ConvNextConfig",
    {
        "hidden_sizes": [4, 8],
        "depths": [1, 2],
        "num_stages": 2,
        "drop_path_rate": 0.0,
        "num_labels": 2,
    },
    pix(),
    ("ConvNextLayer",),
)
hf(
    "convnextv2",
    "convnextv2",
    "ConvNextV2ForImageClassification",
    "ConvNextV2Config",
    {
        "hidden_sizes": [4, 8],
        "depths": [1, 2],
        "num_stages": 2,
        "drop_path_rate": 0.0,
        "num_labels": 2,
    },
    pix(),
    ("ConvNextV2Stage",),
)
hf(
    "resnet",
    "resnet",
    "ResNetForImageClassification",
    "ResNetConfig",
    {
        "embedding_size": 4,
        "hidden_sizes": [4, 8],
        "depths": [1, 1],
        "layer_type": "basic",
        "num_labels": 2,
    },
    pix(s=32),
    ("ResNetStage",),
)
hf(
    "regnet",
    "regnet",
    "RegNetForImageClassification",
    "RegNetConfig",
    {
        "embedding_size": 4,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "groups_width": 4,
        "num_labels": 2,
    },
    pix(s=32),
    ("RegNetStage",),
)
hf(
    "mobilenet_v2",
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    "MobileNetV2Config",
    {
        "image_size": 32,
        "depth_multiplier": 0.25,
        "min_depth": 4,
        "classifier_dropout_prob": 0.0,
        "num_labels": 2,
    },
    pix(s=32),
    ("MobileNetV2InvertedResidual",),
    optimizers=("plain_sgd",),
    tolerance=1e-6,
)
hf(
    "segformer",
    "segformer",
    "SegformerForImageClassification",
    "SegformerConfig",
    dict(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        num_labels=2,
        **nodrop,
    ),
    pix(),
    ("SegformerLayer",),
)
hf(
    "poolformer",
    "poolformer",
    "PoolFormerForImageClassification",
    "PoolFormerConfig",
    {"depths": [1, 1, 1, 1], "hidden_sizes": [4, 4, 8, 8], "drop_path_rate": 0.0, "num_labels": 2},
    pix(s=64),
    ("PoolFormerLayer",),
)
hf(
    "levit",
    "levit",
    "LevitForImageClassification",
    "LevitConfig",
    {
        "image_size": 64,
        "hidden_sizes": [8, 12, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [4, 4, 4],
        "attention_ratio": [2, 2, 2],
        "mlp_ratio": [2, 2, 2],
        "drop_path_rate": 0,
        "num_labels": 2,
    },
    pix(s=64),
    ("LevitStage",),
    tolerance=1e-7,
    optimizers=("plain_sgd",),
)
hf(
    "vit_mae",
    "vit_mae",
    "ViTMAEForPreTraining",
    "ViTMAEConfig",
    dict(
        {k: v for k, v in vit.items() if k != "num_labels"},
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=12,
        mask_ratio=0.5,
    ),
    lambda g: {
        "pixel_values": randn(g, 3, 16, 16),
        "noise": torch.rand(ROWS, 16, generator=g, dtype=torch.float64),
    },
    ("ViTMAELayer",),
)
hf(
    "perceiver",
    "perceiver",
    "PerceiverForMaskedLM",
    "PerceiverConfig",
    {
        "vocab_size": V,
        "num_latents": 4,
        "d_latents": 16,
        "d_model": 16,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 2,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 7,
        "qk_channels": 16,
        "v_channels": 16,
    },
    lambda g: dict(zip(("inputs", "labels"), (ids(g, 7),) * 2, strict=False)),
    ("PerceiverLayer",),
)
