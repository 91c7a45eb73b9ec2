"""Hypothesis strategies for what users do: random scripts of calls, random trees of modules and wrappings."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["ACTIONS", "scripts", "sync_patterns", "trees"]

ACTIONS = (
    "step",
    "clipped_step",
    "backward",
    "backward_no_sync",
    "forward_no_grad",
    "forward_inference",
    "forward_eval",
    "inner_forward",
    "state_dict",
    "summon",
    "load",
    "zero_grad",
    "scale_in_place",
)


def scripts(max_size: int = 8) -> st.SearchStrategy[list[str]]:
    """What a user may call between construction and the end, in any order."""
    return st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=max_size)


def sync_patterns(max_size: int = 5) -> st.SearchStrategy[str]:
    """Backwards outside (``s``) and inside (``n``) of ``no_sync``; the last one is outside."""
    return st.text("sn", max_size=max_size).map(lambda text: text + "s")


def trees(max_leaves: int = 6) -> st.SearchStrategy[object]:
    """A nested list: a list is a block of its items (a unit if its flag is set), an int is a layer of that width."""
    leaf = st.integers(1, 9)
    return st.recursive(
        leaf,
        lambda inner: st.tuples(st.booleans(), st.lists(inner, min_size=1, max_size=3)),
        max_leaves=max_leaves,
    )
