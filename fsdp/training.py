"""What a training loop asks of a wrapper, apart from its forward."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .comm.compression import Compression
from .comm.watch import the_watch
from .errors import ConfigError, UnsupportedError, UsageError, describe
from .flat.offloaded import home_on
from .init.arguments import divisor_of
from .init.communication import compress_units, register_hook
from .optim.clip import clip_units
from .properties import WrapperProperties, units_in, wrappers_in
from .runtime.offload import send_away, state_tensors

__all__ = ["TrainingInterface"]


class TrainingInterface(WrapperProperties):
    """Gradients, their norm and how they are communicated; failures; phases without the model."""

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient.  Collective: none."""
        return [param for param in self.parameters() if param.grad is not None]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate unsharded gradients, in the reduce dtype, without communication.

        The first backward outside reduces the sum of all.  Costs the memory of the unsharded gradients of this
        wrapper's units.  Collective: none.

        Raises:
            TrainingStateError: During forward or backward.
        """
        self._unit.root.check_idle("no_sync")
        units = units_in(self)
        before = [unit.sync_gradients for unit in units]
        for unit in units:
            unit.sync_gradients = False
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.sync_gradients = value

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | torch.Tensor,
        norm_type: float | int = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale all gradients so that the norm of the unsharded gradient is at most ``max_norm``.

        Collective: every rank of every unit's process group.

        Args:
            max_norm: Upper bound of the norm.
            norm_type: Order of the norm; any number, ``inf`` included.
            error_if_nonfinite: Whether a norm that is infinite or not a number is an error that names the parameters.
                The host then waits for the norm; not inside ``Join``.

        Returns:
            The norm before clipping: 0-dimensional, on the compute device, equal on every rank.  The host does not
            wait for it.

        Raises:
            UsageError: If ``error_if_nonfinite`` and the norm is not finite; on a wrapper that is not the outermost
                one; if ``no_sync`` left gradients unreduced.
        """
        self._check_is_outermost("clip_grad_norm_")
        units = units_in(self)
        waiting = [unit.name or "<root>" for unit in units if unit.accumulating]
        if waiting:
            raise UsageError(
                describe(
                    "clip_grad_norm_ was called while gradients of no_sync backwards are still unreduced",
                    unit=waiting[0],
                    remedy="Run the last backward of the accumulation outside no_sync.",
                )
            )
        uneven = self._unit.root.uneven
        if uneven is not None:
            if error_if_nonfinite:
                raise UsageError(
                    "error_if_nonfinite is not supported inside Join: look at the norm."
                )
            uneven.clip(float(max_norm), float(norm_type))
        return self._clip(float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)

    @torch.no_grad()
    def _clip(
        self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        units = units_in(self)
        managed = {param for unit in units for handle in unit.handles for param in handle.exposed}
        others = [param for param in self.parameters() if param not in managed]
        return clip_units(
            units,
            others,
            max_norm,
            norm_type,
            self.compute_device,
            error_if_nonfinite=error_if_nonfinite,
        )

    def register_forward_method(self, name: str) -> None:
        """Let the wrapped module's method ``name`` gather parameters as its forward does.

        For methods that use the module's own parameters without going through ``forward``: ``encode_text``,
        ``forward_features``, ...  Methods that only call submodules which are units need no registration, and
        ``generate`` is registered by itself.  Collective: none; calls of the method are, as calls of the module are.

        Raises:
            ConfigError: If the module has no such method.
        """
        module, unit = self._fsdp_wrapped_module, self._unit
        method = getattr(module, name, None)
        if not callable(method):
            raise ConfigError(f"{type(module).__name__} has no method {name!r} to register.")

        @functools.wraps(method)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            return unit.run_method(method, args, kwargs)

        vars(module)[name] = gathered
        self._forward_methods.append(name)

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """Divide summed gradients by ``divisor`` instead of by the number of ranks, from the next backward on.

        With a loss summed over tokens and the global number of tokens as divisor, gradients equal those of one big
        batch however tokens are spread over ranks.  None restores the mean, or what the constructor or a
        policy gave.  Communication hooks divide themselves.

        Collective: none; every rank sets the same.

        Raises:
            ConfigError: If ``divisor`` is not positive.
        """
        checked = divisor_of(divisor)
        for unit in units_in(self):
            unit.averaging.divisor = checked

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backwards gather this unit's own parameters; units inside it are not changed.

        A unit whose backward reads no values of its parameters, an ``nn.Embedding`` first of all, needs none: without
        them a step communicates and holds that much less.  The default, True, is right for every module;
        ``auto_wrap_policy="auto"`` says False for the embeddings that it makes units.  With False
        a backward that does read them fails with autograd's "modified by an inplace operation"; module code that runs
        in the backward (hooks) finds them sharded.  Ranks that may use different units
        (``allow_unused="any_rank"``, ``Join``) gather all the same.

        Collective: none; every rank sets the same.

        Example::

            model.tokens.set_unshard_in_backward(False)
        """
        self._unit.unshard_in_backward(wanted=unshard_in_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards from now on average gradients over the replicas too, under hybrid sharding.

        For accumulation at less memory than in ``no_sync``: with False a backward sums gradients over the shard axis
        only and each rank keeps its shard of the sum, unpublished; the first backward with True adds what was left
        and sums it all over the replicas.  Nothing changes for units without replicas.

        Collective: none; every rank sets the same.

        Args:
            requires_all_reduce: Whether they do.
            recurse: Whether units inside this one's are set too.

        Raises:
            UnsupportedError: If a communication hook is registered, which averages by itself.

        Example::

            for number, batch in enumerate(micro_batches):
                model.set_requires_all_reduce(number == len(micro_batches) - 1)
                model(batch).loss.backward()
        """
        units = units_in(self) if recurse else [self._unit]
        if any(unit.averaging.hook is not None for unit in units):
            raise UnsupportedError(
                "set_requires_all_reduce does not know communication hooks, which average by themselves: accumulate in "
                "no_sync."
            )
        for unit in units:
            unit.requires_all_reduce = requires_all_reduce

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within the context, a rank that fails or stays away is an error on the ranks that wait for it.

        They learn of an exception that left the context on another rank within about a second, and of a rank that
        has not come for ``FSDP_ENTRY_TIMEOUT`` seconds (60 by default), instead of waiting for the backend's
        timeout.  The process group can not be used afterwards: restart from the last checkpoint.  Without a guard
        only ranks that wait for each other in a circle are an error, and ranks that are late a warning.  On CPU
        with gloo; NCCL has a watchdog of its own.  Collective: none; every rank enters.

        Example::

            with model.guard():
                for batch in batches:
                    train_step(model, batch)
        """
        watch = the_watch()
        if watch is None:
            yield
            return
        watch.enter_guard()
        try:
            yield
        except BaseException as error:
            watch.leave_guard(error)
            raise
        watch.leave_guard(None)

    def reset(self) -> None:
        """Forget a step that failed half way; gradients that were published stay.

        The next forward does so by itself.  Collective: none.
        """
        self._unit.root.reset()

    def offload(
        self,
        *optimizers: torch.optim.Optimizer,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Move parameters, gradients, buffers and the state of ``optimizers`` off the device, until :meth:`reload`.

        For phases in which something else needs the device (generation in reinforcement learning).  Values, and the
        identity of parameters, stay; tensors can be read, saved, loaded and stepped meanwhile, but a forward is an
        error.  Memory kept for steps is freed, torch's cache of the device included.  Costs the host memory, or the
        disk, of what moves.  Collective: none; every rank calls it between steps.

        Args:
            optimizers: Whose state to move along.
            folder: Move into files mapped from this folder instead of into (page-locked) host memory; on the CPU,
                that frees memory too.

        Raises:
            ConfigError: If ``folder`` is no folder that this rank can write to.
            TrainingStateError: During forward or backward.
            UsageError: If this is not the outermost wrapper, the model is offloaded already, ``no_sync`` has left
                gradients unreduced, or parameters are summoned.

        Example::

            model.offload(optimizer)
            rollouts = generate()
            model.reload()
        """
        self._check_is_outermost("offload")
        root = self._unit.root
        root.check_idle("offload()")
        if root.away is not None:
            raise UsageError(
                "offload() was called twice. Call reload() first, or keep it as it is."
            )
        home = home_on(folder, self.compute_device)
        for unit in root.units:
            unit.reshard()
        managed = {p for unit in root.units for handle in unit.handles for p in handle.exposed}
        others = [param for param in self.parameters() if param not in managed]
        root.away = send_away(root, home, [*others, *self.buffers()], state_tensors(optimizers))

    def reload(self) -> None:
        """Move back to the device what :meth:`offload` has moved.  Collective: none; every rank calls it.

        Raises:
            UsageError: If nothing is offloaded, or this is not the outermost wrapper.
        """
        self._check_is_outermost("reload")
        root = self._unit.root
        if root.away is None:
            raise UsageError("reload() was called but nothing is offloaded. Call offload() first.")
        away, root.away = root.away, None
        away.bring_back()
        for unit in root.units:
            unit.follow_new_leaves()

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Let ``hook`` reduce the gradients of every unit.

        It is called as ``hook(state, grad, output)`` where parameters are sharded, to leave this rank's slice of
        the mean in ``output``, and as ``hook(state, grad)`` under ``NO_SHARD``, to average ``grad`` in place.  See
        ``fsdp.comm.hooks``.  Collective: none; every rank registers the same hook.

        Raises:
            ConfigError: If ``hook`` is not callable.
            ConfigTypeError: If it can not be called with these arguments.
            TrainingStateError: If this is not the outermost wrapper, a hook or a compression is registered already,
                or a forward has run.
        """
        register_hook(units_in(self), state, hook)

    def compress_communication(self, compression: Compression) -> None:
        """Send rounded parameters and gradients in a step; see ``docs/how-to/compress-communication.md``.

        State dicts and ``summon_full_params`` stay exact, and so does what the optimizer steps.

        Collective: every rank of the process group, with the same argument.

        Raises:
            ConfigTypeError: If ``compression`` is no ``Compression``.
            ConfigError: If ranks can not be divided into nodes as asked.
            TrainingStateError: If this is not the outermost wrapper, a hook or a compression is registered already,
                or a forward has run.
            UnsupportedError: Under ``NO_SHARD``; ``secondary_shard`` with ``allow_unused="any_rank"``.

        Example::

            model.compress_communication(Compression(weights="int8", gradients="int8"))
        """
        axes = {wrapper._unit: wrapper._arguments.axes for wrapper in wrappers_in(self)}
        compress_units(axes, compression)
