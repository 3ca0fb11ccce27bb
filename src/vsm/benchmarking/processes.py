"""Works in separate processes; nothing here imports torch.

Settings of the allocator hold for a process, so ours and the reference cannot share one. A worker
waits on a pipe while another computes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from vsm.benchmarking.timing import Timed
from vsm.errors import BenchmarkError

COMMAND = (sys.executable, "-m", "vsm.benchmarking.worker")
SETTLE_SECONDS = 0.02  # OpenMP's threads spin for some milliseconds after the work of a process
STOP_SECONDS = 5.0


class Worker:
    """A process that prepares works and does them when told. Use it in a ``with`` block.

    Args:
        keep_allocations: set the allocator as ``vsm train`` does; else leave it as glibc has it.
        threads: of torch; unset: torch's own choice.
        command: what to start, with :mod:`vsm.benchmarking.worker` at its end.

    Attributes:
        metadata: what the process reports about itself.
    """

    def __init__(
        self,
        keep_allocations: bool,
        threads: int | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._begin = {"keep_allocations": keep_allocations, "threads": threads}
        self._command = command
        self._environment = (
            dict(os.environ) if keep_allocations else _with_default_allocator(os.environ)
        )
        self._process: subprocess.Popen[str] | None = None
        self._num_works = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the parent, which stops its workers
        )
        try:
            self.metadata = self._ask(do="begin", **self._begin)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def process_id(self) -> int:
        """The number under which the system knows the process."""
        return self._running().pid

    def prepare(self, work: str, **parameters: Any) -> Timed:
        """Set up one of ``vsm.benchmarking.worker.WORKS``; return what does and times it there."""
        name = f"{work} {self._num_works}"
        self._num_works += 1
        self._ask(do="prepare", name=name, work=work, parameters=parameters)

        def do() -> float:
            time.sleep(SETTLE_SECONDS)
            seconds: float = self._ask(do="run", name=name)["seconds"]
            return seconds

        return do

    def stop(self) -> None:
        """End the process, even in the middle of a work."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                _close(pipe)
        self._process = None

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            raise RuntimeError("the worker is not running; use it in a with block")
        return self._process

    def _ask(self, **message: Any) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(
                f"a benchmark process died ({_ending(process.wait())}) while asked to "
                f"{message['do']} {message.get('name', '')}; see above for what it printed"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(answer["error"])
        return answer


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was left to flush has no reader
        return


def _ending(code: int) -> str:
    return f"signal {-code}, out of memory?" if code == -9 else f"exit code {code}"


def _with_default_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables by which a user may have tuned glibc's allocator."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
