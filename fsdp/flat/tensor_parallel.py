"""Parameters that are cut over the ranks of a tensor-parallel mesh before they are sharded.

``torch.distributed.tensor.parallel.parallelize_module`` leaves parameters that are DTensors.  A handle flattens what
this rank holds of them, as if it were all there is; module code and users of ``summon_full_params`` see DTensors over
that memory; state dicts name the whole::

    whole [6, 4] --tensor-parallel, Shard(0) over 2--> this rank's [3, 4] --flat parameter over the data axis--> [n]

A :class:`TensorShard` is how one parameter is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from .layout import Slot, Span
from .sharing import ManagedParam

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["TensorShard", "is_distributed", "localized"]


@dataclass(frozen=True, eq=False, slots=True)
class TensorShard:
    """How a parameter lies on the ranks of a 1-D tensor-parallel mesh.

    Attributes:
        mesh: The ranks.
        placement: ``Shard(dim)`` or ``Replicate()``.
        shape: Of the whole parameter.
        stride: Of the whole parameter.
    """

    mesh: DeviceMesh
    placement: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds another part, rather than all of it."""
        return bool(self.placement.is_shard())

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole, along each dimension."""
        offsets = [0] * len(self.shape)
        if self.is_cut:
            offsets[self.placement.dim] = self._cut().start
        return tuple(offsets)

    def view(self, local: torch.Tensor) -> DTensor:
        """The whole parameter, of which this rank holds ``local``.  Collective: none; no copy."""
        from torch.distributed.tensor import DTensor

        made: DTensor = DTensor.from_local(
            local,
            self.mesh,
            [self.placement],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )
        return made

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole of what this rank holds ``local`` of.

        Collective: every rank of the mesh.
        """
        return self.view(local.detach()).full_tensor()

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``; a view.  Collective: none."""
        if not self.is_cut:
            return whole
        cut = self._cut()
        return whole.reshape(self.shape).narrow(self.placement.dim, cut.start, cut.numel)

    def local_of(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """What this rank holds of a DTensor, cut as the parameter is; any other value as it is.

        Collective: every rank of the mesh, where it is cut in another way (gradients may be partial sums).
        """
        if value is None or not is_distributed(value):
            return value
        local: torch.Tensor = value.redistribute(self.mesh, [self.placement]).to_local()  # type: ignore[attr-defined]
        return local

    def whole_slot(self, slot: Slot) -> Slot:
        """``slot`` with the shape and strides of the whole."""
        return Slot(self.shape, self.stride, slot.span)

    def _cut(self) -> Span:
        """Which indices along the dimension that is cut this rank holds."""
        length = self.shape[self.placement.dim]
        each = -(-length // self.mesh.size())
        start = min(self.rank * each, length)
        return Span(start, min(start + each, length))


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor; a plain class check would import torch's module of them.  Collective: none."""
    return callable(getattr(tensor, "full_tensor", None))


def localized(params: Iterable[ManagedParam]) -> Iterator[tuple[nn.Parameter, str]]:
    """Put a plain parameter over this rank's part in the place of every DTensor, and note how it is cut.

    Collective: none.

    Yields:
        The DTensors that were replaced, with their names in the unit.
    """
    for managed in params:
        param: Any = managed.param
        if not is_distributed(param):
            continue
        managed.tensor_shard = TensorShard(
            param.device_mesh, param.placements[0], tuple(param.shape), tuple(param.stride())
        )
        local = param.detach().to_local()
        managed.param = nn.Parameter(local, requires_grad=param.requires_grad)
        for site in managed.sites:
            _torch.parameter_table(site.module)[site.name] = managed.param
        yield param, managed.fqn
