"""Turns, pairs, medians and quartiles; nothing here imports torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsm.system.progress import NULL_PROGRESS, Progress

Work = Callable[[], object]
"""What is timed."""
Timed = Callable[[], float]
"""Does a work and returns the seconds it took."""


def timed(work: Work) -> Timed:
    """Return a function that does ``work`` and tells how many seconds it took."""

    def do() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return do


def interleaved(
    works: Mapping[str, Timed],
    rounds: int,
    warm_up: int = 2,
    seconds: float | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, list[float]]:
    """Let works take turns, so that whatever else the machine does falls on all of them.

    Args:
        works: done in this order in every round.
        rounds: how often each is timed.
        warm_up: rounds before those, which do not count.
        seconds: no round begins after this time, except the first; unset: all rounds are done.
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

    def times(self, factor: float) -> "Quartiles":
        """Return the same in another unit."""
        return Quartiles(self.low * factor, self.median * factor, self.high * factor, self.count)

    def describe(self, digits: int = 2) -> str:
        """Return the median and quartiles for people."""
        low, median, high = (f"{v:,.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} ({low} … {high})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and quartiles of ``values``, inclusive of the smallest and largest."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median, high, len(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide pair by pair."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
