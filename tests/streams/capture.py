"""What a captured graph forbids, on the simulated machine (``Machine.captured``).

While a step is captured nothing runs; what is launched on the capturing stream, and on the streams that have waited for
it, becomes a graph, which is run later, any number of times, on the memory it was captured with.  So

- a captured stream may not wait for what was recorded outside, nor any stream for what a finished capture recorded;
- the host may wait for nothing, and nothing may be launched on a stream that takes no part;
- every stream that takes part is joined in the end;
- memory that was there before, and that the graph uses, may not be freed while the graph lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.streams.simulator import Stream

__all__ = ["Capture"]


@dataclass(eq=False)
class Capture:
    """One graph.

    Attributes:
        origin: The stream that captures.
        report: Told of what is forbidden.
        ended: Whether it is complete.
    """

    origin: Stream
    report: Callable[[str], None]
    ended: bool = False

    def __post_init__(self) -> None:
        self.streams: dict[Stream, None] = {self.origin: None}

    def takes_part(self, stream: Stream) -> bool:
        """Whether ``stream`` captures now."""
        return not self.ended and stream in self.streams

    def wait(self, stream: Stream, recorded_in: Capture | None) -> None:
        """``stream`` waits for what was recorded in a capture, this or an earlier one, or in none."""
        if recorded_in is self and not self.ended:
            self.streams[stream] = None
            stream.tick()  # even without further work it has to be joined
        elif recorded_in is None and self.takes_part(stream):
            self.report(f"captured {stream.name} waits for what is not captured")

    def end(self) -> None:
        """Look for streams that are not joined."""
        self.ended = True
        for stream in self.streams:
            if self.origin.clock.get(stream.number, 0) < stream.clock[stream.number]:
                self.report(f"the capture ends and {stream.name} is not joined")
