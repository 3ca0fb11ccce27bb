"""The load benchmark: every answer is compared, whatever is missing is counted, and it ends."""

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from vsm.cli import main
from vsm.errors import BenchmarkError
from vsm_lab.benchmarking import load, processes
from vsm_lab.benchmarking.load import Answers, Load, Query, send_requests
from vsm_lab.benchmarking.processes import Server, resident_bytes

TINY = ["--requests", "60", "--repeats", "2", "--images", "8", "--clients", "4", "--threads", "1"]
RIGHT = {"file": "a.png", "label": "bow", "probability": 0.75}
QUERY = Query("a.png", b"pixels", {"anchor": 0.25, "bow": 0.75})


def test_a_server_is_measured_beside_the_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", "--model", "glyphs-5w1s", *TINY, "--output", str(tmp_path), "--json"]
    assert main(["bench", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    [result] = printed["models"]
    assert result["answers"] == {"requests": 60, "wrong": 0, "lost": 0} | {
        "deviation": pytest.approx(0, abs=2e-5)
    }
    assert result["quartiles"]["server_vs_classifier"]["count"] == 2
    assert all(one["median"] > 0 for one in result["images_per_second"].values())
    half, rate = result["half_load"], result["images_per_second"]["server"]["median"]
    assert half["requests_per_second"] == pytest.approx(rate / 2)
    assert 0 < half["p50_milliseconds"] <= half["p99_milliseconds"]
    assert half["p99_vs_p50"] == pytest.approx(half["p99_milliseconds"] / half["p50_milliseconds"])
    if resident_bytes(os.getpid()) is not None:
        assert [one["requests"] for one in result["memory"]] == [6, 60]
    assert json.loads((tmp_path / "load.json").read_text(encoding="utf-8")) == printed
    page = (tmp_path / "load.md").read_text(encoding="utf-8")
    assert "| wrong answers | 0 | 0 | yes |" in page
    assert "≥ 0.70" in page
    assert str(Path.home()) not in page + json.dumps(printed)


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    if not (folder / "load.json").is_file():
        pytest.skip("the load was not measured yet")
    stored = json.loads((folder / "load.json").read_text(encoding="utf-8"))
    page = load.write_load(stored, tmp_path)
    assert page.read_bytes() == (folder / page.name).read_bytes()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "right"),
        ({"probability": 0.75 + 5e-5}, "right"),
        ({"probability": 0.75 + 3e-4}, "wrong"),
        ({"probability": 0.7}, "wrong"),
        ({"label": "anchor", "probability": 0.25}, "wrong"),
        ({"label": None, "probability": None}, "wrong"),
        ({"file": "b.png"}, "wrong"),
        ({"label": "drum"}, "wrong"),
    ],
)
def test_an_answer_is_right_only_if_it_is_that_of_python(change: Any, kind: str) -> None:
    body = json.dumps({"answers": [RIGHT | change]}).encode()
    assert checked((200, body)) == kind
    assert checked((429, body)) == "lost"
    assert checked((200, body[:-3])) == "wrong"
    assert checked(None) == "lost"


def checked(answer: tuple[int, bytes] | None) -> str:
    answers = Answers()
    answers.check(answer, QUERY)
    return "wrong" if answers.wrong else "lost" if answers.lost else "right"


@contextmanager
def pretending(answer: Callable[[int], bytes | None]) -> Iterator[int]:
    """Answer the n-th request with a body, one at a time, or hang up; yield the port."""
    numbers, turn = count(1), threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                if not line.endswith(b"--\r\n"):
                    continue
                with turn:
                    content = answer(next(numbers))
                if content is None:
                    return
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n"
                self.wfile.write(head.encode() + content)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as pretended:
        thread = threading.Thread(target=pretended.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield pretended.server_address[1]
        finally:
            pretended.shutdown()
            thread.join()


def ask(port: int, requests: int, pace: float | None = None) -> Answers:
    return send_requests(port, "/classify", [QUERY], requests, 3, pace)


def body(**change: Any) -> bytes:
    return json.dumps({"answers": [RIGHT | change]}).encode()


@pytest.mark.parametrize("pace", [None, 500.0])
def test_wrong_and_lost_answers_are_counted(pace: float | None) -> None:
    def answer(number: int) -> bytes | None:
        if number == 3:
            return None
        return body(probability=0.85) if number % 5 == 0 else body()

    with pretending(answer) as port:
        found = ask(port, 20, pace)
    assert (found.requests, found.wrong, found.lost) == (20, 4, 1)
    assert found.deviation == pytest.approx(0.1)
    assert len(found.latencies) == 19


def test_a_server_that_hangs_up_or_is_gone_loses_everything_at_once() -> None:
    with pretending(lambda _: None) as port:
        found = ask(port, 20)
        assert (found.lost, found.wrong, found.latencies) == (20, 0, [])
    assert ask(port, 20).lost == 20


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TIMEOUT_SECONDS", 0.1)
    with pretending(lambda number: body() if number == 1 else b"") as port:
        assert ask(port, 4).wrong == 3  # empty bodies are answers of no use
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which accepts and says nothing
        found = ask(silent.getsockname()[1], 5)
    assert (found.lost, found.wrong) == (5, 0)


def test_a_latency_begins_when_a_request_is_due() -> None:
    def answer(number: int) -> bytes:
        if number == 1:
            time.sleep(0.2)  # all others wait, as there is one thread
        return body()

    with pretending(answer) as port:
        found = ask(port, 10, 100.0)
    assert found.lost == found.wrong == 0
    assert max(found.latencies) > 0.15
    assert sum(one > 0.05 for one in found.latencies) >= 5


def test_requests_are_shared_among_the_parts() -> None:
    assert Load("photos-vsm").parts() == (1000, 600, 1000, 2000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", "--requests", "99"], "requests: must be at least 100, got 99"),
        (["--load", "--images", "0"], "images: must be at least 1, got 0"),
        (["--load", "--clients", "0"], "clients: must be at least 1, got 0"),
        (["--load", "--repeats", "0"], "repeats: must be at least 1, got 0"),
        (["--load", "--channels", "2"], "channels: has no meaning with --load"),
        (["--requests", "200"], "requests: has no meaning without --load"),
        (["--full", "--clients", "2"], "clients: has no meaning without --load"),
        (["--full", "--load"], "load: is measured by itself; give one of --full and --load"),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err == f"vsm bench: {message}\n"


def test_a_server_that_cannot_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SERVE", "raise SystemExit('vsm serve: model: unknown')")
    with pytest.raises(BenchmarkError, match="the server did not start: vsm serve: model: unknown"):
        Server("nothing", tmp_path)


STARTING = """
import sys, time
from pathlib import Path
from vsm_lab.benchmarking.processes import Server

print(Server("glyphs-5w1s", Path(sys.argv[1])).process_id, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        process = Path(f"/proc/{int(bench.stdout.readline())}")
        assert process.exists()
        bench.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while process.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
