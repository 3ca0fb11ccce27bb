"""The other end of :class:`vsm.benchmarking.processes.Worker`: do works when told, and time them.

Pickled calls of :class:`Bench` come in on standard input, what they return goes out on standard
output. When standard input ends, so does this process, whatever it is doing: it cannot outlive its
parent.
"""

import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vsm.benchmarking import reference, works
from vsm.benchmarking.timing import Work
from vsm.errors import BenchmarkError, VsmError
from vsm.system.allocator import keep_allocations

WORKS: dict[str, Callable[..., Work]] = {
    "step": works.training_steps,
    "backbone": works.backbone_passes,
    "arithmetic": works.equal_arithmetic,
    "embedding": works.embeddings,
    "reference_steps": reference.reference_steps,
    "evaluation": works.evaluations,
    "reference_evaluation": reference.reference_evaluations,
    "statistics_update": works.statistics_updates,
    "recall": works.recalls,
    "recall_with_gradient": works.recalls_with_gradient,
    "consolidation": works.consolidations,
    "forward_pass": works.forward_passes,
    "embedding_pictures": works.embeddings_of_pictures,
    "fit_and_predict": works.fits_and_predictions,
    "predict": works.predictions,
    "explain": works.explanations,
}


class Bench:
    """The works prepared so far, by name."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}

    def begin(self, _: str, keep: bool, threads: int | None) -> dict[str, Any]:
        """Set up the process; return what a reader of its times should know."""
        if threads is not None:
            torch.set_num_threads(threads)
        return {
            "keeps_allocations": keep and keep_allocations(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def prepare(self, name: str, work: str, arguments: Sequence[Any]) -> None:
        """Set up one of ``WORKS``."""
        self._works[name] = WORKS[work](*arguments)

    def run(self, name: str) -> float:
        """Do what was prepared; return the seconds it took."""
        start = time.perf_counter()
        self._works[name]()
        return time.perf_counter() - start


def main() -> None:
    """Answer calls until standard input ends; an error of the package is one answer."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no answer
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    bench = Bench()
    while True:
        action, *arguments = requests.get()
        try:
            answer = getattr(bench, action)(*arguments)
        except VsmError as error:
            answer = BenchmarkError(str(error))
        pickle.dump(answer, answers)
        answers.flush()


def _read(requests: "queue.SimpleQueue[tuple[Any, ...]]") -> None:
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)  # the parent is gone or done; a work in progress is of no use to anybody


if __name__ == "__main__":
    main()
