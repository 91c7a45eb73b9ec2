"""An exponential moving average of a wrapped model, kept and updated in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..errors import CheckpointError, ConfigError, name_some

__all__ = ["ShardedEMA"]


class ShardedEMA:
    """The moving average ``average = decay * average + (1 - decay) * value`` of parameters and floating buffers.

    Each rank averages the pieces it holds: no communication, and a shard of memory.  Averages are in the parameters'
    dtype, or in float32 where that is lower.  Other buffers are copied.

    Collective: none; nor is :meth:`update`.

    Args:
        model: A wrapper, a module that contains some, or a plain module.
        decay: How much of the average stays in an update, in [0, 1].

    Raises:
        ConfigError: If ``decay`` is not in [0, 1].

    Example::

        ema = ShardedEMA(model, decay=0.999)
        for batch in batches:
            train_step(model, batch)
            ema.update()
        with ema.swapped():
            evaluate(model)
            torch.save(
                model.state_dict(), "average.pt"
            )  # whole tensors under the model's own names
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay is {decay}: expected a number in [0, 1].")
        self.decay = decay
        self._model = model
        self._averages = {
            name: value.detach().to(_average_dtype(value), copy=True)
            for name, value in self._values().items()
        }

    def _values(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's values of now into the averages."""
        averages, values = [], []
        for name, value in self._values().items():
            average = self._averages[name]
            if value.is_floating_point():
                averages.append(average)
                values.append(value.detach().to(average.dtype))
            else:
                average.copy_(value)
        if averages:
            _torch.foreach_lerp(averages, values, 1.0 - self.decay)

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self._values().items():
            average = self._averages[name]
            kept = value.detach().to(average.dtype, copy=True)
            value.copy_(average)
            average.copy_(kept)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the context the model has the averages, for evaluation and for ``model.state_dict()``.

        Its own values come back afterwards, also after an exception; what was written meanwhile goes into the
        averages.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces of the averages, by name, to resume in the same world; tensors are not copied."""
        return {"decay": self.decay, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave on this rank.

        Raises:
            CheckpointError: If names or shapes differ; nothing is changed then.
        """
        saved = state["averages"]
        wrong = [
            name
            for name in {**self._averages, **saved}
            if name not in saved
            or name not in self._averages
            or saved[name].shape != self._averages[name].shape
        ]
        if wrong:
            raise CheckpointError(
                f"the saved averages are of another model or world: {name_some(wrong)}. Save them whole, with "
                "`with ema.swapped(): model.state_dict()`, to load them anywhere."
            )
        self.decay = state["decay"]
        for name, average in self._averages.items():
            average.copy_(saved[name])


def _average_dtype(value: torch.Tensor) -> torch.dtype:
    is_low = value.is_floating_point() and value.dtype.itemsize < 4
    return torch.float32 if is_low else value.dtype
