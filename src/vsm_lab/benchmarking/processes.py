"""Processes that run benchmarks and servers; nothing here imports torch.

The allocator is configured per process, so our code and the reference cannot share one. Processes
are started with ``subprocess``, not ``multiprocessing``: the environment must be set before the
interpreter starts, Ctrl-C must not reach a worker, and its heap must not hold the parent's imports.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from vsm.errors import BenchmarkError, VsmError

Benchmark = Callable[[], object]
"""The code that is timed."""
Timed = Callable[[], float]
"""Runs a benchmark and returns its seconds."""
COMMAND = (sys.executable, "-m", "vsm_lab.benchmarking.runner")
SETTLE_SECONDS = 0.02  # OpenMP threads spin for some milliseconds after a benchmark
HOST = "127.0.0.1"
ADDRESS = re.compile(r"^vsm serve: http://[\d.]+:(\d+),", re.MULTILINE)
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0
SERVE = """
import os, runpy, threading

def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(0)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("vsm", run_name="__main__")
"""
"""``python -m vsm``, which ends when its standard input does, so it cannot outlive its parent."""


class _Process:
    """A child process in its own session, terminated at the end of a ``with`` block."""

    stop_seconds = 5.0

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, **options
        )
        self.process_id = self._process.pid
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        """Wait until the process is ready."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Terminate the process; kill it if it does not end in time."""
        self._process.terminate()
        try:
            self._process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.communicate()  # closes the pipes


class Worker(_Process):
    """A process that prepares and times benchmarks.

    With ``keep_allocations`` its allocator is configured as by ``vsm train``, else glibc's default
    is left. ``metadata`` are the versions and settings that the process reports.
    """

    def __init__(self, keep_allocations: bool, threads: int | None = None) -> None:
        tuning = re.compile("MALLOC_|GLIBC_TUNABLES$")  # of glibc's allocator
        kept = {k: v for k, v in os.environ.items() if keep_allocations or not tuning.match(k)}
        self._settings = keep_allocations, threads
        super().__init__(COMMAND, stdout=subprocess.PIPE, env=kept)

    def _begin(self) -> None:
        self.metadata: dict[str, Any] = self.call("begin", *self._settings)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of :class:`vsm_lab.benchmarking.runner.BenchmarkRunner`."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            pickle.dump((method, *arguments), requests)
            requests.flush()
            answer = pickle.load(answers)
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            ending = "signal 9, out of memory?" if code == -9 else f"exit code {code}"
            raise BenchmarkError(
                f"a benchmark process died ({ending}) in {method}; see its output above"
            ) from None
        if isinstance(answer, VsmError):
            raise answer
        return answer

    def prepare(self, benchmarks: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Timed]:
        """Set up benchmarks, each given by :func:`.runner.find`'s name and its arguments.

        Returns functions that time them. The worker runs them alternately: the first one asked for
        triggers a measurement of all, and the others return their time of the same round.
        """
        places = [self.call("prepare", *call) for call in benchmarks.values()]
        measured: dict[str, float] = {}

        def take(name: str) -> float:
            if name not in measured:
                time.sleep(SETTLE_SECONDS)
                measured.update(zip(benchmarks, self.call("run", places), strict=True))
            return measured.pop(name)

        return {name: partial(take, name) for name in benchmarks}


class Server(_Process):
    """``vsm serve`` on loopback, with its store and log in ``folder``."""

    stop_seconds = 45.0

    def __init__(self, model: str, folder: Path, threads: int | None = None) -> None:
        store = str(folder / "store.sqlite")
        words = ["serve", "--model", model, "--host", HOST, "--port", "0", "--store", store]
        chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._log, command = folder / "server.log", [sys.executable, "-c", SERVE, *words]
        with self._log.open("wb") as log:
            super().__init__(command, stdout=log, stderr=log, env=os.environ | chosen)

    def post(self, path: str, body: bytes, content_type: str) -> Any:
        """Send ``body``; return the document of the response."""
        address, headers = f"http://{HOST}:{self.port}{path}", {"Content-Type": content_type}
        request = urllib.request.Request(address, body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except OSError as error:
            raise BenchmarkError(f"the server failed to answer {path}: {error}") from error

    def _begin(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            text = self._log.read_text(encoding="utf-8", errors="replace")
            if found := ADDRESS.search(text):
                self.port = int(found[1])
                return
            if ended:
                last = text.strip().rpartition("\n")[2]
                raise BenchmarkError(f"the server did not start: {last}")
            time.sleep(0.05)
        raise BenchmarkError(f"the server did not start within {START_SECONDS:g} seconds")


def resident_bytes(process_id: int) -> int | None:
    """Return the resident memory of a process; None where the system has no ``/proc``."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
