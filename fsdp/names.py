"""Fully qualified names in one place: what wrappers add to them is taken away here and nowhere else."""

from __future__ import annotations

__all__ = [
    "COMPILED_MODULE",
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "clean_tensor_name",
    "flat_param_name",
    "join_names",
]

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
FLAT_PARAM = "flat_param"
COMPILED_MODULE = "_orig_mod"

_ADDED = frozenset({FSDP_WRAPPED_MODULE, "_checkpoint_wrapped_module", COMPILED_MODULE})


def clean_tensor_name(name: str) -> str:
    """``name`` in the unwrapped model: without the components that wrappers, checkpointing and compile add.

    Whole components only, so a user's module called ``my_orig_mod`` keeps its name.  Collective: none.

    Example:
        >>> clean_tensor_name("blocks.0._fsdp_wrapped_module.attn.weight")
        'blocks.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _ADDED)


def join_names(prefix: str, name: str) -> str:
    """Dotted concatenation that leaves out empty parts, and ``name`` if a wrapper added it.  Collective: none."""
    if not name or name in _ADDED:
        return prefix
    return f"{prefix}.{name}" if prefix else name


def flat_param_name(index: int) -> str:
    """Name of a unit's flat parameter: ``flat_param``, ``flat_param_1``, ...

    Collective: none.
    """
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"
