"""Whole parameters in the user's hands: gather in full precision, register the originals, write back, hide.

Used by ``summon_full_params``, ``apply``, and saving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from .. import _torch
from ..comm.collectives import Gather
from ..errors import UnsupportedError, describe
from ..flat.handle import FlatParamHandle
from ..flat.views import slot_view
from .guard import remember_hidden
from .unit import Unit

__all__ = ["gather_flat", "summon_unit", "summon_units"]


def gather_flat(
    unit: Unit, own: Sequence[torch.Tensor], handles: Sequence[FlatParamHandle]
) -> list[torch.Tensor]:
    """Gather one shard a handle into new ``[padded_numel]`` tensors, all in one launch.

    Collective: every rank of the unit's shard group.

    Args:
        unit: Whose group to gather over.
        own: This rank's shard for each handle, ``[shard_numel]``, any dtype, on the device or the host.
        handles: The handles whose layout the shards have.
    """
    wholes = []
    gathers = []
    for handle, shard in zip(handles, own, strict=True):
        layout = handle.layout
        if layout.world_size == 1:
            wholes.append(shard.to(handle.device))
            continue
        whole = torch.empty(layout.padded_numel, dtype=shard.dtype, device=handle.device)
        slices = [
            whole[span.start : span.stop]
            for span in (layout.owned(rank) for rank in range(layout.world_size))
        ]
        slices[handle.rank].copy_(shard)
        wholes.append(whole)
        gathers.append(Gather(whole, slices))
    if gathers:
        unit.shard.all_gather(gathers).wait()
    return wholes


@dataclass(slots=True)
class _FullGrad:
    """A handle's whole gradient ``[padded_numel]``, and for each parameter whether any rank has one."""

    whole: torch.Tensor
    present: list[bool]


class _Summoned:
    """One unit whose full parameters are registered."""

    def __init__(self, unit: Unit, *, show: bool, offload_to_cpu: bool, with_grads: bool) -> None:
        self._unit = unit
        self._show = show
        unit.reshard()
        unit.follow_user_changes()
        unit.see_recast()
        self._fulls = gather_flat(unit, [handle.shard for handle in unit.handles], unit.handles)
        self._shown = self._fulls
        grads = self._gather_grads() if with_grads else {}
        self._stashed = [[param.grad for param in handle.exposed] for handle in unit.handles]
        unit.summoned = True
        self._versions: dict[FlatParamHandle, int] = {}
        if not show:
            return
        has_grads = any(grad is not None for held in self._stashed for grad in held)
        remember_hidden(unit, hidden=has_grads and not with_grads)
        if offload_to_cpu:
            self._shown = [full.to("cpu", copy=True) for full in self._fulls]
        for handle, shown in zip(unit.handles, self._shown, strict=True):
            for param in handle.exposed:
                param.grad = None
            handle.expose_full(shown)
            self._versions[handle] = _version_of_whole(handle)
            if handle in grads:
                grad = grads[handle]
                grad.whole = grad.whole.to(shown.device)
                views = [slot_view(grad.whole, slot) for slot in handle.layout.slots]
                for index, (view, present) in enumerate(zip(views, grad.present, strict=True)):
                    handle.show_full_grad(index, view if present else None)
        self._grads = grads

    def leave(self, *, writeback: bool) -> None:
        """Register the sharded parameters again, after writing this rank's part back if asked to."""
        self._unit.summoned = False
        remember_hidden(self._unit, hidden=False)
        if not self._show:
            return
        has_new_leaves = False
        for handle, shown, stashed in zip(
            self._unit.handles, self._shown, self._stashed, strict=True
        ):
            if writeback or handle.layout.world_size == 1:
                if _version_of_whole(handle) != self._versions[handle]:
                    handle.forget_versions()
                handle.absorb_full(shown)
            if shown.data_ptr() != handle.shard.data_ptr() and (
                writeback or handle.layout.world_size == 1
            ):
                handle.keep_own_slice(shown)
            for managed in handle.params:
                managed.param.grad = None
            has_new_leaves = handle.hide_full() or has_new_leaves
            for param, grad in zip(handle.exposed, stashed, strict=True):
                param.grad = grad
            if (writeback or handle.layout.world_size == 1) and handle in self._grads:
                self._write_grads_back(handle, self._grads[handle].whole)
        self._unit.follow_new_hooks()
        if has_new_leaves:
            self._unit.follow_new_leaves()

    def _gather_grads(self) -> dict[FlatParamHandle, _FullGrad]:
        """Whole gradients of the handles of which any parameter has one on any rank."""
        unit = self._unit
        trainable = [handle for handle in unit.handles if handle.requires_grad]
        if not trainable:
            return {}
        present = torch.tensor(
            [param.grad is not None for handle in trainable for param in handle.exposed],
            dtype=torch.uint8,
            device=trainable[0].device,
        )
        unit.shard.all_reduce([present], op="max").wait()
        flags = iter(present.tolist())
        has = {handle: [bool(next(flags)) for _ in handle.exposed] for handle in trainable}
        chosen = [handle for handle in trainable if any(has[handle])]
        wholes = gather_flat(unit, [_shard_grad(unit, handle) for handle in chosen], chosen)
        return {
            handle: _FullGrad(
                whole, has[handle] if handle.orig_mode else has[handle] * len(handle.params)
            )
            for handle, whole in zip(chosen, wholes, strict=True)
        }

    def _write_grads_back(self, handle: FlatParamHandle, whole: torch.Tensor) -> None:
        owned = handle.layout.owned(handle.rank)
        own = whole[owned.start : owned.stop]
        for param, grad in zip(handle.exposed, handle.split_shard(own), strict=True):
            if param.grad is not None:
                param.grad.copy_(grad)


def _version_of_whole(handle: FlatParamHandle) -> int:
    return _torch.sum_of_versions([managed.param for managed in handle.params])


def _shard_grad(unit: Unit, handle: FlatParamHandle) -> torch.Tensor:
    """The gradient of the whole shard ``[shard_numel]``, zeros where a parameter has none."""
    dtype = unit.averaging.grad_dtype(handle)  # the same on a rank that has none
    shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.device)
    for param, view in zip(handle.exposed, handle.split_shard(shard), strict=True):
        if param.grad is not None:
            view.copy_(param.grad)
    return shard


@contextmanager
def summon_unit(
    unit: Unit, *, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """Register the whole parameters of one unit for the duration of the context; nothing if they already are.

    Collective: every rank of the unit's shard group.
    """
    if unit.summoned:
        yield
        return
    with torch.no_grad():
        summoned = _Summoned(
            unit,
            show=not rank0_only or unit.shard.rank == 0,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
    try:
        yield
    finally:
        with torch.no_grad():
            summoned.leave(writeback=writeback)


@contextmanager
def summon_units(
    units: Sequence[Unit],
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Register the whole parameters of several units.

    Collective: every rank of each unit's shard group.

    Raises:
        UnsupportedError: For ``writeback`` with ``rank0_only``, whose changes the other ranks could not know.
        TrainingStateError: Inside a forward or backward.
    """
    if writeback and rank0_only:
        raise UnsupportedError(
            describe(
                "writeback=True and rank0_only=True together is not supported: only rank 0 could write, and the other "
                "ranks' shards would keep their values",
                remedy="Pass writeback=False, or rank0_only=False.",
            )
        )
    for unit in units:
        unit.root.check_idle("summon_full_params")
    if units and not units[0].summoned:
        units[0].gate.enter("summon_full_params")
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(
                summon_unit(
                    unit,
                    writeback=writeback,
                    rank0_only=rank0_only,
                    offload_to_cpu=offload_to_cpu,
                    with_grads=with_grads,
                )
            )
        yield
