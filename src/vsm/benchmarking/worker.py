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

WORKS: dict[str, Callable[..., Work]] = {
    "step": lambda method, inference="network", **sizes: training_steps(
        StepWorkload(**sizes), method, inference
    ),
    "backbone": lambda **sizes: backbone_passes(StepWorkload(**sizes)),
    "arithmetic": lambda method, **sizes: equal_arithmetic(StepWorkload(**sizes), method),
    "embedding": lambda **sizes: embeddings(StepWorkload(**sizes)),
    "reference_steps": lambda tasks_at_once, **sizes: reference_steps(
        StepWorkload(**sizes), tasks_at_once
    ),
    "evaluation": lambda **sizes: evaluations(EvaluationWorkload(**sizes)),
    "reference_evaluation": lambda **sizes: reference_evaluations(EvaluationWorkload(**sizes)),
    "recall": lambda **sizes: recalls(StepWorkload(**sizes)),
    "recall_with_gradient": lambda **sizes: recalls_with_gradient(StepWorkload(**sizes)),
    "consolidation": lambda **sizes: consolidations(StepWorkload(**sizes)),
    "embedding_alone": lambda **sizes: embedding_alone(ClassifierWorkload(**sizes)),
    "fit_and_predict": lambda **sizes: fits_and_predictions(ClassifierWorkload(**sizes)),
    "predict": lambda **sizes: predictions(ClassifierWorkload(**sizes)),
    "explain": lambda **sizes: explanations(ClassifierWorkload(**sizes)),
}


class Bench:
    """The works prepared so far, by name."""

    def __init__(self) -> None:
        self._works: dict[str, Timed] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks, see the module."""
        if message["do"] == "begin":
            return _begin(message["keep_allocations"], message["threads"])
        if message["do"] == "prepare":
            work = WORKS[message["work"]](**message["parameters"])
            self._works[message["name"]] = timed(work)
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
