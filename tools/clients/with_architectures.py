"""Architectures of transformers against the dense model, as ``tests/parity/test_architectures.py`` does for torch's."""

from __future__ import annotations

import architectures
import torch.distributed as dist
from common import check

from tests.support.zoo import (
    ARCHITECTURES,
    Case,
    differences,
    draw_variants,
    train_dense,
    train_wrapped,
)

_LOSS = 2e-6  # losses are float32 in many of them


def _family(name: str) -> None:
    """Raise unless every architecture of the family trains as in one process, in both exposures."""
    for one in architectures.FAMILIES[name]:
        for variant in draw_variants(ARCHITECTURES[one], 2, 1):
            case = Case(ARCHITECTURES[one], variant, dist.get_world_size())
            got = train_wrapped(case)
            found = [
                differences(train_dense(case), got, case.architecture.tolerance, _LOSS)
                if dist.get_rank() == 0
                else None
            ]
            dist.broadcast_object_list(found)
            assert not found[0], f"{case}: {found[0][:5]}"


@check
def encoder_decoders() -> None:
    """T5, BART, Pegasus, Marian, ...: tied three ways, checkpointed."""
    _family("encoder_decoders")


@check
def encoders() -> None:
    """BERT, ALBERT, ELECTRA, DeBERTa, XLNet, Funnel, ..."""
    _family("encoders")


@check
def decoders() -> None:
    """GPT-2, NeoX, OPT, Bloom, Llama, Qwen, Gemma, Phi, ..."""
    _family("decoders")


@check
def experts() -> None:
    """Mixtral, Qwen-MoE, DeepSeek, GPT-OSS, ...: experts without tokens on some ranks."""
    _family("experts")


@check
def recurrent() -> None:
    """Mamba, RWKV, RecurrentGemma, Jamba, ..."""
    _family("recurrent")


@check
def vision() -> None:
    """ViT, Swin, ConvNeXt, ResNet with batch norm, ..."""
    _family("vision")


@check
def towers() -> None:
    """CLIP, SigLIP, BLIP, LLaVA, ...: scalar parameters."""
    _family("towers")


@check
def audio() -> None:
    """Wav2Vec2 with weight norm, HuBERT, Whisper, ..."""
    _family("audio")


@check
def others() -> None:
    """LayoutLM, Decision Transformer, MusicGen."""
    _family("others")
