"""Parameter groups that depend on what parameters are whole, whatever shape their shards have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ConfigError, describe
from ..runtime.held import Held, held_params, units_in

__all__ = ["split_decay_groups"]


def split_decay_groups(
    model: nn.Module,
    weight_decay: float = 0.01,
    *,
    decays: Callable[[str, tuple[int, ...]], bool] | None = None,
) -> list[dict[str, Any]]:
    """Two parameter groups: one with weight decay and one without, as for the unwrapped model.

    ``p.ndim`` of a sharded parameter says nothing: pieces are 1-D.  This asks for the original shape.

    Collective: none.  The same groups on every rank.

    Args:
        model: A wrapper, a module that contains some, or a plain module.
        weight_decay: Of the first group; the second has 0.
        decays: Whether the parameter of this name and original shape has weight decay; those of two or more
            dimensions have if None.

    Returns:
        The two groups, in this order; frozen parameters are in neither.

    Raises:
        ConfigError: If a flat parameter (``use_orig_params=False``) holds parameters of both kinds; names one of each.

    Example::

        optimizer = torch.optim.AdamW(split_decay_groups(model, 0.1), lr=3e-4)
    """
    decays = decays or _is_matrix
    kinds: dict[nn.Parameter, tuple[bool, Held]] = {}
    for item in held_params(model, units_in(model)):
        if not item.key.requires_grad:
            continue
        kind = bool(decays(item.fqn, item.shape))
        first_kind, first = kinds.setdefault(item.key, (kind, item))
        if first_kind != kind:
            raise _mixed(first, item)
    return [
        {"params": [p for p, (kind, _) in kinds.items() if kind], "weight_decay": weight_decay},
        {"params": [p for p, (kind, _) in kinds.items() if not kind], "weight_decay": 0.0},
    ]


def _is_matrix(_: str, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2


def _mixed(one: Held, other: Held) -> ConfigError:
    return ConfigError(
        describe(
            f"a flat parameter holds {one.fqn!r} and {other.fqn!r}, of which one has weight decay and the other has "
            "not",
            unit=one.unit.name if one.unit is not None else None,
            fqn=other.fqn,
            remedy="Wrap with use_orig_params=True.",
        ),
        fqn=other.fqn,
    )
