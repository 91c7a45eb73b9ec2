"""Architectures and loops that need only torch, small and odd, as tables for ``tests.support.zoo``."""

from tests.parity.zoo import images, loops, sequences

__all__ = ["images", "loops", "sequences"]
