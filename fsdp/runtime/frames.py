"""Which Python frames run: an exception that no hook of ours sees shows by a frame that does not run any more."""

from __future__ import annotations

import inspect
from types import FrameType

__all__ = ["caller_of_caller", "engine_frame", "is_running"]


def caller_of_caller() -> FrameType | None:
    """The frame that called the function that called this function's caller; it runs as long as the forward does."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    return frame


def engine_frame() -> FrameType | None:
    """The frame that called into autograd, from an autograd hook of this package's; None on autograd's own threads."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Whether ``frame`` is among the callers; a frame left by an exception, KeyboardInterrupt included, is not."""
    current = inspect.currentframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
