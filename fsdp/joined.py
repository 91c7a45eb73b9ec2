"""Wrappers inside ``torch.distributed.algorithms.Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .optim.uneven import UnevenInputs, UnevenInputsHook, check_joinable, group_of_all
from .training import TrainingInterface

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["JoinedWrapper"]


class JoinedWrapper(TrainingInterface, Joinable):
    """Ranks with different numbers of batches."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``with Join([model])`` asks for, so that ranks may have different numbers of batches.

        Ranks without data follow the others: forwards, backwards, ``clip_grad_norm_`` and steps of the optimizers
        over the model's parameters, with the others' hyper-parameters.  Gradients are divided by the number of ranks
        that still have data.  Each forward may have one backward; evaluate under ``torch.no_grad()``.

        Collective: every rank of the process group enters the context.

        Args:
            kwargs: Of ``Join``: ``divide_by_initial_world_size=True`` divides by all ranks instead; ``optimizers``
                names the optimizers, which are otherwise found by themselves.

        Raises:
            UsageError: If this is not the outermost wrapper.
            UnsupportedError: If a communication hook is registered and gradients are not divided by all ranks.

        Example::

            with Join([model]):
                for batch in batches:  # more on some ranks than on others
                    model(batch).mean().backward()
                    model.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        """
        self._check_is_outermost("join_hook")
        root, by_all = self._unit.root, bool(kwargs.get("divide_by_initial_world_size", False))
        check_joinable(root, by_all=by_all)
        if root.uneven is not None:
            root.uneven.leave()
        root.uneven = UnevenInputs(
            root,
            self.join_process_group,
            self._notify_join,
            optimizers=kwargs.get("optimizers"),
            by_all=by_all,
        )
        return UnevenInputsHook(root.uneven, self._clip)

    def _notify_join(self) -> bool:
        """Tell ranks without data that something is to come; whether there is a context that can have such ranks."""
        enabled: bool = self._join_config.enable
        if enabled:
            Join.notify_join_context(self)
        return enabled

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` communicates.  Collective: none."""
        return self.compute_device

    @property
    def join_process_group(self) -> ProcessGroup:
        """All ranks that hold parts of the model.  Collective: none."""
        return group_of_all(self._unit.root, self.process_group)
