"""Turns, medians and quartiles; nothing here imports torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsm.system.interruption import Interrupted, StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress

Work = Callable[[], object]
"""What is timed."""
Timed = Callable[[], float]
"""Does a work and returns the seconds it took."""


def interleaved(
    works: Mapping[str, Timed],
    rounds: int,
    deadline: float | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, list[float]]:
    """Let works take turns, so that whatever else the machine does falls on all of them.

    Args:
        works: done in this order in every round.
        rounds: how often each is timed.
        deadline: no round begins after this ``time.monotonic``, except the first.
        progress: told of every round.
        stop: asked before every work whether to go on.

    Returns:
        The seconds of each work, round by round; equal positions belong together.

    Raises:
        Interrupted: when asked to stop.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for done in range(rounds):
        if deadline is not None and done and time.monotonic() > deadline:
            break
        for name, work in works.items():
            if stop is not None and stop.signal_number is not None:
                raise Interrupted(stop.signal_number, "stopped in the middle of a measurement")
            times[name].append(work())
        progress.advance()
    return times


@dataclass(frozen=True)
class Quartiles:
    """A median between its quartiles, over ``count`` values."""

    low: float
    median: float
    high: float
    count: int

    def describe(self, digits: int = 2) -> str:
        """Return the median and quartiles as text."""
        low, median, high = (f"{v:,.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} ({low} … {high})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and quartiles of ``values``, inclusive of the smallest and largest."""
    if len(values) == 1:  # refused by statistics before Python 3.13
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median, high, len(values))
