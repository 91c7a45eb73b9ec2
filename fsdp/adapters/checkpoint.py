"""``torch.distributed.checkpoint.state_dict`` knows our wrapper beside torch's.

Its functions (``get_state_dict``, ``set_model_state_dict``, ...) ask torch's ``FullyShardedDataParallel`` which
modules are wrapped.  To them a wrapper of another class is an ordinary module, and its optimizer's state, one rank's
shards, would be saved as if it were whole.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import nn

from ..names import FLAT_PARAM, clean_tensor_name

__all__ = ["teach_checkpoint"]


def teach_checkpoint(module: ModuleType, wrapper: Any) -> None:
    """Replace what ``module``, torch's, asks about wrapping.  Collective: none."""
    either = _EitherWrapper(wrapper, module.FSDP)
    asked_names = module._get_fqns  # noqa: SLF001 no public place to ask
    asked_state = module._get_module_fsdp_state_if_fully_sharded_module  # noqa: SLF001 the same

    def names_of(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        """The names a parameter has in the unwrapped model: several for a flat parameter."""
        owner, _, leaf = name.rpartition(".")
        if leaf.startswith(FLAT_PARAM):
            fqns = getattr(getattr(model.get_submodule(owner), leaf, None), "_fqns", None)
            if fqns is not None:
                prefix = f"{clean_tensor_name(owner)}." if clean_tensor_name(owner) else ""
                return {prefix + fqn for fqn in fqns}
        return asked_names(model, name, *args, **kwargs)  # type: ignore[no-any-return]

    def state_of(candidate: nn.Module) -> Any:
        """What tells that a module is wrapped."""
        return candidate if isinstance(candidate, wrapper) else asked_state(candidate)

    vars(module).update(
        FSDP=either,
        _get_fqns=names_of,
        _get_module_fsdp_state_if_fully_sharded_module=state_of,
    )


class _EitherWrapper:
    """Stands for both wrapper classes where torch asks for its own.

    Args:
        ours: This package's wrapper class.
        theirs: Torch's.
    """

    def __init__(self, ours: Any, theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, (self._ours, self._theirs))

    def fsdp_modules(self, module: nn.Module) -> list[nn.Module]:
        """Wrappers in ``module``, of either class."""
        ours = self._ours.fsdp_modules(module)
        return ours or self._theirs.fsdp_modules(module)  # type: ignore[no-any-return]

    def state_dict_type(self, module: nn.Module, **kwargs: Any) -> AbstractContextManager[None]:
        return self._of(module).state_dict_type(module, **kwargs)  # type: ignore[no-any-return]

    def optim_state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._of(model).optim_state_dict(model, *args, **kwargs)

    def optim_state_dict_to_load(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._of(model).optim_state_dict_to_load(model, *args, **kwargs)

    def _of(self, module: nn.Module) -> Any:
        return self._ours if self._ours.fsdp_modules(module) else self._theirs
