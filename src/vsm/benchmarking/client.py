"""Many clients of a server, in one process that does little else; nothing here imports torch.

Requests are made beforehand and answers are read afterwards, so that what is measured is the
server: between two requests a client looks for the end of an answer and writes the next request.
"""

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vsm.benchmarking.calls import answer_calls

TOLERANCE = 1e-4  # of probabilities: batches of other sizes are rounded differently
Range = tuple[float, float]  # lowest and highest
PATIENCE_SECONDS = 40.0  # without any answer; the server's own limit is 30
BOUNDARY = "pictures-of-a-benchmark"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"


class Asked(NamedTuple):
    """A file that is asked, and the probabilities of every label as Python has them."""

    name: str
    content: bytes
    expected: Mapping[str, Range]


class Answered(NamedTuple):
    """What came of some requests.

    Attributes:
        requests: how many there were.
        seconds: from the first request to the last answer.
        latencies: of the requests that were answered, in seconds.
        wrong: answers that are not Python's.
        lost: requests that were refused, or without an answer.
        deviation: by how much a probability was beyond those of Python, at most.
        cpu_seconds: what asking cost this process.
    """

    requests: int
    seconds: float
    latencies: list[float]
    wrong: int
    lost: int
    deviation: float
    cpu_seconds: float


class Verdict(NamedTuple):
    """What an answer is worth, and how far its probability is beyond those of Python."""

    kind: Literal["right", "wrong", "lost"]
    deviation: float = 0.0


class Clients:
    """What :class:`vsm.benchmarking.processes.Process` asks for by name."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._requests: list[bytes] = []
        self._host, self._port = "", 0

    def begin(self, _: str, host: str, port: int, path: str, asked: Sequence[Asked]) -> None:
        """Prepare the requests."""
        self._host, self._port, self._asked = host, port, list(asked)
        self._requests = [
            request(f"{host}:{port}", path, form({}, [(one.name, one.content)])) for one in asked
        ]

    def burst(self, _: str, count: int, clients: int) -> Answered:
        """Ask so often; each client asks again as soon as it has an answer."""
        return asyncio.run(self._ask(count, clients, None))

    def paced(self, _: str, count: int, clients: int, per_second: float) -> Answered:
        """Ask so often at a fixed pace, whether there were answers or not.

        A latency begins when a request is due, even if all clients are still waiting then.
        """
        return asyncio.run(self._ask(count, clients, per_second))

    async def _ask(self, count: int, clients: int, per_second: float | None) -> Answered:
        asking = _Asking(self._requests, count)
        await asking.connect(self._host, self._port, clients)
        cpu = time.process_time()
        await asking.run(per_second)
        cpu = time.process_time() - cpu
        asking.close()
        answers = [asking.answers.get(number) for number in range(count)]
        verdicts = [
            judge(answer, self._asked[number % len(self._asked)])
            for number, answer in enumerate(answers)
        ]
        seconds = max(asking.ended.values(), default=0.0) - asking.begun
        return Answered(
            count,
            seconds,
            [asking.ended[number] - asking.due[number] for number in sorted(asking.ended)],
            sum(one.kind == "wrong" for one in verdicts),
            sum(one.kind == "lost" for one in verdicts),
            max(one.deviation for one in verdicts),
            cpu,
        )


def judge(answer: bytes | None, asked: Asked) -> Verdict:
    """Return whether an answer is right, wrong, or lost.

    Of labels that are equally probable for Python, either is right.
    """
    if answer is None or answer[9:12] != b"200":
        return Verdict("lost")
    try:
        [found] = json.loads(answer.partition(HEAD_END)[2])["answers"]
        low, high = asked.expected[found["label"]]
        deviation = float(max(low - found["probability"], found["probability"] - high, 0.0))
        is_best = high >= max(lowest for lowest, _ in asked.expected.values()) - TOLERANCE
        right = found["file"] == asked.name and is_best and deviation <= TOLERANCE
    except (KeyError, TypeError, ValueError):
        return Verdict("wrong")
    return Verdict("right" if right else "wrong", deviation)


def form(fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the body of a form with text fields, and files under the name ``files``."""
    begin = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    parts = [f'{begin}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    for name, content in files:
        head = f'{begin}files"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def request(host: str, path: str, body: bytes) -> bytes:
    """Return a request with a form, as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Asking:
    """Requests by number: those that wait for a client, when each was due, what was answered."""

    def __init__(self, requests: Sequence[bytes], count: int) -> None:
        self.requests, self.count = requests, count
        self.begun = 0.0
        self.due: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.answers: dict[int, bytes] = {}
        self._lost = 0
        self._waiting: deque[int] = deque()
        self._open: set[_Client] = set()
        self._idle: list[_Client] = []
        self._finished = asyncio.get_running_loop().create_future()

    async def connect(self, host: str, port: int, clients: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(clients):
            try:
                _, client = await loop.create_connection(lambda: _Client(self), host, port)
            except OSError:
                continue  # requests are lost only if there is none at all
            self._open.add(client)
            self._idle.append(client)

    async def run(self, per_second: float | None) -> None:
        """Ask everything; give up if nothing is answered any more."""
        self.begun = time.perf_counter()
        offering = asyncio.ensure_future(self._offer(per_second))
        seen = -1
        while self._open and not self._finished.done() and len(self.ended) > seen:
            seen = len(self.ended)
            await asyncio.wait([self._finished], timeout=PATIENCE_SECONDS)
        offering.cancel()

    def close(self) -> None:
        for client in self._open:
            client.transport.abort()

    async def _offer(self, per_second: float | None) -> None:
        for number in range(self.count):
            if per_second is not None:
                self.due[number] = self.begun + number / per_second
                await asyncio.sleep(self.due[number] - time.perf_counter())
            self._waiting.append(number)
            if self._idle:
                self.take_next(self._idle.pop())

    def take_next(self, client: "_Client") -> None:
        """Let a client ask the oldest request, or wait for one."""
        if not self._waiting:
            self._idle.append(client)
            return
        number = self._waiting.popleft()
        self.due.setdefault(number, time.perf_counter())
        client.ask(number, self.requests[number % len(self.requests)])

    def answered(self, client: "_Client", number: int, answer: bytes) -> None:
        self.ended[number] = time.perf_counter()
        self.answers[number] = answer
        self.take_next(client)
        self._check()

    def left(self, client: "_Client", number: int | None) -> None:
        """A connection is gone, and with it what was asked."""
        self._open.discard(client)
        if client in self._idle:
            self._idle.remove(client)
        self._lost += number is not None
        self._check()

    def _check(self) -> None:
        done = len(self.ended) + self._lost >= self.count
        if (done or not self._open) and not self._finished.done():
            self._finished.set_result(None)


class _Client(asyncio.Protocol):
    """A connection that is kept open, with at most one request under way."""

    transport: asyncio.Transport

    def __init__(self, asking: _Asking) -> None:
        self._asking = asking
        self._number: int | None = None
        self._buffer = b""
        self._end: int | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, number: int, content: bytes) -> None:
        self._number, self._buffer, self._end = number, b"", None
        self.transport.write(content)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._end is None:
            head = self._buffer.find(HEAD_END)
            if head < 0:
                return
            length = LENGTH.search(self._buffer, 0, head)
            self._end = head + len(HEAD_END) + (int(length[1]) if length else 0)
        if len(self._buffer) >= self._end and self._number is not None:
            number, self._number = self._number, None
            self._asking.answered(self, number, self._buffer)

    def connection_lost(self, _: Exception | None) -> None:
        self._asking.left(self, self._number)


def main() -> None:
    """Answer calls until standard input ends."""
    answer_calls(Clients())
