"""Load benchmark: many clients of a server, beside the Python classifier; does not import torch.

The classifier and ``vsm serve`` have a process each; the clients are threads of this one, which
does little else. Requests are built beforehand and answers are checked afterwards.
"""

import importlib.util
import itertools
import json
import math
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.benchmarking.processes import HOST, SETTLE_SECONDS, Server, Usage, Worker, usage
from vsm_lab.benchmarking.timing import interleave, quartiles
from vsm_lab.benchmarking.workloads import LoadWorkload

SPEED_PACKAGES = ("uvloop", "httptools")  # uvicorn uses them if they are installed
TOLERANCE = 1e-4  # of probabilities: batches of other sizes are rounded differently
TIMEOUT_SECONDS = 40.0  # the server's own limit is 30
BOUNDARY = "benchmark-image-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"


class Query(NamedTuple):
    """An image file and the range of Python's probabilities for every label."""

    name: str
    content: bytes
    expected: Mapping[str, tuple[float, float]]


@dataclass
class Answers:
    """Counts and times of requests.

    Attributes:
        requests: number of requests sent or due.
        seconds: from the first request to the last answer.
        latencies: of the answered requests, in seconds.
        wrong: answers that differ from Python's.
        lost: requests that were refused or not answered.
        deviation: largest distance of a probability from Python's range.
        cpu_seconds: CPU time of the clients.
    """

    requests: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    deviation: float = 0.0
    cpu_seconds: float = 0.0

    def check(self, answer: bytes | None, query: Query) -> None:
        """Count one answer. Any of several equally probable labels is right."""
        self.requests += 1
        if answer is None or answer[9:12] != b"200":
            self.lost += 1
            return
        try:
            [found] = json.loads(answer.partition(HEAD_END)[2])["answers"]
            low, high = query.expected[found["label"]]
            deviation = float(max(low - found["probability"], found["probability"] - high, 0.0))
            is_best = high >= max(lowest for lowest, _ in query.expected.values()) - TOLERANCE
            right = found["file"] == query.name and is_best and deviation <= TOLERANCE
        except (KeyError, TypeError, ValueError):
            self.wrong += 1
            return
        self.wrong += not right
        self.deviation = max(self.deviation, deviation)


def send_requests(
    port: int,
    path: str,
    queries: Sequence[Query],
    count: int,
    clients: int,
    per_second: float | None = None,
) -> Answers:
    """Send ``count`` requests of one image each over ``clients`` connections; check the answers.

    A client sends its next request as soon as it has an answer, or, with ``per_second``, when the
    request is due at that rate. Latencies begin when a request is due, even if all clients are
    busy then. A client whose connection fails does not reconnect.
    """
    requests = [
        _request(f"{HOST}:{port}", path, form_body({}, [(query.name, query.content)]))
        for query in queries
    ]
    connections = _connect(port, clients)
    numbers = itertools.count()  # shared: each client takes the next
    received: dict[int, bytes] = {}
    latencies: list[float] = []
    cpu, begun = time.process_time(), time.perf_counter()
    ended = [begun]

    def client(connection: socket.socket) -> None:
        while (number := next(numbers)) < count:
            due = time.perf_counter()
            if per_second is not None:
                now, due = due, begun + number / per_second
                time.sleep(max(0.0, due - now))
            try:
                connection.sendall(requests[number % len(requests)])
                answer = _receive(connection)
            except OSError:
                return
            if answer is None:
                return
            now = time.perf_counter()
            ended.append(now)
            latencies.append(now - due)
            received[number] = answer

    if connections:
        with ThreadPoolExecutor(len(connections)) as pool:
            list(pool.map(client, connections))
    for connection in connections:
        connection.close()
    answers = Answers(seconds=max(ended) - begun, latencies=latencies)
    answers.cpu_seconds = time.process_time() - cpu
    for number in range(count):
        answers.check(received.get(number), queries[number % len(queries)])
    return answers


def _connect(port: int, clients: int) -> list[socket.socket]:
    connections = []
    for _ in range(clients):
        try:
            connection = socket.create_connection((HOST, port), TIMEOUT_SECONDS)
        except OSError:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(connection)
    return connections


def _receive(connection: socket.socket) -> bytes | None:
    """Read one response; None if the server closes the connection."""
    content = b""
    while chunk := connection.recv(1 << 16):
        content += chunk
        head, complete, body = content.partition(HEAD_END)
        if complete:
            length = LENGTH.search(head)
            if len(body) >= (int(length[1]) if length else 0):
                return content
    return None


def form_body(fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a multipart form with text fields, and files in the field ``files``."""
    begin = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    parts = [f'{begin}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    for name, content in files:
        head = f'{begin}files"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def _request(host: str, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {FORM}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class _Load:
    """A task of a server, with the counts of all requests and the server's memory after each."""

    workload: LoadWorkload
    server: Server
    path: str
    queries: list[Query]
    total: Answers = field(default_factory=Answers)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def send(self, count: int, per_second: float | None = None) -> Answers:
        time.sleep(SETTLE_SECONDS)
        clients, total = self.workload.clients, self.total
        found = send_requests(self.server.port, self.path, self.queries, count, clients, per_second)
        total.requests += found.requests
        total.wrong += found.wrong
        total.lost += found.lost
        total.deviation = max(total.deviation, found.deviation)
        total.cpu_seconds += found.cpu_seconds
        if taken := usage(self.server.process_id):
            self.memory.append((total.requests, taken.resident_bytes))
        return found


def measure_load(
    workload: LoadWorkload,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return the throughput, latency and memory of a server, and the number of wrong answers.

    Args:
        workload: number of requests, clients and images.
        threads: of torch, in the server and in the classifier; None: torch's default.
        progress: advanced after every part.
        stop: checked between parts.
    """
    progress.start(f"load, {workload.model}", workload.pairs + 4)
    with tempfile.TemporaryDirectory(prefix="vsm-load-") as name, Worker(True, threads) as python:
        folder = Path(name)
        python.call("write_images", workload, folder)
        expected = python.call("expected_answers", workload, folder)
        progress.advance()
        with Server(workload.model, folder, threads) as server:
            queries = [
                Query(path.name, path.read_bytes(), ranges)
                for path, ranges in zip(
                    sorted((folder / "queries").iterdir()), expected, strict=True
                )
            ]
            path = f"/v1/tasks/{_create_task(server, folder / 'support')}/classify"
            load = _Load(workload, server, path, queries)
            return _measure(load, python, folder, progress, stop)


def _create_task(server: Server, support: Path) -> str:
    """Create a task with the files ``LABEL/*`` as examples; return its id."""
    created = server.request("/v1/tasks", b'{"name": "benchmark"}', "application/json")
    task = str(json.loads(created)["id"])
    for folder in sorted(support.iterdir()):
        files = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
        server.request(f"/v1/tasks/{task}/examples", form_body({"label": folder.name}, files), FORM)
    return task


def _measure(
    load: _Load, python: Worker, folder: Path, progress: Progress, stop: StopRequest | None
) -> dict[str, Any]:
    workload, server = load.workload, load.server
    load.send(workload.warm_up)
    progress.advance()
    batches = max(1, round(workload.burst / workload.pictures))
    classify = python.prepare("classify_files", workload, folder, batches)
    classify()  # warm up
    turns = {"classifier": classify, "server": lambda: load.send(workload.burst).seconds}
    images = {"classifier": batches * workload.pictures, "server": workload.burst}
    process_ids = {"classifier": python.process_id, "server": server.process_id}
    before = {name: usage(number) for name, number in process_ids.items()}
    batches_before = server.counters()["vsm_batches_total"]
    times = interleave(turns, workload.pairs, progress=progress, stop=stop)
    batches_served = server.counters()["vsm_batches_total"] - batches_before
    cpu = {
        name: _cpu_milliseconds(before[name], usage(number), workload.pairs * images[name])
        for name, number in process_ids.items()
    }
    rates = {name: [images[name] / seconds for seconds in times[name]] for name in times}
    half = quartiles(rates["server"]).median / 2
    paced = load.send(workload.paced, half)
    progress.advance()
    load.send(workload.rest)
    progress.advance()
    ratios = [a / b for a, b in zip(rates["server"], rates["classifier"], strict=True)]
    total = load.total
    return {
        "quartiles": {"server_vs_classifier": asdict(quartiles(ratios))},
        "pictures_per_second": {name: asdict(quartiles(found)) for name, found in rates.items()},
        "half_load": _latencies(paced.latencies) | {"requests_per_second": half},
        "memory": _growth(load.memory),
        "answers": {
            name: getattr(total, name) for name in ("requests", "wrong", "lost", "deviation")
        },
        "cpu_milliseconds_per_picture": {
            **cpu,
            "clients": 1000 * total.cpu_seconds / total.requests,
        },
        "pictures_per_batch": workload.pairs * workload.burst / max(1, batches_served),
        "workload": asdict(workload),
    }


def _cpu_milliseconds(before: Usage | None, after: Usage | None, images: int) -> float | None:
    if before is None or after is None:
        return None
    return 1000 * (after.cpu_seconds - before.cpu_seconds) / images


def _latencies(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile, and their ratio."""
    if not seconds:
        return {"p50_milliseconds": None, "p99_milliseconds": None, "p99_vs_p50": None}
    ordered = sorted(seconds)
    median, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return {
        "p50_milliseconds": 1000 * median,
        "p99_milliseconds": 1000 * high,
        "p99_vs_p50": high / median,
    }


def _growth(memory: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the server's memory after each part, and its growth from the first to the last."""
    readings = [{"requests": count, "megabytes": size / 1e6} for count, size in memory]
    growth = 100 * (memory[-1][1] / memory[0][1] - 1) if memory else None
    return {"growth_percent": growth, "readings": readings}


def speed_packages() -> list[str]:
    """Return which of the packages that make uvicorn faster are installed."""
    return [name for name in SPEED_PACKAGES if importlib.util.find_spec(name)]
