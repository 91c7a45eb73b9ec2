"""How a unit's gradients become means: in which dtypes, by what they are divided, or by which communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..flat.handle import FlatParamHandle

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["Averaging"]


class Averaging:
    """The divisions around the sums of one unit's gradients.

    Attributes:
        hook: The communication hook that averages instead, if one is registered.
        hook_state: Its first argument.
        divisor: What sums are divided by, if that was set after wrapping; see :attr:`UnitConfig.gradient_divisor`.
        keeps_low_precision: Whether gradients are published in the dtype of the leaves.
        reduce_dtypes: In which dtype gradients of each handle are accumulated and reduced.
        may_overflow: Whether sums could (fp16), so that gradients are divided before, too.
    """

    __slots__ = (
        "_mean_is_exact",
        "_unit",
        "divisor",
        "hook",
        "hook_state",
        "keeps_low_precision",
        "may_overflow",
        "reduce_dtypes",
    )

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.hook: Callable[..., None] | None = None
        self.hook_state: Any = None
        self.divisor: float | None = None
        self.keeps_low_precision = unit.config.mixed_precision.keep_low_precision_grads
        self.reduce_dtypes: dict[FlatParamHandle, torch.dtype] = {}
        self.may_overflow = False
        self._mean_is_exact = False

    def follow(self, handles: Sequence[FlatParamHandle]) -> None:
        """The unit owns these ``handles`` now, or their dtypes have changed."""
        asked = self._unit.config.mixed_precision.reduce_dtype
        self.reduce_dtypes = {handle: asked or handle.compute_dtype for handle in handles}
        self.may_overflow = torch.float16 in self.reduce_dtypes.values()
        size = self._unit.shard.size
        divides_exactly = size & (size - 1) == 0
        self._mean_is_exact = divides_exactly or all(
            dtype.itemsize >= torch.float32.itemsize for dtype in self.reduce_dtypes.values()
        )

    def copy_settings(self, other: Averaging) -> None:
        """Average as ``other`` does."""
        self.hook, self.hook_state = other.hook, other.hook_state
        self.divisor = other.divisor

    def grad_dtype(self, handle: FlatParamHandle) -> torch.dtype:
        """Dtype of the published gradient."""
        return handle.compute_dtype if self.keeps_low_precision else handle.flat_param.dtype

    @property
    def predivide(self) -> float:
        """What gradients are divided by before they are summed: not 1 only where :attr:`may_overflow`."""
        if self.hook is not None or not self.may_overflow:
            return 1.0
        ranks = self._unit.world_size
        factor = 1
        while ranks % factor == 0 and ranks / factor > factor:
            factor *= 2
        return float(factor)

    @property
    def postdivide(self) -> float:
        """What the sum is divided by, so that both divisions make the mean (or the sum over the set divisor)."""
        unit = self._unit
        if self.hook is not None:  # it has averaged; over the shard axis only if there is one
            return float(unit.replicate.size) if unit.is_sharded else 1.0
        asked = self.divisor or unit.config.gradient_divisor
        divisor = asked or unit.root.ranks_averaged or unit.world_size
        return divisor / self.predivide if self.may_overflow else divisor

    @property
    def is_by_summing(self) -> bool:
        """Whether the sum over the shard axis is asked for as a mean, so that nothing is left to divide.

        The backend multiplies by the reciprocal, in the dtype of the gradients: exact enough, or exact.
        """
        unit = self._unit
        if self.hook is not None or unit.replicate.size > 1 or not unit.step_shard.averages:
            return False
        return self._mean_is_exact and self.postdivide == unit.shard.size

    @property
    def writes_to_whole(self) -> bool:
        """Whether the unsharded gradient is divided, or left to a hook."""
        return self.hook is not None or self.may_overflow

    def run_hook(self, whole: torch.Tensor, out: torch.Tensor) -> None:
        """Let the communication hook average ``whole`` in place, or into ``out`` if the unit is sharded."""
        assert self.hook is not None
        if self._unit.is_sharded:
            self.hook(self.hook_state, whole, out)
        else:
            self.hook(self.hook_state, whole)
