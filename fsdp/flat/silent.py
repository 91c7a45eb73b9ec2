"""What a module's own forward writes into its parameters past every counter: ``self.weight.data``.

Note [Silent writes]
    A write in place is known by the leaf's version counter, at next to no cost a forward.  ``weight.data.mul_(mask)``
    moves no counter of the leaf, and ``weight.data = value`` takes the leaf to other memory.  Both are common (masked
    convolutions, bounds on norms), and both would be lost when the unit is freed.  So in the first, second, fourth,
    eighth ... forward of a unit its own slice is compared with a copy made when the forward began (not with the shard,
    which others may have written into after it was gathered: a momentum encoder), and a unit that was seen to write has
    its values taken over after every forward from then on.  What begins to write later is seen at the next of those.
    On accelerators the comparison makes the host wait for the device, so there it ends with the second forward.
    A leaf in other memory is known by its address, after every forward: it would never be filled again.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from .handle import FlatParamHandle
from .sharing import ManagedParam
from .views import slot_view

__all__ = ["keep_silent_writes"]

_COMPARED = 1 << 20  # elements at a time: devices compare into memory that a step does not need


def keep_silent_writes(
    handle: FlatParamHandle, before: torch.Tensor | None, *, known: bool
) -> bool:
    """Take over what module code has written into the gathered parameters of ``handle``; whether it has.

    Collective: none.

    Args:
        handle: Whose parameters are gathered.
        before: Its own slice ``[shard_numel]`` as the forward found it; None if it is not to be compared.
        known: Whether its unit is known to write, so that nothing need be compared.

    Raises:
        UsageError: If it put something else in the place of a parameter, or changed its shape, dtype or device.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        moved = _take_back(handle)
        if handle.aliased or not (known or moved or _differs(handle, before)):
            return moved
        handle.take_own_slice()
        return True


def _take_back(handle: FlatParamHandle) -> bool:
    """Have every leaf view the gathered memory again, with the values it has; whether one did not."""
    moved = False
    unsharded = handle.unsharded
    slots = zip(handle.params, handle.layout.slots, unsharded.leaves, strict=True)
    for number, (managed, slot, leaf) in enumerate(slots):
        if _is_replaced(managed):
            raise _refusal(handle.fqns[number], "was replaced by another one")
        if managed.tensor_shard is not None or not leaf.numel():
            continue
        view = slot_view(unsharded.flat, slot)
        if leaf.data_ptr() == view.data_ptr() and _looks_like(leaf, view):
            continue
        value = leaf.data.clone()  # it may lie where it is to go, in another order
        leaf.data = view
        if (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device):
            was = f"{view.dtype} {list(view.shape)} on {view.device}"
            now = f"{value.dtype} {list(value.shape)} on {value.device}"
            raise _refusal(handle.fqns[number], f"went from {was} to {now}")
        view.copy_(value)
        moved = True
    return moved


def _is_replaced(managed: ManagedParam) -> bool:
    shown = [_torch.parameter_table(site.module).get(site.name) for site in managed.sites]
    return any(isinstance(one, nn.Parameter) and one is not managed.param for one in shown)


def _looks_like(leaf: torch.Tensor, view: torch.Tensor) -> bool:
    return (leaf.dtype, leaf.shape, leaf.stride()) == (view.dtype, view.shape, view.stride())


def _differs(handle: FlatParamHandle, before: torch.Tensor | None) -> bool:
    """Whether the own slice of the gathered parameters is no longer what ``before`` says."""
    if before is None:
        return False
    own = handle.unsharded.own
    return any(
        not torch.equal(now.view(torch.uint8), then.view(torch.uint8))
        for now, then in zip(own.split(_COMPARED), before.split(_COMPARED), strict=True)
    )


def _refusal(fqn: str, what: str) -> UsageError:
    return UsageError(
        describe(
            f"a parameter {what} inside the forward of its own module",
            fqn=fqn,
            remedy="Write the values into it (`self.weight.data.copy_(...)`), or change it between forwards.",
        ),
        fqn=fqn,
    )
