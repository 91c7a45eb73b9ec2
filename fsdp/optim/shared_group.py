"""Parameter groups that users see, written through to those of the local optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .zero_state import NOT_SHARED

__all__ = ["SharedGroup", "copy_settings"]


class SharedGroup(dict[str, Any]):
    """A parameter group whose settings (learning rate, ...) reach the local optimizer's group at once.

    Schedulers write here.  ``"params"`` differs: all parameters here, this rank's there.

    Args:
        settings: Contents.
        local: The local optimizer's group.
    """

    __slots__ = ("_local",)

    def __init__(self, settings: Mapping[str, Any], local: dict[str, Any]) -> None:
        super().__init__(settings)
        self._local = local

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key not in NOT_SHARED:
            self._local[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if key not in NOT_SHARED:
            self._local.pop(key, None)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As a dict's."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def pop(self, key: str, *default: Any) -> Any:
        """As a dict's."""
        value = super().pop(key, *default)
        if key not in NOT_SHARED:
            self._local.pop(key, None)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def copy_settings(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy everything but what the two groups have each for themselves."""
    for key, value in source.items():
        if key not in NOT_SHARED and target.get(key, target) is not value:
            target[key] = value
