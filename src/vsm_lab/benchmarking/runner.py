"""The process behind :class:`.processes.Worker`: prepares and times benchmarks.

Pickled calls arrive on standard input, results leave on standard output. The process ends with its
standard input, so it cannot outlive its parent.
"""

import os
import pickle
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from vsm.errors import BenchmarkError, VsmError
from vsm.system.allocator import keep_allocations
from vsm_lab.benchmarking import benchmarks, reference
from vsm_lab.benchmarking.processes import Benchmark

LEAST_SECONDS = 0.05


def find(name: str) -> Any:
    """Return a function of the modules that benchmarks are in."""
    return getattr(benchmarks if hasattr(benchmarks, name) else reference, name)


class BenchmarkRunner:
    """The prepared benchmarks of this process."""

    def __init__(self) -> None:
        self._prepared: list[Benchmark] = []

    def begin(self, keep: bool, threads: int | None) -> dict[str, Any]:
        """Configure the process; return its versions and settings."""
        if threads is not None:
            torch.set_num_threads(threads)
        return {
            "keeps_allocations": keep and keep_allocations(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def prepare(self, benchmark: str, arguments: dict[str, Any]) -> int:
        """Set up a benchmark; return its position for :meth:`run`."""
        self._prepared.append(find(benchmark)(**arguments))
        return len(self._prepared) - 1

    def run(self, positions: Sequence[int]) -> list[float]:
        """Run prepared benchmarks alternately; return the seconds of each.

        Short ones are repeated for ``LEAST_SECONDS`` and their median is returned, since a single
        call mostly measures how fast the processor wakes up.
        """
        times: list[list[float]] = [[] for _ in positions]
        start = time.perf_counter()
        while not times[-1] or time.perf_counter() - start < LEAST_SECONDS * len(positions):
            for position, seconds in zip(positions, times, strict=True):
                before = time.perf_counter()
                self._prepared[position]()
                seconds.append(time.perf_counter() - before)
        return [statistics.median(seconds) for seconds in times]

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function."""
        return find(name)(*arguments)


def main() -> None:
    """Answer calls until standard input ends; our own errors are returned to the caller."""
    runner = BenchmarkRunner()
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # other output must not mix with answers
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        method, *arguments = requests.get()
        try:
            answer = getattr(runner, method)(*arguments)
        except VsmError as error:
            answer = BenchmarkError(str(error))
        pickle.dump(answer, answers)
        answers.flush()


def _read(requests: "queue.SimpleQueue[tuple[Any, ...]]") -> None:
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)  # the parent has ended or closed the pipe


if __name__ == "__main__":
    main()
