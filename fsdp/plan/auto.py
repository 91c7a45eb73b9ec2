"""``auto_wrap_policy="auto"``: which modules become units, from their sizes and their repetition.

Collective: none.

A unit should be large enough that gathering it uses the network well, and small enough that two of them, the one that
computes and the one that is being gathered, are little beside the model.  So the choice is

* every block of a stack (siblings of one class that have submodules), at the outermost level where no block is over a
  quarter of the model;
* every large layer beside the blocks (embedding, head) whose parameters nobody else uses;
* where blocks are too small, the module around them, as soon as it is large enough.

An embedding that becomes a unit is gathered for the forward only, since its backward reads no values
(``set_unshard_in_backward``).

The rest belongs to the root.  "Large enough" is what a gather moves in the time that its start takes, so it grows with
the number of ranks: :func:`efficient_bytes`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from .policies import _Policy

__all__ = ["AutoWrapPolicy", "efficient_bytes", "reads_nothing_in_backward"]

_RANKS_OF_A_NODE = 8
# Seconds to start a collective and for each hop of its ring, and bytes a second, within a node and between nodes.
_CPU = (1e-4, 2e-5, 2e-5, 1.5e9, 1.0e9)
_ACCELERATOR = (8.4e-6, 3.4e-6, 14.0e-6, 370e9, 50e9)
_LARGEST_SHARE = 0.25  # of the model in one block, above which its inner blocks are looked for

_log = logging.getLogger(__name__)


def efficient_bytes(world_size: int, *, on_cpu: bool) -> int:
    """Bytes of a gather that take as long to move as the gather takes to start: half of the bandwidth is used.

    Args:
        world_size: Ranks that gather.
        on_cpu: Whether they do so over gloo; otherwise NCCL on cards of a node and between nodes.

    Example:
        >>> efficient_bytes(8, on_cpu=False) < efficient_bytes(1024, on_cpu=False)
        True

    Source: ring model and constants of NCCL's tuning tables.
    """
    start, hop, far_hop, near_bandwidth, far_bandwidth = _CPU if on_cpu else _ACCELERATOR
    nodes = -(-world_size // _RANKS_OF_A_NODE)
    hops = world_size - nodes
    seconds = start + hops * hop + (nodes - 1) * far_hop
    return int(seconds * (near_bandwidth if nodes == 1 else far_bandwidth))


def reads_nothing_in_backward(module: nn.Module) -> bool:
    """Whether the backward of ``module`` needs no values of its parameters.

    By its class and its parameters alone, of which ranks cannot have different opinions; a class derived from it may do
    anything, and a weight that is made of other parameters (``weight_norm``) is made anew in the backward of those.
    """
    return type(module) is nn.Embedding and [name for name, _ in module.named_parameters()] == [
        "weight"
    ]


class AutoWrapPolicy(_Policy):
    """Wrap repeated blocks and large layers; see the module's docstring.

    Args:
        least_bytes: Parameters, in bytes, that a unit should have at least.

    Attributes:
        reasons: After wrapping, the name of each unit and why it is one.

    Example:
        >>> policy = AutoWrapPolicy(efficient_bytes(8, on_cpu=False))
        >>> model = FSDP(model, auto_wrap_policy=policy)
        >>> policy.reasons
        {'tokens': 'a large Embedding', 'blocks.0': 'one of 12 Block', ...}
    """

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.reasons: dict[str, str] = {}

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        sizes = _Sizes(root_module, ignored_modules)
        chosen: dict[nn.Module, str] = {}
        self._choose(root_module, sizes, chosen)
        chosen.pop(root_module, None)
        names = {module: name for name, module in root_module.named_modules()}
        self.reasons = {names[module]: reason for module, reason in chosen.items()}
        for name, reason in self.reasons.items():
            _log.info(
                "unit %s: %s, %d bytes", name, reason, sizes.of(root_module.get_submodule(name))
            )
        return {module: dict(root_kwargs) for module in chosen}

    def _choose(
        self, module: nn.Module, sizes: _Sizes, chosen: dict[nn.Module, str]
    ) -> tuple[int, bool]:
        """Choose units in ``module``.

        Returns:
            The bytes that are left for whatever is around it, and whether blocks too small to be units are among them.
        """
        left, small = sizes.direct(module), False
        blocks = _blocks(module, sizes)
        for child in _children(module, sizes):
            within = sizes.of(child)
            is_leaf = not list(child.children())
            if child in blocks and not self._should_enter(child, within, sizes):
                if within >= self.least_bytes:
                    chosen[child] = f"one of {blocks[child]} {type(child).__name__}"
                    continue
                rest, is_small = within, True
            elif is_leaf and within >= self.least_bytes and sizes.is_private(child):
                chosen[child] = f"a large {type(child).__name__}"
                continue
            else:
                rest, is_small = self._choose(child, sizes, chosen)
            left += rest
            small = small or is_small
        if small and left >= self.least_bytes and not _is_container(module):
            chosen[module] = f"{type(module).__name__} around blocks that are small"
            return 0, False
        return left, small

    def _should_enter(self, block: nn.Module, within: int, sizes: _Sizes) -> bool:
        """Whether ``block`` is so large a part of the model that its own blocks are the better units."""
        if within <= _LARGEST_SHARE * sizes.total:
            return False
        return any(_blocks(module, sizes) for module in block.modules())

    def __repr__(self) -> str:
        return f"AutoWrapPolicy(least_bytes={self.least_bytes})"


class _Sizes:
    """Bytes of parameters: of a module with everything in it, and of its own alone."""

    def __init__(self, root: nn.Module, ignored: set[nn.Module]) -> None:
        self.ignored = ignored
        self._users: Counter[nn.Parameter] = Counter(
            param for module in root.modules() for param in module.parameters(recurse=False)
        )
        self.total = self.of(root)

    def of(self, module: nn.Module) -> int:
        """Bytes in ``module``, tied parameters once."""
        return sum(param.nbytes for param in module.parameters())

    def direct(self, module: nn.Module) -> int:
        """Bytes of the parameters that ``module`` itself holds."""
        return sum(param.nbytes for param in module.parameters(recurse=False))

    def is_private(self, module: nn.Module) -> bool:
        """Whether no other module holds a parameter of ``module``."""
        return all(self._users[param] == 1 for param in module.parameters())


def _children(module: nn.Module, sizes: _Sizes) -> Iterator[nn.Module]:
    for child in module.children():
        if child not in sizes.ignored and sizes.of(child):
            yield child


def _blocks(module: nn.Module, sizes: _Sizes) -> dict[nn.Module, int]:
    """The children of ``module`` that form a stack, each with the number of its kind."""
    candidates = [child for child in _children(module, sizes) if list(child.children())]
    kinds = Counter(type(child) for child in candidates if not _is_container(child))
    return {child: kinds[type(child)] for child in candidates if kinds[type(child)] > 1}


def _is_container(module: nn.Module) -> bool:
    """Whether ``module`` is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
