"""Alternating measurements, medians and quartiles; nothing here imports torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsm.system.interruption import Interrupted, StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress

Benchmark = Callable[[], object]
"""The code that is timed."""
Timed = Callable[[], float]
"""Runs a benchmark and returns its seconds."""


def interleave(
    benchmarks: Mapping[str, Timed],
    rounds: int,
    deadline: float | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, list[float]]:
    """Run benchmarks alternately, so that other load on the machine affects all of them.

    No round but the first begins after ``deadline`` (of ``time.monotonic``). Returns the seconds
    of each benchmark, one value per round.

    Raises:
        Interrupted: if a stop was requested.
    """
    times: dict[str, list[float]] = {name: [] for name in benchmarks}
    for done in range(rounds):
        if deadline is not None and done and time.monotonic() > deadline:
            break
        for name, benchmark in benchmarks.items():
            if stop is not None and stop.signal_number is not None:
                raise Interrupted(stop.signal_number, "stopped in the middle of a measurement")
            times[name].append(benchmark())
        progress.advance()
    return times


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of ``count`` values."""

    low: float
    median: float
    high: float
    count: int

    def describe(self, digits: int = 2) -> str:
        """Format as ``median (low … high)``."""
        low, median, high = (f"{v:,.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} ({low} … {high})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and quartiles of ``values``, inclusive of the smallest and largest."""
    if len(values) == 1:  # statistics.quantiles needs two before Python 3.13
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median, high, len(values))
