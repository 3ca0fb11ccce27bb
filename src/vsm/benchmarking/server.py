"""A server in a process of its own: the real command, on loopback, with a store of its own.

Nothing here imports torch.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from vsm.benchmarking.client import BOUNDARY, form
from vsm.benchmarking.processes import end
from vsm.errors import BenchmarkError

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 120.0, 45.0, 60.0
ADDRESS = re.compile(r"^vsm serve: http://[\d.]+:(\d+),", re.MULTILINE)
COUNTER = re.compile(r"^(vsm_\w+) ([\d.e+]+)$", re.MULTILINE)
SCRIPT = """
import os, runpy, threading

def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(0)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("vsm", run_name="__main__")
"""
"""``python -m vsm``, which ends when its standard input does: it cannot outlive its parent."""


class Usage(NamedTuple):
    """What a process has taken: bytes that are in memory now, and seconds of processors so far."""

    resident_bytes: int
    cpu_seconds: float


class Server:
    """``vsm serve`` for one model. Use it in a ``with`` block.

    Args:
        model: its name, or a run.
        folder: where its store and its log are.
        threads: of torch; None: torch's own choice.

    Attributes:
        port: on which it listens.
        process_id: the number under which the system knows the process.
    """

    def __init__(self, model: str, folder: Path, threads: int | None = None) -> None:
        self._log = folder / "server.log"
        store = str(folder / "store.sqlite")
        command = ["serve", "--model", model, "--host", HOST, "--port", "0", "--store", store]
        chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | chosen,
                start_new_session=True,  # Ctrl-C is for the parent, which stops it
            )
        self.process_id = self._process.pid
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let it finish what is under way and end; kill it if it does not."""
        end(self._process, STOP_SECONDS)

    def create_task(self, examples: Path) -> str:
        """Create a task with the files ``LABEL/*`` as examples; return its id."""
        made = self._post("/v1/tasks", b'{"name": "benchmark"}', "application/json")
        task = str(made["id"])
        for folder in sorted(examples.iterdir()):
            files = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
            kind = f"multipart/form-data; boundary={BOUNDARY}"
            self._post(f"/v1/tasks/{task}/examples", form({"label": folder.name}, files), kind)
        return task

    def counters(self) -> dict[str, float]:
        """Return what ``/metrics`` counts without labels."""
        text = self._call("GET", "/metrics", None, {}).decode()
        return {name: float(value) for name, value in COUNTER.findall(text)}

    def _post(self, path: str, body: bytes, kind: str) -> Any:
        return json.loads(self._call("POST", path, body, {"Content-Type": kind}))

    def _call(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchmarkError(f"the server did not answer {method} {path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            said = content.decode(errors="replace")
            raise BenchmarkError(
                f"the server answered {method} {path} with {answer.status}: {said}"
            )
        return content

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            said = self._log.read_text(encoding="utf-8", errors="replace")
            found = ADDRESS.search(said)
            if found:
                return int(found[1])
            if ended:
                last = said.strip().rpartition("\n")[2]
                raise BenchmarkError(f"the server did not start: {last}")
            time.sleep(0.05)
        raise BenchmarkError(f"the server did not start within {START_SECONDS:g} seconds")


def usage(process_id: int) -> Usage | None:
    """Return what a process takes; None where the system has no ``/proc``."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        pages = Path(f"/proc/{process_id}/statm").read_text().split()[1]
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])  # in user and in system mode
    return Usage(int(pages) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))
