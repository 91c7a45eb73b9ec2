"""Construction: from a module, on a device or on the meta device, to units; and pretrained values into them."""

from __future__ import annotations

from .streaming import LoadedNames, load_safetensors

__all__ = ["LoadedNames", "load_safetensors"]
