"""The other end of :class:`vsm.benchmarking.processes.Worker`: works, done and timed when told."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vsm.benchmarking import pictures, reference, works
from vsm.benchmarking.calls import answer_calls
from vsm.benchmarking.timing import Work
from vsm.system.allocator import keep_allocations

LEAST_SECONDS = 0.05
WORKS: dict[str, Callable[..., Work]] = {
    "step": works.training_steps,
    "pretraining_step": works.pretraining_steps,
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
    "write_pictures": pictures.written,
    "classify_files": pictures.answers_of_files,
    "expect_answers": pictures.ranges_of_answers,
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

    def run(self, _: str, names: Sequence[str]) -> list[float]:
        """Do what was prepared, one after the other; return the seconds that each took.

        What takes milliseconds is done again for a moment, and medians are returned: a single time
        would mostly be of how the machine wakes up. Works take turns all the while, since a machine
        that is shared with others may have another speed a moment later.
        """
        times: list[list[float]] = [[] for _ in names]
        start = time.perf_counter()
        while not times[-1] or time.perf_counter() - start < LEAST_SECONDS * len(names):
            for name, taken in zip(names, times, strict=True):
                before = time.perf_counter()
                self._works[name]()
                taken.append(time.perf_counter() - before)
        return [statistics.median(taken) for taken in times]

    def outcome(self, work: str, arguments: Sequence[Any]) -> object:
        """Do one of ``WORKS`` once; return what it returns."""
        return WORKS[work](*arguments)()


def main() -> None:
    """Answer calls until standard input ends."""
    answer_calls(Bench())


if __name__ == "__main__":
    main()
