"""Optimizer steps inside the backward: each unit is stepped as soon as its gradients are reduced, which frees them.

The gradients of a model are then never in memory together: a step needs those of the unit that is being reduced (and
of the one or two whose reductions are in flight), however many units there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from .. import _torch
from ..errors import ConfigError, UnsupportedError, UsageError, describe
from ..runtime.held import units_in
from ..runtime.spread import widest
from ..runtime.unit import Unit

__all__ = ["OptimizerInBackward", "apply_optimizer_in_backward"]

_EPSILON = 1e-6  # as in clip_grad_norm_


def apply_optimizer_in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    accumulation_steps: int = 1,
) -> OptimizerInBackward:
    """Let every backward step the optimizer, unit by unit, and free the gradients.

    The optimizer stays an ordinary one: schedulers attach to it, and ``FSDP.optim_state_dict`` saves it.  It must
    update each parameter from that parameter's own gradient and state alone.  Do not call ``clip_grad_norm_``: after
    a backward no gradient of a unit is left.  Loss scaling, which must see all gradients before any step, can not be
    combined with this.

    Parameters that no unit manages keep their gradients: average those over ranks and call ``optimizer.step``, which
    then steps nothing else.

    Accumulation: inside ``model.no_sync()`` nothing is reduced and nothing stepped; the backward after it steps with
    the sum.  That keeps unsharded gradients; ``accumulation_steps`` keeps sharded ones instead, and steps in every
    that-many-th backward.

    Parameters that no unit manages keep their gradients: average those over ranks and call ``optimizer.step``, which
    then steps nothing else.

    Clipping: the norm over all gradients is known only when the last unit has been stepped, so with ``max_norm``
    gradients are scaled by what the norm of the *previous* step asks for.  The first step is not clipped.

    Collective: none here; with ``max_norm`` every backward that steps ends with one small all-reduce a group.

    Args:
        model: A wrapper, or a module that contains some.
        optimizer: Over parameters of ``model``, built after wrapping.
        max_norm: Bound of the gradient's norm; None for no clipping.
        accumulation_steps: Backwards whose gradients one step sums up.

    Returns:
        What is known of the last step, and how to undo this.

    Raises:
        ConfigError: If an argument is out of range, or the optimizer needs parameters together (LBFGS).
        UsageError: If steps in the backward are already applied, or the optimizer trains none of the units.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        in_backward = apply_optimizer_in_backward(model, optimizer, max_norm=1.0)
        for batch in batches:
            model(batch).sum().backward()  # steps
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}: expected a positive number or None.")
    if accumulation_steps < 1:
        raise ConfigError(f"accumulation_steps is {accumulation_steps}: expected 1 or more.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS looks at all parameters at once and can not step unit by unit.")
    units = units_in(model)
    for unit in units:
        if unit.on_gradients is not None:
            raise UsageError(
                describe(
                    "steps in the backward are already applied",
                    unit=unit.name,
                    remedy="Call remove() on what apply_optimizer_in_backward returned before.",
                )
            )
    return OptimizerInBackward(units, optimizer, max_norm, accumulation_steps)


class OptimizerInBackward:
    """Steps an optimizer unit by unit inside the backward; made by :func:`apply_optimizer_in_backward`.

    Attributes:
        optimizer: What is stepped.
        norm: Norm of the gradient of the last complete step, 0-dimensional on the compute device; None before one,
            or without ``max_norm``.
        steps: Complete steps so far.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        accumulation_steps: int,
    ) -> None:
        self.optimizer = optimizer
        self.norm: torch.Tensor | None = None
        self._earlier_norm: torch.Tensor | None = None  # stays where it is, for captured graphs
        self.steps = 0
        self._max_norm = max_norm
        self._accumulation_steps = accumulation_steps
        self._backwards = 0
        self._running = False
        self._units = [unit for unit in units if unit.handles]
        cut = [unit.name for unit in self._units if unit.tensor.size > 1]
        if cut and max_norm is not None:
            raise UnsupportedError(
                describe(
                    "max_norm does not know tensor-parallel parameters",
                    unit=cut[0],
                    remedy="Step outside the backward, and clip with clip_grad_norm_.",
                ),
                unit=cut[0],
            )
        self._members = {
            unit: frozenset(param for handle in unit.handles for param in handle.exposed)
            for unit in self._units
        }
        managed = frozenset[nn.Parameter]().union(*self._members.values())
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if not managed & held:
            raise UsageError(
                describe(
                    "the optimizer trains none of the model's parameters",
                    fqn=next((h.fqns[0] for unit in self._units for h in unit.handles), None),
                    remedy="Build it from model.parameters() after wrapping.",
                )
            )
        wide = any(param.dtype is torch.float64 for param in held)
        self._norm_dtype = torch.float64 if wide else torch.float32
        self._reduced: set[Unit] = set()
        self._squares: dict[object, torch.Tensor] = {}
        for unit in self._units:
            unit.on_gradients = partial(self._after_reduction, unit)

    def remove(self) -> None:
        """Leave steps to the user again; gradients stay after a backward.  Collective: none."""
        for unit in self._units:
            unit.on_gradients = None

    def _after_reduction(self, unit: Unit) -> None:
        """The gradients of ``unit`` are in place: step it, if this backward steps."""
        if not self._running or unit in self._reduced:
            # A unit is reduced once a backward: if this one was already, that backward has failed half way.
            self._backwards += not self._running
            self._running = True
            self._reduced.clear()
            self._squares.clear()
            _torch.queue_end_of_backward(self._end)
        self._reduced.add(unit)
        if self._backwards == self._accumulation_steps:
            self._step(unit)

    @torch.no_grad()
    def _step(self, unit: Unit) -> None:
        """Clip, step and free the parameters of ``unit`` that have a gradient."""
        ready = {param for param in self._members[unit] if param.grad is not None}
        if not ready:
            return
        if self._max_norm is not None:
            self._clip([param.grad for param in ready if param.grad is not None], unit)
        groups = self.optimizer.param_groups
        chosen = [
            {**group, "params": [param for param in group["params"] if param in ready]}
            for group in groups
        ]
        self.optimizer.param_groups = [group for group in chosen if group["params"]]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        for param in ready:
            param.grad = None

    def _clip(self, grads: list[torch.Tensor], unit: Unit) -> None:
        """Add to the norm of this step, and scale by that of the step before."""
        assert self._max_norm is not None
        norms = _torch.foreach_norm(grads, 2.0, self._norm_dtype)
        device = self._units[0].config.device
        square = torch.stack([norm.to(device) for norm in norms if norm.numel()]).square().sum()
        before = self._squares.get(unit.group_key)
        self._squares[unit.group_key] = square if before is None else before + square
        if self._earlier_norm is not None:
            factor = torch.clamp(self._max_norm / (self._earlier_norm + _EPSILON), max=1.0)
            _torch.foreach_mul(grads, factor.to(grads[0].device))

    def _end(self) -> None:
        """The backward is over: step what ranks only now agreed to have used, and agree on the norm."""
        if not self._running:
            return
        self._running = False
        self._reduced.clear()
        if self._backwards < self._accumulation_steps:
            return
        self._backwards = 0
        for unit in self._units:
            self._step(unit)
        self.steps += 1
        if self._max_norm is not None:
            self.norm = self._agree_on_norm()
            if self._earlier_norm is None:
                self._earlier_norm = torch.empty_like(self.norm)
            self._earlier_norm.copy_(self.norm)
        self._squares.clear()

    @torch.no_grad()
    def _agree_on_norm(self) -> torch.Tensor:
        nothing = torch.zeros((), dtype=self._norm_dtype, device=self._units[0].config.device)
        total = nothing
        tree = widest(self._units[0].root.units)
        groups = {unit.group_key: unit for unit in self._units}
        elsewhere = nothing.clone()  # of experts, of which other ranks have others
        for key, unit in groups.items():
            square = self._squares.get(key, nothing).clone()
            if unit.world_size < tree.world_size:
                elsewhere += square if unit.replicate.rank == 0 else 0
                continue
            unit.shard.all_reduce([square]).wait()
            total = total + square
        if any(unit.world_size < tree.world_size for unit in groups.values()):
            for axis in (tree.shard, tree.replicate):
                axis.all_reduce([elsewhere]).wait()
        return (total + elsewhere).sqrt()
