"""The other end of :class:`vsm.benchmarking.processes.Process`; nothing here imports torch.

Pickled calls come in on standard input, what they return goes out on standard output. When standard
input ends, so does this process, whatever it is doing: it cannot outlive its parent.
"""

import os
import pickle
import queue
import sys
import threading
from typing import Any

from vsm.errors import BenchmarkError, VsmError


def answer_calls(target: object) -> None:
    """Call methods of ``target`` until standard input ends; our own errors are answers."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no answer
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        action, *arguments = requests.get()
        try:
            answer = getattr(target, action)(*arguments)
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
