"""Load benchmark: many clients of a server, beside the Python classifier.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from vsm.errors import SettingsError
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.benchmarking.processes import HOST, SETTLE_SECONDS, Server, Worker, resident_bytes
from vsm_lab.benchmarking.suite import (
    Quartiles,
    describe_conditions,
    describe_machine,
    interleave,
    quartiles,
    write_page,
)
from vsm_lab.document import Block, Heading, Table, Text
from vsm_lab.job_files import JobStore
from vsm_lab.provenance import measured_code

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
SPEED_PACKAGES = ("uvloop", "httptools")  # uvicorn uses them if they are installed
TOLERANCE = 1e-4  # of probabilities: batches of other sizes are rounded differently
TIMEOUT_SECONDS = 40.0  # the server's own limit is 30
BOUNDARY = "benchmark-image-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
LEAST_RATIO, MOST_LATENCY, MOST_GROWTH = 0.7, 5.0, 5.0
COLUMNS = ["", "measured", "target", "reached"]
COUNTS = ("requests", "wrong", "lost")


@dataclass(frozen=True)
class Load:
    """Concurrent requests to a server whose task has N classes of K images."""

    model: str
    way: int = 5
    shot: int = 5
    images: int = 320  # different ones; the Python classifier gets them as one batch
    clients: int = 32  # each with one image per request
    requests: int = 10_000
    pairs: int = 10  # alternations of classifier and clients

    def __post_init__(self) -> None:
        least = {"images": 1, "clients": 1, "pairs": 1, "requests": 10 * self.pairs}
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                option = "repeats" if name == "pairs" else name
                raise SettingsError(f"{option}: must be at least {smallest}, got {value}")

    def parts(self) -> tuple[int, int, int, int]:
        """Return the requests of the warm-up, of a burst, of the paced part, and the rest.

        Warm-up and the paced part have a tenth each, all bursts together six tenths.
        """
        tenth, burst = self.requests // 10, 6 * self.requests // 10 // self.pairs
        return tenth, burst, tenth, self.requests - 2 * tenth - self.pairs * burst


class Query(NamedTuple):
    """An image file and Python's probability of every label."""

    name: str
    content: bytes
    expected: Mapping[str, float]


@dataclass
class Answers:
    """Counts and times of requests."""

    requests: int = 0  # sent or due
    seconds: float = 0.0  # from the first request to the last answer
    latencies: list[float] = field(default_factory=list)  # of answered requests, in seconds
    wrong: int = 0  # answers that differ from Python's
    lost: int = 0  # requests that were refused or not answered
    deviation: float = 0.0  # largest distance of a probability from Python's

    def check(self, answer: tuple[int, bytes] | None, query: Query) -> None:
        """Count one answer, status and body. Any of several equally probable labels is right."""
        self.requests += 1
        if answer is None or answer[0] != HTTPStatus.OK:
            self.lost += 1
            return
        try:
            [found] = json.loads(answer[1])["answers"]
            expected = query.expected[found["label"]]
            deviation = abs(expected - found["probability"])
            is_best = expected >= max(query.expected.values()) - TOLERANCE
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
    requests = [_request(port, path, query) for query in queries]
    numbers = itertools.count()  # shared: each client takes the next
    received: dict[int, tuple[int, bytes]] = {}
    latencies: list[float] = []
    begun = time.perf_counter()
    ended = [begun]

    def client(_: int) -> None:
        with suppress(OSError), socket.create_connection((HOST, port), TIMEOUT_SECONDS) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (number := next(numbers)) < count:
                due = time.perf_counter()
                if per_second is not None:
                    now, due = due, begun + number / per_second
                    time.sleep(max(0.0, due - now))
                server.sendall(requests[number % len(requests)])
                answer = _receive(server)
                if answer is None:
                    return
                now = time.perf_counter()
                ended.append(now)
                latencies.append(now - due)
                received[number] = answer

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    answers = Answers(seconds=max(ended) - begun, latencies=latencies)
    for number in range(count):
        answers.check(received.get(number), queries[number % len(queries)])
    return answers


def _request(port: int, path: str, query: Query) -> bytes:
    body = form_body({}, [(query.name, query.content)])
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: {FORM}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _receive(server: socket.socket) -> tuple[int, bytes] | None:
    """Read one response, status and body; None if the server closes the connection.

    ``http.client`` takes three times the processor time, which the server needs.
    """
    content = b""
    while chunk := server.recv(1 << 16):
        content += chunk
        head, complete, body = content.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if complete and length and len(body) >= int(length[1]):
            return int(head[9:12]), body
    return None


def form_body(fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a multipart form with text fields, and files in the field ``files``."""
    begin = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    parts = [f'{begin}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    for name, content in files:
        head = f'{begin}files"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


@dataclass(frozen=True)
class _Task:
    """A task of a server and images to classify; keeps the answers to all requests."""

    server: Server
    path: str
    queries: list[Query]
    clients: int
    answers: list[Answers] = field(default_factory=list)

    def send(self, count: int, per_second: float | None = None) -> Answers:
        time.sleep(SETTLE_SECONDS)
        arguments = (self.server.port, self.path, self.queries, count, self.clients)
        self.answers.append(send_requests(*arguments, per_second))
        return self.answers[-1]

    def memory(self) -> dict[str, float] | None:
        """Return the server's memory and the number of requests so far."""
        taken = resident_bytes(self.server.process_id)
        requests = sum(one.requests for one in self.answers)
        return None if taken is None else {"requests": requests, "megabytes": taken / 1e6}


def measure_load(
    load: Load,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return the throughput, latency and memory of a server, and the number of wrong answers.

    ``threads`` are those of torch in the server and in the classifier, None for torch's default;
    ``stop`` is checked between parts.
    """
    progress.start(f"load, {load.model}", load.pairs + 4)
    with tempfile.TemporaryDirectory(prefix="vsm-load-") as name, Worker(True, threads) as python:
        folder = Path(name)
        python.call("call", "write_images", load.model, folder, load.way, load.shot, load.images)
        expected = python.call("call", "expected_answers", load.model, folder)
        progress.advance()
        with Server(load.model, folder, threads) as server:
            paths = sorted((folder / "queries").iterdir())
            queries = [
                Query(path.name, path.read_bytes(), probabilities)
                for path, probabilities in zip(paths, expected, strict=True)
            ]
            path = f"/v1/tasks/{_create_task(server, folder / 'support')}/classify"
            task = _Task(server, path, queries, load.clients)
            return _measure(load, task, python, folder, progress, stop)


def _create_task(server: Server, support: Path) -> str:
    """Create a task with the files ``LABEL/*`` as examples; return its id."""
    task: str = server.post("/v1/tasks", b'{"name": "benchmark"}', "application/json")["id"]
    for folder in sorted(support.iterdir()):
        files = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
        server.post(f"/v1/tasks/{task}/examples", form_body({"label": folder.name}, files), FORM)
    return task


def _measure(
    load: Load,
    task: _Task,
    python: Worker,
    folder: Path,
    progress: Progress,
    stop: StopRequest | None,
) -> dict[str, Any]:
    warm_up, burst, paced, rest = load.parts()
    task.send(warm_up)
    memory = [task.memory()]
    progress.advance()
    batches = max(1, round(burst / load.images))
    arguments = {"model": load.model, "folder": folder, "times": batches}
    turns = python.prepare({"classifier": ("classify_files", arguments)})
    turns["classifier"]()  # warm up
    turns["server"] = lambda: task.send(burst).seconds
    images = {"classifier": batches * load.images, "server": burst}
    times = interleave(turns, load.pairs, progress=progress, stop=stop)
    rates = {name: [images[name] / seconds for seconds in times[name]] for name in times}
    half = quartiles(rates["server"]).median / 2
    latencies = _latencies(task.send(paced, half).latencies)
    progress.advance()
    task.send(rest)
    memory.append(task.memory())
    progress.advance()
    ratios = [a / b for a, b in zip(rates["server"], rates["classifier"], strict=True)]
    return {
        "quartiles": {"server_vs_classifier": asdict(quartiles(ratios))},
        "images_per_second": {name: asdict(quartiles(found)) for name, found in rates.items()},
        "half_load": latencies | {"requests_per_second": half},
        "memory": memory,
        "answers": {
            **{name: sum(getattr(one, name) for one in task.answers) for name in COUNTS},
            "deviation": max(one.deviation for one in task.answers),
        },
        "workload": asdict(load),
    }


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


# ------------------------------------------------------------------------------- the result page


def measure_all(
    loads: Sequence[Load],
    folder: Path,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return the content of ``load.json``; holds the timing lock of ``folder`` meanwhile."""
    with JobStore(folder).timing_lock():
        machine = describe_machine(threads)
        models = [measure_load(load, threads, progress, stop) for load in loads]
    packages = [name for name in SPEED_PACKAGES if importlib.util.find_spec(name)]
    return {
        "models": models,
        "machine": machine | {"speed_packages": packages},
        "commit": measured_code()["commit"],
    }


def write_load(results: dict[str, Any], folder: Path) -> Path:
    """Write ``load.json`` and ``load.md``; return the page."""
    packages = ", ".join(results["machine"]["speed_packages"]) or "neither uvloop nor httptools"
    shared = "classifier, server and clients share the machine, over loopback"
    blocks: list[Block] = [
        Heading(1, "Load"),
        Text(
            "Written by `vsm bench --load --output benchmarks`; what each line means: "
            "[benchmarks](../docs/benchmarks.md#a-server-under-load)."
        ),
        describe_conditions(results, packages, shared),
    ]
    for result in results["models"]:
        title, columns, rows = table(result)
        name, _, rest = title.partition(": ")
        blocks += [Heading(2, name), Text(f"{rest}."), Table(columns, rows)]
    return write_page(results, blocks, folder / "load.md")


def table(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, columns and rows of the results of one model."""
    sizes, answers, half = result["workload"], result["answers"], result["half_load"]
    title = (
        f"{sizes['model']}: {sizes['requests']:,} requests of one image each by "
        f"{sizes['clients']} clients; {sizes['way']} classes of {sizes['shot']} examples"
    )
    first, last = result["memory"]
    growth = None if first is None else 100 * (last["megabytes"] / first["megabytes"] - 1)
    ratio = Quartiles(**result["quartiles"]["server_vs_classifier"])
    enough = "yes" if ratio.median >= LEAST_RATIO else "no"
    rows = [
        ["server ÷ classifier, images per second", ratio.describe(), f"≥ {LEAST_RATIO:.2f}", enough]
    ]
    for name, value, limit in (
        ("p99 ÷ median of the latency at half the load", half["p99_vs_p50"], MOST_LATENCY),
        ("growth of the server's memory, %", growth, MOST_GROWTH),
    ):
        reached = "yes" if value is not None and value < limit else "no"
        rows.append([name, _number(value, 2), f"< {limit:g}", reached])
    for name in ("wrong", "lost"):
        reached = "no" if answers[name] else "yes"
        rows.append([f"{name} answers", f"{answers[name]:,}", "0", reached])
    others = {
        "largest deviation of a probability": f"{answers['deviation']:.0e}",
        **{
            f"images per second, {who}": Quartiles(**rate).describe(1)
            for who, rate in result["images_per_second"].items()
        },
        "requests per second at half the load": _number(half["requests_per_second"], 1),
        "median latency at half the load, ms": _number(half["p50_milliseconds"], 1),
        "99th percentile of it, ms": _number(half["p99_milliseconds"], 1),
        **{
            f"memory after {one['requests']:,} requests, MB": _number(one["megabytes"], 1)
            for one in (first, last)
            if one is not None
        },
    }
    return title, COLUMNS, [*rows, *([name, value, "", ""] for name, value in others.items())]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
