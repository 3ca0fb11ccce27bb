"""A server under load beside the Python classifier; nothing here imports torch.

Three processes: the classifier, ``vsm serve``, and all clients. The classifier and the clients take
turns; a turn of either is about as many pictures.
"""

import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vsm.benchmarking.client import Answered, Asked
from vsm.benchmarking.processes import SETTLE_SECONDS, Process, Worker
from vsm.benchmarking.server import HOST, Server, Usage, usage
from vsm.benchmarking.timing import interleaved, quartiles
from vsm.benchmarking.workloads import LoadWorkload
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress

COMMAND = (sys.executable, "-c", "from vsm.benchmarking.client import main; main()")
SPEED_PACKAGES = ("uvloop", "httptools")  # which uvicorn uses if they are there


@dataclass
class Load:
    """A server that is asked, and what became of all requests so far.

    Attributes:
        requests: so far.
        wrong: answers that were not Python's.
        lost: requests without an answer.
        deviation: by how much a probability was beyond those of Python, at most.
        client_seconds: of processors, that asking has cost.
        memory: the server's bytes after so many requests.
    """

    workload: LoadWorkload
    server: Server
    clients: Process
    requests: int = 0
    wrong: int = 0
    lost: int = 0
    deviation: float = 0.0
    client_seconds: float = 0.0
    memory: list[tuple[int, int]] = field(default_factory=list)

    def burst(self, count: int) -> Answered:
        """Let all clients ask, each again as soon as it has an answer."""
        return self._asked("burst", count)

    def paced(self, count: int, per_second: float) -> Answered:
        """Let clients ask at a fixed pace."""
        return self._asked("paced", count, per_second)

    def _asked(self, action: str, count: int, *arguments: float) -> Answered:
        time.sleep(SETTLE_SECONDS)
        clients = self.workload.clients
        answered: Answered = self.clients.ask(action, "", count, clients, *arguments)
        self.requests += answered.requests
        self.wrong += answered.wrong
        self.lost += answered.lost
        self.deviation = max(self.deviation, answered.deviation)
        self.client_seconds += answered.cpu_seconds
        taken = usage(self.server.process_id)
        if taken is not None:
            self.memory.append((self.requests, taken.resident_bytes))
        return answered


def measure_load(
    workload: LoadWorkload,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return the throughput, latency and memory of a server, and how many answers were wrong.

    Args:
        workload: how much is asked.
        threads: of torch, in the server and in the classifier; None: torch's own choice.
        progress: told of every part.
        stop: asked between parts whether to go on.
    """
    progress.start(f"load, {workload.model}", workload.pairs + 4)
    with tempfile.TemporaryDirectory(prefix="vsm-load-") as name, Worker(True, threads) as python:
        folder = Path(name)
        python.outcome("write_pictures", workload, folder)
        expected = python.outcome("expect_answers", workload, folder)
        progress.advance()
        with (
            Server(workload.model, folder, threads) as server,
            Process(COMMAND, os.environ) as clients,
        ):
            task = server.create_task(folder / "examples")
            files = sorted((folder / "asked").iterdir())
            asked = [
                Asked(path.name, path.read_bytes(), chances)
                for path, chances in zip(files, expected, strict=True)
            ]
            clients.ask("begin", "", HOST, server.port, f"/v1/tasks/{task}/classify", asked)
            load = Load(workload, server, clients)
            return _measured(load, python, folder, progress, stop)


def _measured(
    load: Load, python: Worker, folder: Path, progress: Progress, stop: StopRequest | None
) -> dict[str, Any]:
    workload = load.workload
    load.burst(workload.settling)
    progress.advance()
    batches = max(1, round(workload.burst / workload.pictures))
    classify = python.prepare("classify_files", workload, folder, batches)
    classify()  # warm up
    ours, theirs = _Cost(load.server.process_id), _Cost(python.process_id)
    turns = {
        "classifier": theirs.counted(classify),
        "server": ours.counted(lambda: load.burst(workload.burst).seconds),
    }
    before = load.server.counters()
    times = interleaved(turns, workload.pairs, progress=progress, stop=stop)
    batches_served = load.server.counters()["vsm_batches_total"] - before["vsm_batches_total"]
    rates = {
        "classifier": [batches * workload.pictures / seconds for seconds in times["classifier"]],
        "server": [workload.burst / seconds for seconds in times["server"]],
    }
    half = quartiles(rates["server"]).median / 2
    paced = load.paced(workload.paced, half)
    progress.advance()
    load.burst(workload.rest)
    progress.advance()
    ratios = [a / b for a, b in zip(rates["server"], rates["classifier"], strict=True)]
    return {
        "quartiles": {"server_vs_classifier": asdict(quartiles(ratios))},
        "pictures_per_second": {name: asdict(quartiles(found)) for name, found in rates.items()},
        "half_load": _latencies(paced.latencies) | {"requests_per_second": half},
        "memory": _growth(load.memory),
        "answers": {
            "requests": load.requests,
            "wrong": load.wrong,
            "lost": load.lost,
            "deviation": load.deviation,
        },
        "cpu_milliseconds_per_picture": {
            "classifier": theirs.milliseconds(workload.pairs * batches * workload.pictures),
            "server": ours.milliseconds(workload.pairs * workload.burst),
            "clients": 1000 * load.client_seconds / load.requests,
        },
        "pictures_per_batch": workload.pairs * workload.burst / max(1, batches_served),
        "workload": asdict(workload),
    }


class _Cost:
    """Seconds of processors that a process takes while something is done."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._seconds: float | None = 0.0

    def counted(self, work: Callable[[], float]) -> Callable[[], float]:
        """Return the same work, whose cost is added up."""

        def do() -> float:
            before = usage(self._process_id)
            seconds = work()
            self._add(before, usage(self._process_id))
            return seconds

        return do

    def milliseconds(self, pictures: int) -> float | None:
        """Return the cost of each of so many pictures; None if it is not known."""
        return None if self._seconds is None else 1000 * self._seconds / pictures

    def _add(self, before: Usage | None, after: Usage | None) -> None:
        if before is None or after is None or self._seconds is None:
            self._seconds = None
        else:
            self._seconds += after.cpu_seconds - before.cpu_seconds


def _latencies(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile, and how far they are apart."""
    if not seconds:
        return {"p50_milliseconds": None, "p99_milliseconds": None, "p99_vs_p50": None}
    ordered = sorted(seconds)
    middle, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return {
        "p50_milliseconds": 1000 * middle,
        "p99_milliseconds": 1000 * high,
        "p99_vs_p50": high / middle,
    }


def _growth(memory: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the server's memory after the first and the last requests, and all between."""
    readings = [{"requests": count, "megabytes": size / 1e6} for count, size in memory]
    growth = 100 * (memory[-1][1] / memory[0][1] - 1) if memory else None
    return {"growth_percent": growth, "readings": readings}


def speed_packages() -> list[str]:
    """Return which of the packages that make uvicorn faster are installed."""
    return [name for name in SPEED_PACKAGES if importlib.util.find_spec(name)]
