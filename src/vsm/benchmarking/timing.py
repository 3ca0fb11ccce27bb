"""Turns, medians and quartiles; nothing here imports torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsm.system.progress import NULL_PROGRESS, Progress

Work = Callable[[], object]
"""What is timed."""
Timed = Callable[[], float]
"""Does a work and returns the seconds it took."""


def interleaved(
    works: Mapping[str, Timed],
    rounds: int,
    warm_up: int = 0,
    seconds: float | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, list[float]]:
    """Let works take turns, so that whatever else the machine does falls on all of them.

    Args:
        works: done in this order in every round.
        rounds: how often each is timed.
        warm_up: rounds before those, which do not count.
        seconds: no round begins after this time, except the first; None: all rounds are done.
        progress: told of every round that counted.

    Returns:
        The seconds of each work, round by round; equal positions belong together.
    """
    started = time.monotonic()
    for _ in range(warm_up):
        for work in works.values():
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for done in range(rounds):
        if seconds is not None and done and time.monotonic() - started > seconds:
            break
        for name, work in works.items():
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
