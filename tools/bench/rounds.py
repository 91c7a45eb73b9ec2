"""Time contenders in interleaved rounds.

In each round every contender takes a few steps in turn, in an order drawn anew: a machine that slows down for a while
slows all of them.  Garbage is collected between contenders, never switched off within a step: a wrapper that makes
cycles pays for them.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = ["PHASES", "Samples", "Steps", "time_rounds"]

PHASES = ("forward_backward", "optimizer")
Samples = dict[
    str, dict[str, list[list[float]]]
]  # contender -> phase -> round -> seconds of each step


class Steps(Protocol):
    """What is timed: ``contenders.Runner``, mostly."""

    def forward_backward(self) -> object:
        """The first phase of a step."""

    def optimizer_step(self) -> None:
        """The second phase."""


def time_rounds(
    runners: Mapping[str, Steps],
    *,
    rounds: int,
    steps: int,
    seed: int,
    before_step: Callable[[], None] = lambda: None,
    finish: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Take ``steps`` timed steps of every runner in each of ``rounds`` rounds; one more before them goes untimed.

    Args:
        runners: Contenders by name.
        rounds: How many rounds.
        steps: Timed steps of a contender in a round.
        seed: Of the order within rounds; the same on all ranks.
        before_step: Called before each step, untimed (a barrier between ranks).
        finish: Called at the end of each phase, timed (a device's synchronisation).
        clock: Seconds since some moment.
    """
    samples: Samples = {name: {phase: [] for phase in PHASES} for name in runners}
    order = list(runners)
    shuffle = random.Random(seed)
    gc.collect()
    gc.freeze()  # what was built so far is no garbage of a step: collections within steps need not visit it
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            gc.collect()
            _step(runners[name], before_step, finish, clock)
            timed = [_step(runners[name], before_step, finish, clock) for _ in range(steps)]
            for phase, seconds in zip(PHASES, zip(*timed, strict=True), strict=True):
                samples[name][phase].append(list(seconds))
    gc.unfreeze()
    return samples


def _step(
    runner: Steps,
    before_step: Callable[[], None],
    finish: Callable[[], None],
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Seconds of forward and backward, and of the optimizer."""
    before_step()
    start = clock()
    runner.forward_backward()
    finish()
    middle = clock()
    runner.optimizer_step()
    finish()
    return middle - start, clock() - middle
