"""``ZeroRedundancyOptimizer``: every rank keeps optimizer state for its share of the parameters only (ZeRO-1).

A step is: the local optimizer updates what this rank owns, then owners hand their parameters out.  What is owned is
decided by ``ownership``, how it is stepped by ``stepping``, when it travels by ``handing_out`` and how by
``exchange``, how state becomes a state dict by ``zero_state``; here is the optimizer that users hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from .. import _torch
from ..errors import ConfigError, FsdpWarning, UsageError
from . import zero_state
from .exchange import host_wire
from .handing_out import HandingOut
from .joining import Idle, ZeroJoinHook, share_grads, share_settings
from .owned_norm import clip_owned
from .ownership import Ownership
from .params import (
    check_dense,
    check_group,
    check_optimizer,
    group_label,
    materialize,
    name_parameters,
)
from .shared_group import SharedGroup
from .stepping import LocalSteps, copy_groups, lent_grads

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["ZeroRedundancyOptimizer"]


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wrap any optimizer and shard its state over the ranks of a process group.

    Each rank updates its share of the parameters and hands the result to the others, so that it keeps ``1 /
    world_size`` of the optimizer state.  Gradients must be equal on all ranks, as DistributedDataParallel leaves them,
    or right at least where this rank owns the parameter (see :func:`fsdp.optim.reduce_scatter_hook`).

    Collective: construction is not, but all ranks must construct it with the same parameters in the same order.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or group dicts, in any iterable; groups may hold generators.
            Dense parameters of all dtypes and devices may be mixed.
        optimizer_class: Class of the local optimizer.
        process_group: The ranks that share; the default group if None.
        parameters_as_bucket_view: Pack parameters by owner, device and dtype, so that each rank hands out one tensor;
            their ``.data`` become views.
        overlap_with_ddp: Step inside DistributedDataParallel's gradient hook: needs
            :func:`fsdp.optim.hook_with_zero_step` or its interleaved sibling.  :meth:`step` then does nothing.
        partition: ``"parameter"`` gives whole parameters to ranks, the largest first to the least loaded.
            ``"element"`` cuts a flat tensor evenly, to one element, for optimizers that treat elements alone;
            parameters become views.
        **defaults: Arguments of ``optimizer_class``.

    Attributes:
        optim: The local optimizer, over what this rank owns.
        process_group: The process group.
        rank: This rank in the process group.
        world_size: Ranks in the process group.
        global_rank: This rank in the default process group.
        initialized: True once construction has finished.

    Raises:
        ConfigTypeError: If ``params`` holds anything but tensors, pairs or dicts, or a mixture of these.
        ConfigError: If ``params`` is empty or holds a sparse tensor, a group has no ``"params"``, or the optimizer
            cannot work on a part of the parameters.

    Example:
        >>> ddp = DistributedDataParallel(model)  # doctest: +SKIP
        >>> optim = ZeroRedundancyOptimizer(
        ...     ddp.parameters(), torch.optim.AdamW, lr=1e-3
        ... )  # doctest: +SKIP
        >>> ddp(inputs).sum().backward()  # doctest: +SKIP
        >>> optim.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,  # noqa: FBT001, FBT002  # the reference's signature
        overlap_with_ddp: bool = False,  # noqa: FBT001, FBT002
        *,
        partition: str = "parameter",
        **defaults: Any,
    ) -> None:
        self.initialized = False
        given = materialize(params)
        process_group = defaults.pop("group", None) or process_group  # torch 1.8 called it so
        self.process_group = check_group(process_group)
        self.rank: int = dist.get_rank(self.process_group)
        self.world_size: int = dist.get_world_size(self.process_group)
        self.global_rank: int = dist.get_rank()
        check_optimizer(optimizer_class, partition, self.world_size)

        Optimizer.__init__(self, given, defaults)
        Joinable.__init__(self)
        if not self._all_params:
            raise ConfigError("params holds groups without any parameter.")
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        self._default_device: torch.device = self._all_params[0].device
        self._ownership = Ownership(
            [group["params"] for group in self.param_groups],
            self.rank,
            self.world_size,
            by_element=partition == "element",
            as_views=parameters_as_bucket_view,
        )
        self._handing_out = HandingOut(
            self.process_group, self._ownership, warns_of_rebuilds=parameters_as_bucket_view
        )
        self._handing_out.plan(self._all_params)
        self._consolidated: dict[str, Any] | None = None
        self._idle = Idle()
        self.is_shadowing = False  # set by the join hook while this rank has run out of inputs
        self.received_grads: Mapping[
            torch.Tensor, torch.Tensor
        ] = {}  # set by the reduce-scatter hook
        self.optim: Optimizer = optimizer_class(
            [
                {**_settings(group), "params": tensors}
                for group, tensors in zip(
                    self.param_groups, self._ownership.local_groups(), strict=True
                )
            ],
            **defaults,
        )
        self._steps = LocalSteps(self.optim, self._ownership)
        self.defaults = dict(self.optim.defaults)
        self._link()
        self.initialized = True

    # Stepping

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Update what this rank owns, then bring all parameters up to date on all ranks.

        Under ``overlap_with_ddp`` the gradient hook steps: this then warns and does nothing.

        Collective: every rank of the process group.

        Args:
            closure: Re-evaluates the model and returns the loss; passed to the local optimizer.
            **kwargs: Passed to the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returned: the closure's loss, or None.
        """
        if self._overlap_with_ddp:
            warnings.warn(
                "step() does nothing with overlap_with_ddp=True: the gradient hook steps during backward. "
                "Remove the call from the training loop.",
                FsdpWarning,
                stacklevel=3,  # torch wraps every optimizer's step once
            )
            return None
        loss = self._local_step(closure=closure, **kwargs)
        self._sync_params()
        return loss

    @_torch.run_uncompiled
    def _local_step(
        self,
        gradients: Sequence[torch.Tensor | None] | None = None,
        closure: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Update what this rank owns and nothing more.

        Collective: only inside a ``Join`` context: every rank of the process group.

        Args:
            gradients: One for each parameter of the local optimizer, to use in place of ``.grad``; None skips one.
            closure: As in :meth:`step`.
            **kwargs: As in :meth:`step`.
        """
        self.begin_step()
        if gradients is None:
            return self._step_held(closure, kwargs)
        held = [tensor for group in self.optim.param_groups for tensor in group["params"]]
        with lent_grads(held, gradients):
            return self._step_held(None, kwargs)

    def begin_step(self) -> None:
        """What comes before any update of a step.

        Collective: only inside a ``Join`` context: every rank of the process group.
        """
        self.wait_for_parameters()
        if not self.is_shadowing:
            Join.notify_join_context(self)
        self._idle = share_settings(self)
        self._ownership.restore_views()

    def _step_held(self, closure: Any, kwargs: dict[str, Any]) -> Any:
        """Step the local optimizer with the parameters' gradients."""
        before = partial(share_grads, self, self._idle)
        return self._steps.whole(self.param_groups, before, closure, kwargs)

    def step_part(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Update what this rank owns of ``params`` with ``grads`` in place of their own gradients.

        Collective: none.
        """
        self._steps.part(self.param_groups, params, grads)

    def finish_parts(self) -> None:
        """End a step made of parts.  Collective: none."""
        self._steps.finish_parts(self.param_groups)
        # Learning rate schedulers look at this to see that a step came before theirs.
        self._opt_called = True

    @_torch.run_uncompiled
    def _sync_params(self) -> None:
        """Bring all parameters up to date on all ranks.

        Collective: every rank of the process group.
        """
        self._handing_out.run(self._all_params)

    def wait_for_parameters(self) -> None:
        """Wait until parameters that were left in flight have arrived.  Collective: none."""
        self._handing_out.wait()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters go to the least loaded ranks, the others stay where they are.

        Collective: none, but all ranks must add the same group.

        Args:
            param_group: ``"params"``: a parameter or any iterable of them; settings; the rest is filled in.

        Raises:
            ConfigError: If the group has no ``"params"`` or holds a sparse parameter.
        """
        label = group_label(len(self.param_groups))
        if "params" not in param_group:
            raise ConfigError(f"{label} has no 'params': expected the parameters of the group.")
        group = dict(param_group)
        if not isinstance(group["params"], torch.Tensor | set):  # torch refuses sets
            group["params"] = list(group["params"])
        Optimizer.add_param_group(self, group)
        added = self.param_groups[-1]
        check_dense(added, label)
        if not self.initialized:
            return
        self.wait_for_parameters()
        self._ownership.add_group(added["params"])
        local = {**_settings(added), "params": self._ownership.local_groups()[-1]}
        self.optim.add_param_group(local)
        self._handing_out.plan(self._all_params)
        self._link()

    def _link(self) -> None:
        """Make exposed groups complete, and write what users set in them through to the local optimizer's."""
        self.param_groups[:] = [
            SharedGroup({**_settings(local), **exposed}, local)
            for exposed, local in zip(self.param_groups, self.optim.param_groups, strict=True)
        ]
        self.state = self.optim.state

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: Sequence[dict[str, Any]]
    ) -> None:
        """Copy all settings, group by group.  Collective: none."""
        copy_groups(src_param_groups, dst_param_groups)

    # State

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank ``to``, where :meth:`state_dict` then returns it.

        The result is a copy on the CPU: later steps leave it as it is, and so do later calls for other ranks.

        Collective: every rank of the process group.

        Args:
            to: Rank in the process group.
        """
        if not 0 <= to < self.world_size:
            raise ConfigError(f"to={to}: expected a rank of the group, 0 to {self.world_size - 1}.")
        collected = self._collect(to)
        if collected is not None:
            self._consolidated = collected

    def state_dict(
        self, *, consolidate: bool = False, to: int | None = None, keys: str = "index"
    ) -> dict[str, Any]:
        """The state of all ranks in the format of one plain optimizer.

        It can be loaded at any world size, into a plain optimizer, and that optimizer's state dict into this one.

        Collective: with ``consolidate=True`` every rank of the process group, else none.

        Args:
            consolidate: Collect the state now.  Otherwise what :meth:`consolidate_state_dict` last collected here is
                returned, which may be older than the parameters.
            to: With ``consolidate``: the rank that gets it; the others get an empty dict.  All ranks if None.
            keys: ``"index"``: parameters are keyed by their place, as plain optimizers do.  ``"name"``: by the name
                each was given with, as ``FullyShardedDataParallel.optim_state_dict`` does.

        Returns:
            ``"state"`` by parameter, in order, and ``"param_groups"``; tensors are copies on the CPU.

        Raises:
            ConfigError: If ``keys`` is neither, or is ``"name"`` and parameters were given without names.
            UsageError: If ``consolidate`` is False and nothing was collected on this rank.
        """
        if keys not in ("index", "name"):
            raise ConfigError(f"keys={keys!r}: expected 'index' or 'name'.")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if consolidate:
            result = self._collect(to) or {}
        elif self._consolidated is None:
            raise UsageError(
                "Optimizer state has not been consolidated on this rank. "
                f"Please call `consolidate_state_dict(to={self.rank})` on all ranks beforehand, or "
                "state_dict(consolidate=True) on all ranks, if you meant to save the global state."
            )
        else:
            result = {
                "state": {
                    index: dict(entries) for index, entries in self._consolidated["state"].items()
                },
                "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
            }
        if keys == "name" and result:
            result = zero_state.keyed_by_name(result, self.param_groups)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def _collect(self, target: int | None) -> dict[str, Any] | None:
        self.wait_for_parameters()
        state = zero_state.consolidate(
            self.process_group,
            host_wire(self.process_group, self._default_device),
            self._all_params,
            self._ownership.pieces(self._all_params),
            self.optim.state,
            target,
        )
        if state is None:
            return None
        return {"state": state, "param_groups": zero_state.pack_groups(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a complete state dict; what is passed is copied and never changed.

        Collective: none, but every rank must load.

        Args:
            state_dict: From :meth:`state_dict` at any world size, or from a plain optimizer.  Where it and this
                optimizer have names for parameters, these decide which is which, else their order.

        Raises:
            ConfigError: If its groups do not fit this optimizer's.
            CheckpointError: If its names or shapes do not.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        zero_state.check_fits(state_dict, self.param_groups)
        state_dict = zero_state.in_own_order(state_dict, self.param_groups)
        self.wait_for_parameters()
        self.optim.load_state_dict(
            zero_state.local_state_dict(
                state_dict, self.param_groups, self._ownership, self.optim.param_groups
            )
        )
        for exposed, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key in set(exposed) - set(local) - zero_state.NOT_SHARED:
                del exposed[key]
            exposed.update(_settings(local))
        self._link()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm over all gradients, each element read on the rank that owns it.

        Equals ``torch.nn.utils.clip_grad_norm_``, and is right with :func:`fsdp.optim.reduce_scatter_hook` too.

        Collective: every rank of the process group.

        Args:
            max_norm: Norm that gradients are scaled down to.
            norm_type: Order of the norm; ``inf`` for the largest absolute value.

        Returns:
            The norm before clipping, zero-dimensional float32, on the device of the first parameter.
        """
        return clip_owned(
            self._ownership.pieces(self._all_params),
            self._all_params,
            self.process_group,
            max_norm,
            norm_type,
        )

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a ``Join`` context runs here once this rank is out of inputs.  Collective: none."""
        return ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where the ``Join`` context communicates.  Collective: none."""
        return self._default_device

    @property
    def join_process_group(self) -> Any:
        """The process group.  Collective: none."""
        return self.process_group

    @property
    def in_join(self) -> bool:
        """Whether a ``Join`` context is open.  Collective: none."""
        return bool(self._join_config.enable)

    def leave_join(self) -> None:
        """Forget the ``Join`` context, which torch leaves behind.  Collective: none."""
        Joinable.__init__(self)

    # Parts, for the hooks

    @property
    def overlaps(self) -> bool:
        """Whether the gradient hook steps.  Collective: none."""
        return self._overlap_with_ddp

    @property
    def ownership(self) -> Ownership:
        """Who owns what.  Collective: none."""
        return self._ownership

    @property
    def handing_out(self) -> HandingOut:
        """How parameters travel after a step.  Collective: none."""
        return self._handing_out

    def all_parameters(self) -> list[torch.Tensor]:
        """All parameters in group order.  Collective: none."""
        return self._all_params

    def name_of(self, param: torch.Tensor) -> str:
        """The name ``param`` was given with, or its place in ``param_groups``.  Collective: none."""
        return name_parameters(self.param_groups).get(param, "a parameter it was not given")

    # Names that code written for torch's class reads

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return self._all_params

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        return {param: index for index, param in enumerate(self._all_params)}

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        return {param: self._ownership.owner(param) for param in self._all_params}

    @property
    def _buckets(self) -> list[list[torch.Tensor]]:
        """The packed tensors: one list for each device and dtype, in it one tensor a rank."""
        return [[packed.flat for packed in packs] for packs in self._ownership.packs]

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """For each rank its parameter groups, with the settings of the exposed ones.  Collective: none."""
        return [
            [
                {**_settings(group), "params": list(params)}
                for group, params in zip(self.param_groups, groups, strict=True)
            ]
            for groups in self._ownership.by_rank
        ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without what each side has for itself."""
    return {key: value for key, value in group.items() if key not in zero_state.NOT_SHARED}
