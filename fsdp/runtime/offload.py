"""Offloading: reading shards ahead of their gathers, and everything away from the device between phases.

Note [Away]
    ``offload`` moves the data of tensors, not the tensors: parameters, gradients, buffers and optimizer states keep
    their identity and their values, and so does every reference that users and optimizers hold.  While a model is
    away its tensors are ordinary host tensors: they can be read, saved, loaded and stepped; only a forward is an
    error, because modules would compute with inputs on one device and buffers on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _torch
from ..comm.collectives import Work
from ..errors import TrainingStateError, UsageError, describe
from ..flat.handle import FlatParamHandle
from ..flat.home import Home, MappedFiles, give_back_freed, is_mapped
from ..flat.offloaded import OffloadedHandle
from .buffers import BufferPool

if TYPE_CHECKING:
    from .residency import ResidentUnit
    from .root import Root
    from .unit import Unit

__all__ = ["Away", "ReadAhead", "send_away", "state_tensors"]

_UNITS_AHEAD = 2


class ReadAhead:
    """Launches the gathers of a unit whose shards rest in mapped files, and has those of the next units read.

    Args:
        unit: Whose gathers.
        launch: Copies its shards into the gathered memory and starts the gather.
    """

    def __init__(self, unit: ResidentUnit, launch: Callable[[], Work]) -> None:
        self._unit = unit
        self._launch = launch

    @staticmethod
    def is_for(handles: Iterable[FlatParamHandle]) -> bool:
        """Whether any of the handles rests in mapped files."""
        return any(
            isinstance(handle, OffloadedHandle) and isinstance(handle.home, MappedFiles)
            for handle in handles
        )

    def __call__(self) -> Work:
        """Launch; then let go of what has been copied and fetch what will be."""
        work = self._launch()
        for handle in _offloaded(self._unit):
            handle.home.release([handle.flat_param.data])
        root = self._unit.root
        following = root.order.before if _torch.in_backward() else root.order.after
        index = following(self._unit.index)
        for _ in range(_UNITS_AHEAD):
            if index is None:
                break
            for handle in _offloaded(root.units[index]):
                handle.home.fetch([handle.flat_param.data])
            index = following(index)
        return work


def _offloaded(unit: ResidentUnit) -> Iterator[OffloadedHandle]:
    for handle in unit.handles:
        if isinstance(handle, OffloadedHandle):
            yield handle


class _Moved(NamedTuple):
    tensor: torch.Tensor
    device: torch.device


class Away:
    """What :func:`send_away` has moved, and how to bring it back.

    Args:
        handles: Whose shards were moved.
        tensors: Other tensors that were.
    """

    def __init__(self, handles: list[FlatParamHandle], tensors: list[_Moved]) -> None:
        self._handles = handles
        self._tensors = tensors

    def bring_back(self) -> None:
        """Move everything to where it was.  Collective: none."""
        with torch.inference_mode(mode=False), torch.no_grad():
            for handle in self._handles:
                handle.move_shard(handle.flat_param.data.to(handle.device, copy=True))
            for tensor, device in self._tensors:
                tensor.data = tensor.data.to(device, copy=True)

    def refuse_forward(self, unit: Unit) -> TrainingStateError:
        """The error for a forward of ``unit`` meanwhile."""
        return TrainingStateError(
            describe(
                "forward was called while the model is offloaded",
                unit=unit.name,
                remedy="Call reload() on the outermost wrapper first.",
            ),
            unit=unit.name,
        )


def send_away(
    root: Root,
    home: Home,
    others: Iterable[torch.Tensor],
    states: Iterable[torch.Tensor],
) -> Away:
    """Move shards, gradients and what else there is to ``home``, and free what the device holds for steps.

    Collective: none.

    Args:
        root: Whose units; between steps, with nothing gathered.
        home: Where to.
        others: Parameters and buffers that no unit manages, on the device.
        states: Optimizer states; those that are on the host already stay where they are.

    Raises:
        UsageError: If ``no_sync`` has left gradients that are not reduced yet, or parameters are summoned.
    """
    for unit in root.units:
        _check_movable(unit)
    device = root.units[0].config.device
    handles: list[FlatParamHandle] = []
    moved: list[_Moved] = []
    with torch.inference_mode(mode=False), torch.no_grad():
        for unit in root.units:
            unit.follow_user_changes()
            for handle in unit.handles:
                if isinstance(handle, OffloadedHandle):
                    handle.drop_copy()
                else:
                    handle.move_shard(home.settle(handle.flat_param.data))
                    handles.append(handle)
        for tensor in _each_once(_loose(root, others, states), device):
            moved.append(_Moved(tensor, tensor.device))
            tensor.data = home.settle(tensor.data)
        home.release(
            [*(handle.flat_param.data for handle in handles), *(item.tensor for item in moved)]
        )
    root.pool = BufferPool()
    give_back_freed(device)
    return Away(handles, moved)


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Every tensor in the state of ``optimizers``.  Collective: none."""
    for optimizer in optimizers:
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _check_movable(unit: Unit) -> None:
    if unit.accumulating:
        raise UsageError(
            describe(
                "offload() was called while gradients of no_sync backwards are still unreduced",
                unit=unit.name,
                remedy="Run the last backward of the accumulation outside no_sync, or drop the gradients with "
                "zero_grad() and a step outside.",
            ),
            unit=unit.name,
        )
    if unit.summoned:
        raise UsageError(
            describe(
                "offload() was called inside summon_full_params",
                unit=unit.name,
                remedy="Leave summon_full_params first.",
            ),
            unit=unit.name,
        )


def _loose(
    root: Root, others: Iterable[torch.Tensor], states: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Everything but shards: gradients, buffers, and what the caller names."""
    for unit in root.units:
        for handle in unit.handles:
            if not isinstance(handle, OffloadedHandle):
                yield from (param.grad for param in handle.exposed if param.grad is not None)
        yield from (buffer for _, _, buffer in unit.own_buffers())
        yield from unit.buffer_masters.values()
    for tensor in others:
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    yield from states


def _each_once(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Those on ``device`` that no file holds; each once, however many hold it."""
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen and tensor.device == device and not is_mapped(tensor):
            seen.add(id(tensor))
            yield tensor
