"""Towers of transformers; see the package."""

from __future__ import annotations

import torch

from architectures.common_parts import (
    ROWS,
    V,
    captions,
    hf,
    ids,
    kv,
    nodrop,
    randn,
    small,
)


def clip_loss(model, batch):
    return model(**batch, return_loss=True).loss


tower = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def both(g):
    t = ids(g, 6)
    t[:, -1] = 2
    return {
        "input_ids": t,
        "pixel_values": randn(g, 3, 16, 16),
        "attention_mask": torch.ones_like(t),
    }


def towers(**more):
    return dict(
        text_config=dict(
            tower,
            vocab_size=V,
            max_position_embeddings=16,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        ),
        vision_config=dict(tower, image_size=16, patch_size=4),
        **more,
    )


hf(
    "clip",
    "clip",
    "CLIPModel",
    "CLIPConfig",
    towers(projection_dim=8),
    both,
    ("CLIPEncoderLayer",),
    clip_loss,
)
hf(
    "clip_gc",
    "clip",
    "CLIPModel",
    "CLIPConfig",
    towers(projection_dim=8),
    both,
    ("CLIPEncoderLayer",),
    clip_loss,
    gc=False,
)
hf(
    "siglip",
    "siglip",
    "SiglipModel",
    "SiglipConfig",
    lambda m: {
        "text_config": dict(tower, vocab_size=V, max_position_embeddings=16, projection_size=16),
        "vision_config": dict(tower, image_size=16, patch_size=4),
    },
    both,
    ("SiglipEncoderLayer",),
    clip_loss,
)
hf(
    "blip",
    "blip",
    "BlipModel",
    "BlipConfig",
    lambda m: {
        "text_config": dict(tower, vocab_size=V, max_position_embeddings=16, **nodrop),
        "vision_config": dict(tower, image_size=16, patch_size=4),
        "projection_dim": 8,
    },
    both,
    ("BlipEncoderLayer", "BlipTextLayer"),
    clip_loss,
    optimizers=("plain_sgd",),
)
hf(
    "vilt",
    "vilt",
    "ViltForQuestionAnswering",
    "ViltConfig",
    dict(small, **nodrop, image_size=16, patch_size=4, num_labels=2, max_image_length=-1),
    lambda g: {
        "input_ids": ids(g, 5),
        "pixel_values": randn(g, 3, 16, 16),
        "labels": randn(g, 2).sigmoid(),
    },
    ("ViltLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "chinese_clip",
    "chinese_clip",
    "ChineseCLIPModel",
    "ChineseCLIPConfig",
    lambda m: {
        "text_config": dict(tower, vocab_size=V, max_position_embeddings=16, **nodrop),
        "vision_config": dict(tower, image_size=16, patch_size=4),
        "projection_dim": 8,
    },
    both,
    ("ChineseCLIPTextLayer",),
    clip_loss,
    optimizers=("plain_sgd",),
)
hf(
    "git",
    "git",
    "GitForCausalLM",
    "GitConfig",
    lambda m: dict(small, **nodrop, vision_config=dict(tower, image_size=16, patch_size=4)),
    lambda g: captions(g, ids(g, 5)),
    ("GitLayer",),
    optimizers=("plain_sgd",),
)
hf(
    "llava",
    "llava",
    "LlavaForConditionalGeneration",
    "LlavaConfig",
    lambda m: {
        "text_config": dict(kv, model_type="llama"),
        "vision_config": dict(
            tower, model_type="clip_vision_model", image_size=16, patch_size=8, projection_dim=8
        ),
        "image_token_index": 30,
        "image_token_id": 30,
        "vision_feature_layer": -2,
    },
    lambda g: captions(g, torch.cat([torch.full((ROWS, 4), 30), ids(g, 5, high=30)], 1)),
    ("LlamaDecoderLayer", "CLIPEncoderLayer"),
    optimizers=("plain_sgd",),
)
