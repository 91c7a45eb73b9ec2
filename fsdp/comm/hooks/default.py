"""The default hooks, and those that send fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...errors import ConfigError, ConfigTypeError, ShardMismatchError
from ..collectives import Collectives, Reduce
from ..process_group import collectives_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = [
    "LOW_PRECISION_HOOKS",
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """What the default hooks need: the group, and two factors whose product is its size.

    Dividing by one factor before the sum and by the other after it keeps low-precision sums in range.

    Args:
        process_group: Ranks to average over.

    Attributes:
        process_group: The same.
        world_size: Number of its ranks.
        gradient_predivide_factor: Gradients are divided by this before the sum.
        gradient_postdivide_factor: And by this after it.

    Raises:
        ConfigError: If ``process_group`` is None.

    Example:
        >>> model.register_comm_hook(DefaultState(group), reduce_scatter_hook)
    """

    __slots__ = (
        "collectives",
        "gradient_postdivide_factor",
        "gradient_predivide_factor",
        "process_group",
        "world_size",
    )

    def __init__(self, process_group: ProcessGroup | None) -> None:
        if process_group is None:
            raise ConfigError(
                f"Expected to pass in an explicit ProcessGroup to {type(self).__name__}."
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = self._get_gradient_predivide_factor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor
        self.collectives: dict[torch.device, Collectives] = {}

    def collectives_on(self, device: torch.device) -> Collectives:
        """The group's collectives for tensors on ``device``; kept, because their launches are counted."""
        found = self.collectives.get(device)
        if found is None:
            found = self.collectives[device] = collectives_for(self.process_group, device)
        return found

    @staticmethod
    def _get_gradient_predivide_factor(world_size: int) -> float:
        """The power of two near the square root of ``world_size`` that divides it."""
        factor = 1
        while world_size % factor == 0 and world_size / factor > factor:
            factor *= 2
        return float(factor)


class LowPrecisionState(DefaultState):
    """What the compressing hooks need.

    Args:
        process_group: Ranks to average over.
        parameter_type: Dtype gradients are cast back to, whatever dtype they came in.

    Attributes:
        parameter_type: The same.

    Raises:
        ConfigTypeError: If ``parameter_type`` is no dtype.

    Example:
        >>> model.register_comm_hook(LowPrecisionState(group), bf16_compress_hook)
    """

    __slots__ = ("parameter_type",)

    def __init__(
        self,
        process_group: ProcessGroup | None,
        parameter_type: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(parameter_type, torch.dtype):
            raise ConfigTypeError(f"parameter_type is {parameter_type!r}: expected a torch.dtype.")
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` (any shape) over the group, in place and in its own dtype.

    Collective: every rank of the group.
    """
    grad.div_(state.gradient_predivide_factor)
    state.collectives_on(grad.device).all_reduce([grad]).wait()
    grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Leave this rank's slice of the mean of ``grad`` ``[world_size * n]`` in ``output`` ``[n]``.

    Collective: every rank of the group.

    Raises:
        ShardMismatchError: If ``grad`` does not hold ``world_size`` times what ``output`` does.
    """
    if grad.numel() != state.world_size * output.numel():
        raise ShardMismatchError(
            f"reduce_scatter_hook got a gradient of {grad.numel()} elements and an output of {output.numel()}: the "
            f"gradient has to be {state.world_size} times (the world size) as long."
        )
    whole = grad.div_(state.gradient_predivide_factor).view(-1)
    slices = whole.split(output.numel()) if output.numel() else ()
    in_place = output.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
    out = (torch.empty_like(output) if in_place else output).view(-1)
    state.collectives_on(grad.device).reduce_scatter([Reduce(whole, slices, out)]).wait()
    torch.div(out.view_as(output), state.gradient_postdivide_factor, out=output)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """The default hooks with float16 on the wire; the mean is left in ``state.parameter_type``.

    Collective: every rank of the group.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """The default hooks with bfloat16 on the wire; the mean is left in ``state.parameter_type``.

    Collective: every rank of the group.
    """
    _compressed(torch.bfloat16, state, grad, output)


LOW_PRECISION_HOOKS = [fp16_compress_hook, bf16_compress_hook]


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    small = grad.to(dtype, copy=True)  # even if it has that dtype: the buffer belongs to the caller
    if output is None:
        allreduce_hook(state, small)
        _deliver(small, grad, state.parameter_type)
    else:
        small_output = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, small, small_output)
        _deliver(small_output, output, state.parameter_type)


def _deliver(mean: torch.Tensor, target: torch.Tensor, dtype: torch.dtype) -> None:
    """Make ``target`` hold ``mean`` in ``dtype``; in its own memory if it has that dtype."""
    if target.dtype is dtype:
        target.copy_(mean)
    else:
        target.data = mean.to(dtype)
