"""Gradient clipping by the norm of the unsharded gradient."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..comm.collectives import Collectives
from ..errors import ConfigTypeError, FsdpWarning, UsageError, describe, name_some
from ..flat.handle import FlatParamHandle
from ..runtime.root import Root
from ..runtime.spread import tell_tree, widest
from ..runtime.unit import Unit, living_units

__all__ = ["clip_grad_norm_", "clip_pieces", "clip_units"]


@dataclass(slots=True)
class _Shared:
    """Parameters whose norms add up over the same ranks.

    Attributes:
        axes: Collectives of those ranks, added over one after the other.
        tree: The widest unit around them, if their units are partial (see ``runtime.spread``).
        params: The parameters optimizers hold.
        counted: Those among them whose norm this rank adds: where ``axes`` span replicas, the first one's only.
        handles: The handles they come from, each once.
    """

    axes: tuple[Collectives, ...]
    tree: Unit | None = None
    params: list[nn.Parameter] = field(default_factory=list)
    counted: list[nn.Parameter] = field(default_factory=list)
    handles: dict[FlatParamHandle, None] = field(default_factory=dict)


_Groups = Mapping[object, _Shared]


class _Grouping:
    """Sorts parameters by the ranks over which their norms add up."""

    def __init__(self) -> None:
        self.groups: dict[object, _Shared] = {}
        self._trees: dict[Root, Unit] = {}

    def add(self, unit: Unit, handle: FlatParamHandle, params: Iterable[nn.Parameter]) -> None:
        """Add ``params`` of ``handle``."""
        if unit.root not in self._trees:
            self._trees[unit.root] = widest(unit.root.units)
        tree = self._trees[unit.root]
        if handle.is_cut_by_tensor:
            axes = (unit.shard, unit.tensor)
            shared = self.groups.setdefault((unit.group_key, "cut"), _Shared(axes))
            is_counted = True
        elif unit.world_size == tree.world_size:
            shared = self.groups.setdefault(unit.group_key, _Shared((unit.shard,)))
            is_counted = True
        else:
            shared = self.groups.setdefault(tree, _Shared((tree.shard, tree.replicate), tree))
            is_counted = unit.replicate.rank == 0
        found = list(params)
        shared.params += found
        shared.counted += found if is_counted else []
        shared.handles[handle] = None


@torch.no_grad()
def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` so that the norm of them all, unsharded, is at most ``max_norm``.

    For several models, or some of their parameters, where :meth:`FullyShardedDataParallel.clip_grad_norm_` takes one
    model.  Parameters that no wrapper manages count once and must have the same gradient on every rank.

    Collective: every rank of the process groups of the units the parameters belong to, with the same parameters.

    Args:
        parameters: A tensor, a module, or an iterable of tensors, modules and parameter groups.
        max_norm: Upper bound of the norm.
        norm_type: Order of the norm; any number, ``inf`` included.
        error_if_nonfinite: Whether a norm that is infinite or not a number is an error.  The host waits for the norm.

    Returns:
        The norm before clipping: 0-dimensional, on the device that computes, equal on every rank.

    Raises:
        UsageError: If ``error_if_nonfinite`` and the norm is not finite, naming the parameters (nothing is scaled), or
            if ``no_sync`` left gradients of a parameter unreduced.
        ConfigTypeError: If ``parameters`` holds anything else.

    Example::

        fsdp.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 1.0)
    """
    params = dict.fromkeys(_flatten(parameters))
    owners = {
        param: (unit, handle)
        for unit in living_units()
        for handle in unit.handles
        for param in handle.exposed
        if param in params
    }
    grouping = _Grouping()
    for param in params:
        if param in owners:
            unit, handle = owners[param]
            _check_reduced(unit)
            grouping.add(unit, handle, [param])
    others = [param for param in params if param not in owners]
    devices = [owners[param][1].device if param in owners else param.device for param in params]
    device = devices[0] if devices else torch.device("cpu")
    groups = grouping.groups
    return _clip(groups, others, float(max_norm), float(norm_type), device, error_if_nonfinite)


def clip_pieces(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor | None:
    """The same for what was given to torch's function, if any of it is sharded; else None, and nothing is done.

    Collective: as :func:`clip_grad_norm_`, which says what the rest means.
    """
    given = set(parameters)
    for unit in living_units():
        if unit.shard.size > 1 and not unit.summoned:
            for handle in unit.handles:
                if not given.isdisjoint(handle.exposed):
                    return clip_grad_norm_(
                        parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
                    )
    return None


def _flatten(parameters: Any) -> Iterable[nn.Parameter]:
    if isinstance(parameters, torch.Tensor):
        yield parameters  # type: ignore[misc]
    elif isinstance(parameters, nn.Module):
        yield from parameters.parameters()
    elif isinstance(parameters, Mapping) and "params" in parameters:
        yield from _flatten(parameters["params"])
    elif isinstance(parameters, Iterable) and not isinstance(parameters, str | Mapping):
        for item in parameters:
            yield from _flatten(item)
    else:
        raise ConfigTypeError(
            f"clip_grad_norm_ got a {type(parameters).__name__}: expected tensors, modules or parameter groups."
        )


def _check_reduced(unit: Unit) -> None:
    if unit.accumulating:
        raise UsageError(
            describe(
                "clip_grad_norm_ was called while gradients of no_sync backwards are still unreduced",
                unit=unit.name,
                remedy="Run the last backward of the accumulation outside no_sync.",
            ),
            unit=unit.name,
        )


def clip_units(
    units: Sequence[Unit],
    others: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``.

    Sharded gradients are summed over their shard group, replicated and unmanaged ones counted once; those of units
    over fewer ranks than the rest of the tree (experts) over the whole tree, since other ranks have others.
    The norm is accumulated in float32 (float64 for float64 gradients) and stays on the device: the host never waits
    for it.

    Collective: every rank of every unit's shard group.

    Args:
        units: Units whose gradients to clip.
        others: Parameters no unit manages; equal on all ranks for the result to be.
        max_norm: Upper bound.
        norm_type: Any order, ``inf`` and ``-inf`` included.
        device: Where the norm is computed.
        error_if_nonfinite: See :func:`clip_grad_norm_`.

    Returns:
        The norm before clipping, 0-dimensional, the same on every rank.

    Raises:
        UsageError: See :func:`clip_grad_norm_`.
    """
    grouping = _Grouping()
    for unit in units:
        for handle in unit.handles:
            grouping.add(unit, handle, handle.exposed)
    return _clip(grouping.groups, others, max_norm, norm_type, device, error_if_nonfinite)


def _clip(
    groups: _Groups,
    others: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool,  # noqa: FBT001
) -> torch.Tensor:
    rest = _grads(others)
    grads_of = {key: _grads(shared.params) for key, shared in groups.items()}
    every = [grad for grads in grads_of.values() for grad in grads] + rest
    # By the parameters, which every rank has: a rank may hold no gradient at all.
    managed = [param for shared in groups.values() for param in shared.params]
    params = [p for p in [*others, *managed] if p.is_floating_point() or p.is_complex()]
    is_double = any(param.dtype.to_real() is torch.float64 for param in params)
    dtype = torch.float64 if is_double else torch.float32
    total = _power_sum(rest, norm_type, dtype, device)
    op = {math.inf: "max", -math.inf: "min"}.get(norm_type, "sum")
    for key, shared in groups.items():
        counted = shared.counted
        grads = grads_of[key] if len(counted) == len(shared.params) else _grads(counted)
        part = _power_sum(grads, norm_type, dtype, device)
        for axis in shared.axes:
            axis.all_reduce([part], op=op).wait()
        total = _combine(total, part, norm_type)
    if norm_type not in (math.inf, -math.inf, 0.0):
        total = total.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise _nonfinite(groups, rest, total.item())
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if every:
        _scale(every, coefficient)
    else:
        warnings.warn(
            f"clip_grad_norm_ was called on rank {dist.get_rank()} with no gradients -- returning the total norm "
            f"in the default dtype {_result_dtype(params)}, which is that of the parameters.",
            FsdpWarning,
            stacklevel=5,
        )
    return total.to(_result_dtype(every or params))


def _scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply in place; of offloaded units gradients are on the host, where the factor has to be known."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for device, found in by_device.items():
        _torch.foreach_mul(found, factor.to(device))


def _nonfinite(groups: _Groups, rest: Sequence[torch.Tensor], norm: float) -> UsageError:
    """The error that names the parameters whose gradient is not finite on any rank.

    Collective: every rank of the groups.
    """
    names: list[str] = []
    for shared in groups.values():
        handles = list(shared.handles)
        found = [flag for handle in handles for flag in _nonfinite_pieces(handle)]
        fqns = [fqn for handle in handles for fqn in handle.fqns]
        if shared.tree is not None:  # other ranks have other parameters
            mine = [fqn for fqn, bad in zip(fqns, found, strict=True) if bad]
            told = tell_tree(shared.tree, mine)
            names += dict.fromkeys(fqn for theirs in told for fqn in theirs)
            continue
        flags = torch.tensor(found, dtype=torch.uint8, device=handles[0].device)
        for axis in shared.axes:
            axis.all_reduce([flags], op="max").wait()
        names += [fqn for fqn, bad in zip(fqns, flags.tolist(), strict=True) if bad]
    unmanaged = sum(not bool(grad.isfinite().all()) for grad in rest)
    reported = name_some(names) if names else "of none that is sharded"
    if unmanaged:
        reported += f", and of {unmanaged} that no wrapper manages"
    return UsageError(
        describe(
            f"the norm of the gradients is {norm}: not finite are the gradients of {reported}",
            fqn=names[0] if names else None,
            remedy="Skip the step, or look for the operation with torch.autograd.detect_anomaly.",
        ),
        fqn=names[0] if names else None,
    )


def _nonfinite_pieces(handle: FlatParamHandle) -> list[bool]:
    """For each original parameter whether this rank's piece of its gradient is not finite."""
    if handle.orig_mode:
        grads = [param.grad for param in handle.exposed]
    else:
        flat = handle.flat_param.grad
        spans = [piece.in_shard for piece in handle.pieces]
        grads = [None if flat is None else flat[span.start : span.stop] for span in spans]
    return [grad is not None and not bool(grad.isfinite().all()) for grad in grads]


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _power_sum(
    grads: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of ``|g| ** p`` over all elements; the maximum, minimum or count for p of inf, -inf and 0."""
    grads = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    empty = math.inf if norm_type == -math.inf else 0.0
    if not grads:
        return torch.full((), empty, dtype=dtype, device=device)
    norms = torch.stack(
        [norm.to(device, dtype) for norm in _torch.foreach_norm(grads, norm_type, dtype)]
    )
    if norm_type == math.inf:
        return norms.max()
    if norm_type == -math.inf:
        return norms.min()
    return norms.sum() if norm_type == 0.0 else norms.pow(norm_type).sum()


def _combine(left: torch.Tensor, right: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type == math.inf:
        return torch.maximum(left, right)
    return torch.minimum(left, right) if norm_type == -math.inf else left + right


def _result_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest real dtype among them, float32 where there are none."""
    dtypes = [tensor.dtype.to_real() for tensor in tensors] or [torch.float32]
    return functools.reduce(torch.promote_types, dtypes)
