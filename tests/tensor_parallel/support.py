"""A model whose layers are parallelised over a ``tp`` submesh and then wrapped over the ``dp`` one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.support.oracles import mean_grads

DIM, HIDDEN = 6, 12


class Block(nn.Module):
    """A residual block: columns of ``up`` and rows of ``down`` are divided, ``norm`` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@dataclass(frozen=True)
class Shape:
    """Ranks along data, and along tensors."""

    dp: int
    tp: int

    @property
    def world(self) -> int:
        """All of them."""
        return self.dp * self.tp


def build(seed: int = 0) -> Model:
    """The dense model, the same everywhere."""
    torch.manual_seed(seed)
    return Model()


def data(row: int, step: int = 0) -> torch.Tensor:
    """The rows of one data rank, ``[3, 4, 3]``."""
    return torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(100 * step + row))


def loss_of(model: nn.Module, row: int, step: int = 0) -> torch.Tensor:
    """Scalar loss of one data rank's rows."""
    return model(data(row, step)).square().mean()


def mesh_of(shape: Shape) -> DeviceMesh:
    """``(dp, tp)``."""
    return init_device_mesh("cpu", (shape.dp, shape.tp), mesh_dim_names=("dp", "tp"))


def parallelised(model: Model, mesh: DeviceMesh) -> Model:
    """``model`` with its blocks divided over ``mesh['tp']``; changed in place."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh["tp"], {"out": ColwiseParallel(output_layouts=_replicated())})
    return model


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def wrap(model: Model, mesh: DeviceMesh, **kwargs: Any) -> FSDP:
    """A unit a block, over ``mesh['dp']``."""
    kwargs.setdefault("device_mesh", mesh["dp"])
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **kwargs)


def whole(values: dict[str, Any]) -> dict[str, Any]:
    """Every DTensor whole.  Collective: the mesh."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in values.items()
    }


def dense_mean(dp: int, step: int = 0) -> dict[str, Any]:
    """The dense model's gradients of the mean loss of all data ranks."""
    return mean_grads(build(), lambda m, row: loss_of(m, row, step).backward(), range(dp))


def my_row(mesh: DeviceMesh) -> int:
    """This rank's place along data."""
    return mesh["dp"].get_local_rank()
