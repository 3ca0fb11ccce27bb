"""The other end of :class:`vsm.benchmarking.processes.Worker`: do works when told, and time them.

One JSON object per line comes in on standard input, and one goes out on standard output for each:

    {"do": "begin", "keep_allocations": true, "threads": null}   metadata of this process
    {"do": "prepare", "name": "a", "work": "step", "parameters": {…}}   an empty object
    {"do": "run", "name": "a"}   seconds

When standard input ends, so does this process, whatever it is doing: it cannot outlive its parent.
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TextIO

import torch

from vsm.benchmarking.classifier import (
    embedding_alone,
    explanations,
    fits_and_predictions,
    predictions,
)
from vsm.benchmarking.evaluation import evaluations, reference_evaluations
from vsm.benchmarking.memory_size import consolidations, recalls, recalls_with_gradient
from vsm.benchmarking.reference import reference_steps
from vsm.benchmarking.step import backbone_passes, embeddings, equal_arithmetic, training_steps
from vsm.benchmarking.timing import Timed, Work, timed
from vsm.benchmarking.workloads import ClassifierWorkload, EvaluationWorkload, StepWorkload
from vsm.errors import VsmError
from vsm.system.allocator import keep_allocations

Workload = type[StepWorkload] | type[EvaluationWorkload] | type[ClassifierWorkload]
WORKS: dict[str, tuple[Callable[..., Work], Workload]] = {
    "step": (training_steps, StepWorkload),
    "backbone": (backbone_passes, StepWorkload),
    "arithmetic": (equal_arithmetic, StepWorkload),
    "embedding": (embeddings, StepWorkload),
    "reference_steps": (reference_steps, StepWorkload),
    "evaluation": (evaluations, EvaluationWorkload),
    "reference_evaluation": (reference_evaluations, EvaluationWorkload),
    "recall": (recalls, StepWorkload),
    "recall_with_gradient": (recalls_with_gradient, StepWorkload),
    "consolidation": (consolidations, StepWorkload),
    "embedding_alone": (embedding_alone, ClassifierWorkload),
    "fit_and_predict": (fits_and_predictions, ClassifierWorkload),
    "predict": (predictions, ClassifierWorkload),
    "explain": (explanations, ClassifierWorkload),
}
"""What makes a work, and how large it is; other parameters go to the function."""


class Bench:
    """The works prepared so far, by name."""

    def __init__(self) -> None:
        self._works: dict[str, Timed] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks, see the module."""
        if message["do"] == "begin":
            return _begin(message["keep_allocations"], message["threads"])
        if message["do"] == "prepare":
            make, kind = WORKS[message["work"]]
            known = {field.name for field in fields(kind)}
            sizes = {k: v for k, v in message["parameters"].items() if k in known}
            rest = {k: v for k, v in message["parameters"].items() if k not in known}
            self._works[message["name"]] = timed(make(kind(**sizes), **rest))
            return {}
        return {"seconds": self._works[message["name"]]()}


def _begin(keep: bool, threads: int | None) -> dict[str, Any]:
    """Set up the process; return what a reader of its times should know."""
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "keeps_allocations": keep_allocations() if keep else False,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _read(lines: TextIO, messages: "queue.Queue[str]") -> None:
    for line in lines:
        messages.put(line)
    os._exit(0)  # the parent is gone or done; a work in progress is of no use to anybody


def main() -> None:
    """Answer messages until standard input ends; an error of the package is one answer."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    messages: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, messages), daemon=True).start()
    bench = Bench()
    while True:
        message = json.loads(messages.get())
        try:
            answer = bench.answer(message)
        except VsmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
