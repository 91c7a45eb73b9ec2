"""Medians, quartiles and paired ratios of samples taken in rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Rounds", "Summary", "combine", "ratio", "round_medians", "summarize"]


Rounds = Sequence[Sequence[float]]  # a round: the seconds of each step in it


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of ``count`` values, in the values' unit.

    Quartiles interpolate between the values, the smallest and largest included, so that one value is its own quartile.
    """

    median: float
    lower: float
    upper: float
    count: int

    def scaled(self, factor: float) -> Summary:
        """The summary of every value times ``factor`` (positive)."""
        return Summary(self.median * factor, self.lower * factor, self.upper * factor, self.count)

    def text(self, digits: int) -> str:
        """``median [lower quartile, upper quartile]``."""
        return f"{self.median:.{digits}f} [{self.lower:.{digits}f}, {self.upper:.{digits}f}]"


def summarize(values: Sequence[float]) -> Summary:
    """The summary of ``values``; at least one."""
    if not values:
        raise ValueError("no values to summarize")
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, lower, upper, len(values))


def round_medians(rounds: Rounds) -> list[float]:
    """The median step of each round."""
    return [statistics.median(steps) for steps in rounds]


def combine(function: Callable[[float, float], float], left: Rounds, right: Rounds) -> list[float]:
    """``function`` of both contenders' median steps, round by round.

    What slows the machine for a while slows both halves of a pair; a comparison of overall medians would keep it.
    """
    pairs = zip(round_medians(left), round_medians(right), strict=True)
    return [function(one, other) for one, other in pairs]


def ratio(values: Sequence[float], reference: Sequence[float]) -> Summary | None:
    """The summary of round-by-round ratios; None where a reference value is not positive (no cost to compare with)."""
    if any(value <= 0 for value in reference):
        return None
    return summarize([one / other for one, other in zip(values, reference, strict=True)])
