"""Works in separate processes; nothing here imports torch.

Settings of the allocator hold for a process, so ours and the reference cannot share one. A worker
waits on a pipe while another computes. Processes are started by ``subprocess``, not by
``multiprocessing``: the environment must be set before the interpreter starts, Ctrl-C must not
reach a worker even while it starts, and what a script has imported must not lie in its heap.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from vsm.benchmarking.timing import Timed
from vsm.errors import BenchmarkError, VsmError

COMMAND = (sys.executable, "-m", "vsm.benchmarking.worker")
SETTLE_SECONDS = 0.02  # OpenMP's threads spin for some milliseconds after the work of a process
STOP_SECONDS = 5.0


def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Ask a process to end, wait for it, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()  # closes the pipes and waits


class Process:
    """A process that is asked to do things. Use it in a ``with`` block.

    Args:
        command: runs :func:`vsm.benchmarking.calls.answer_calls`.
        environment: its variables.

    Attributes:
        process_id: the number under which the system knows the process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which stops its workers
        )
        self.process_id = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process, even in the middle of a work."""
        end(self._process, STOP_SECONDS)

    def ask(self, action: str, name: str, *arguments: object) -> Any:
        """Let a method be called there."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            pickle.dump((action, name, *arguments), requests)
            requests.flush()
            answer = pickle.load(answers)
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            ending = "signal 9, out of memory?" if code == -9 else f"exit code {code}"
            raise BenchmarkError(
                f"a benchmark process died ({ending}) while asked to {action} {name}; see above "
                "for what it printed"
            ) from None
        if isinstance(answer, VsmError):
            raise answer
        return answer


class Worker(Process):
    """A process that prepares works and times them when told.

    Args:
        keep_allocations: set the allocator as ``vsm train`` does; else leave it as glibc has it.
        threads: of torch; None: torch's own choice.

    Attributes:
        metadata: what the process reports about itself.
    """

    def __init__(self, keep_allocations: bool, threads: int | None = None) -> None:
        kept = {k: v for k, v in os.environ.items() if keep_allocations or not _tunes_glibc(k)}
        super().__init__(COMMAND, kept)
        self._num_works = 0
        try:
            self.metadata: dict[str, Any] = self.ask("begin", "", keep_allocations, threads)
        except BaseException:
            self.stop()
            raise

    def prepare(self, work: str, *arguments: object) -> Timed:
        """Set up one of ``vsm.benchmarking.worker.WORKS``; return what does and times it there."""
        return self.prepare_all({work: (work, *arguments)})[work]

    def prepare_all(self, works: Mapping[str, Sequence[Any]]) -> dict[str, Timed]:
        """Set up several, each given by its name there and its arguments.

        They are done together, taking turns: asked for the time of one, the process measures all,
        and what is asked of the others next are their times of the same moment.
        """
        names = []
        for work, *arguments in works.values():
            names.append(f"{work} {self._num_works}")
            self._num_works += 1
            self.ask("prepare", names[-1], work, arguments)
        measured: dict[str, float] = {}

        def take(name: str) -> float:
            if name not in measured:
                time.sleep(SETTLE_SECONDS)
                seconds = self.ask("run", ", ".join(names), names)
                measured.update(zip(works, seconds, strict=True))
            return measured.pop(name)

        return {name: partial(take, name) for name in works}

    def outcome(self, work: str, *arguments: object) -> Any:
        """Do one of ``vsm.benchmarking.worker.WORKS`` once; return what it returns."""
        return self.ask("outcome", work, arguments)


def _tunes_glibc(variable: str) -> bool:
    """Whether a user may have tuned glibc's allocator by an environment variable."""
    return variable.startswith("MALLOC_") or variable == "GLIBC_TUNABLES"
