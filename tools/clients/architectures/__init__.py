"""Architectures of transformers: tiny random configurations, trained in float64; nothing is downloaded."""

from architectures import (
    audio,
    decoders,
    encoder_decoders,
    encoders,
    experts,
    others,
    recurrent,
    towers,
    vision,
)
from architectures.common_parts import FAMILIES

__all__ = [
    "FAMILIES",
    "audio",
    "decoders",
    "encoder_decoders",
    "encoders",
    "experts",
    "others",
    "recurrent",
    "towers",
    "vision",
]
