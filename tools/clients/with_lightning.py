"""Lightning: ``FSDPStrategy`` of the Trainer and of Fabric, on CPU.

Lightning refuses the CPU for exactly its own class; a subclass without anything in it is taken.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from common import check, equal_to_dense, shared_folder, wrappers_in
from torch import nn

from fsdp import FullyShardedDataParallel

_ROWS = torch.randn(24, 5, generator=torch.Generator().manual_seed(7))
_BATCH = 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(_Block(), _Block(), nn.Linear(5, 3))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def _dense(steps: int, max_norm: float = 0.5) -> nn.Module:
    model = _net()
    optimizer = _adam(model.parameters())
    for step in range(steps):
        _loss(model(_ROWS[_BATCH * step % len(_ROWS) :][:_BATCH])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _as_lightning_launches() -> None:
    os.environ.setdefault("NODE_RANK", "0")


def _fabric(**options: Any) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    class OnCpu(FSDPStrategy):
        """The same, on CPU."""

    _as_lightning_launches()
    strategy = OnCpu(auto_wrap_policy={_Block}, process_group_backend="gloo", **options)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def _fabric_steps(fabric: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        rows = _ROWS[_BATCH * step :][:_BATCH].chunk(dist.get_world_size())[dist.get_rank()]
        fabric.backward(_loss(model(rows)))
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()


@check
def fabric_trains_saves_and_resumes() -> None:
    """Fabric: setup, backward, clip_gradients, save and load with both state-dict types: equal to the dense run."""
    dense = _dense(6)
    for kind in ("full", "sharded"):
        with shared_folder() as folder:
            fabric = _fabric(state_dict_type=kind)
            model, optimizer = fabric.setup(model := _net(), _adam(model.parameters()))
            assert wrappers_in(model) == 3
            _fabric_steps(fabric, model, optimizer, range(3))
            fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "step": 3})
            model, optimizer = fabric.setup(model := _net(seed=1), _adam(model.parameters()))
            state = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(folder / "checkpoint", state)
            assert state["step"] == 3
            _fabric_steps(fabric, model, optimizer, range(3, 6))
            equal_to_dense(model._forward_module, dense)


@check
def fabric_accumulates() -> None:
    """Fabric: no_backward_sync over two micro-batches equals one step on both."""
    dense = _net()
    optimizer = _adam(dense.parameters())
    (sum(_loss(dense(_ROWS[_BATCH * step :][:_BATCH])) for step in range(2))).backward()
    optimizer.step()
    fabric = _fabric()
    model, optimizer = fabric.setup(model := _net(), _adam(model.parameters()))
    for step in range(2):
        rows = _ROWS[_BATCH * step :][:_BATCH].chunk(dist.get_world_size())[dist.get_rank()]
        with fabric.no_backward_sync(model, enabled=step == 0):
            fabric.backward(_loss(model(rows)))
    optimizer.step()
    equal_to_dense(model._forward_module, dense)


def _trainer(folder: Any, steps: int, **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import FSDPStrategy

    class OnCpu(FSDPStrategy):
        """The same, on CPU."""

    _as_lightning_launches()
    strategy = OnCpu(auto_wrap_policy={_Block}, process_group_backend="gloo", **options)
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )


def _module(seed: int = 0) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(seed)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return _loss(self.net(batch))

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            # Lightning's own clipping by norm refuses FSDP, and names this call.
            self.trainer.strategy.model.clip_grad_norm_(0.5)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("loss", _loss(self.net(batch)), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adam(self.parameters())

        def train_dataloader(self) -> Any:
            rows = _Rows()
            sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
            size = _BATCH // dist.get_world_size()
            return torch.utils.data.DataLoader(rows, batch_size=size, sampler=sampler)

        val_dataloader = train_dataloader

    return Module()


class _Rows(torch.utils.data.Dataset):
    """Rows in order: what the distributed sampler gives all ranks in a step is one whole batch."""

    def __len__(self) -> int:
        return len(_ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return _ROWS[index]


@check
def the_trainer_fits_validates_saves_and_resumes() -> None:
    """Trainer.fit with validation, save_checkpoint, fit(ckpt_path=...) with both state-dict types: equal to dense."""
    dense = _dense(12)  # two epochs: Lightning resumes at their beginning
    for kind in ("full", "sharded"):
        with shared_folder() as folder:
            trainer = _trainer(folder, 6, state_dict_type=kind)
            trainer.fit(_module())
            assert isinstance(trainer.strategy.model, FullyShardedDataParallel)
            trainer.save_checkpoint(folder / "last.ckpt")
            trainer = _trainer(folder, 12, state_dict_type=kind)
            module = _module(seed=1)
            trainer.fit(module, ckpt_path=folder / "last.ckpt")
            assert trainer.global_step == 12
            found = nn.ModuleDict({"net": dense})
            equal_to_dense(trainer.strategy.model, found)
            # Of the epoch's end: afterwards Lightning leaves the outermost wrapper away.
            loss = trainer.callback_metrics["loss"].item()
            with torch.no_grad():
                assert abs(loss - _loss(dense(_ROWS)).item()) < 1e-4
