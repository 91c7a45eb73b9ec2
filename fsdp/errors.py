"""Every error this package raises on purpose, and the one helper that writes their messages.

::

    FsdpError (Exception)
      ConfigError (ValueError)             wrong or contradictory arguments, found at construction
        ConfigTypeError (TypeError)        an argument of the wrong type
        DeviceError (RuntimeError)         tensors on several devices, or on another than was asked for
        UnsupportedError (NotImplementedError)   arguments that are right each but do not go together
      UsageError (RuntimeError)            a right call at the wrong time or in the wrong place
        TrainingStateError (ValueError, AssertionError)   not allowed during forward, backward or summon
        ShardedParameterError              a parameter's values were touched while its unit was sharded
      ShardMismatchError (RuntimeError)    ranks disagree, or a tensor does not fit its shard
      CheckpointError (RuntimeError)       saved data is missing, extra, damaged or of the wrong shape
    FsdpWarning (UserWarning)              something is probably not what was meant

The second base classes keep ``except ValueError`` and ``except RuntimeError`` code that was written for torch's
wrapper working.  ``assert`` is for invariants of this package, never for users' mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigTypeError",
    "DeviceError",
    "FsdpError",
    "FsdpWarning",
    "ShardMismatchError",
    "ShardedParameterError",
    "TrainingStateError",
    "UnsupportedError",
    "UsageError",
    "describe",
    "name_some",
]

_NAMES_SHOWN = 5


class FsdpError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes:
        fqn: Fully qualified name of the parameter concerned, in the unwrapped model, if there is one.
        unit: Fully qualified name of the unit concerned (``"<root>"`` for the outermost), if there is one.
        ranks: Ranks concerned, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        fqn: str | None = None,
        unit: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.unit = unit
        self.ranks = ranks


class ConfigError(FsdpError, ValueError):
    """An argument has a wrong value or contradicts another; raised before anything is changed."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type."""


class DeviceError(ConfigError, RuntimeError):
    """Tensors are on several devices, or on another one than was asked for."""


class UnsupportedError(ConfigError, NotImplementedError):
    """Arguments that are right each but do not go together."""


class UsageError(FsdpError, RuntimeError):
    """A right call at the wrong time: an optimizer built before wrapping, a method on a non-root unit."""


class TrainingStateError(UsageError, ValueError, AssertionError):
    """A call that is only allowed outside forward, backward and ``summon_full_params``."""


class ShardedParameterError(UsageError):
    """The values of a parameter were asked for while its unit was sharded."""


class ShardMismatchError(FsdpError, RuntimeError):
    """Ranks disagree about order, shapes or world size, or a tensor does not fit the shard it was given for."""


class CheckpointError(FsdpError, RuntimeError):
    """Saved data is missing, extra, damaged or of the wrong shape."""


class FsdpWarning(UserWarning):
    """Something is allowed but probably not what was meant."""


def name_some(names: Iterable[str]) -> str:
    """Quote at most five names and count the rest: ``'a', 'b' and 12 more``."""
    listed = list(names)
    shown = ", ".join(repr(name) for name in listed[:_NAMES_SHOWN])
    rest = len(listed) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def describe(
    problem: str,
    *,
    remedy: str = "",
    unit: str | None = None,
    fqn: str | None = None,
    rank: tuple[int, int] | None = None,
) -> str:
    """Write a message in the house form: what happened, where, on which rank, what to do.

    Example:
        >>> describe(
        ...     "Parameter is sharded",
        ...     remedy="Use summon_full_params.",
        ...     unit="blocks.0",
        ...     rank=(1, 4),
        ... )
        "Parameter is sharded. [unit 'blocks.0', rank 1 of 4] Use summon_full_params."
    """
    places = []
    if unit is not None:
        places.append(f"unit {unit or '<root>'!r}")
    if fqn is not None:
        places.append(f"parameter {fqn!r}")
    if rank is not None:
        places.append(f"rank {rank[0]} of {rank[1]}")
    where = f" [{', '.join(places)}]" if places else ""
    tail = f" {remedy}" if remedy else ""
    return f"{problem.rstrip('.')}.{where}{tail}"
