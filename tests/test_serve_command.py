"""``vsm serve``: what it refuses before it listens, and how it ends."""

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from classify_helpers import write_run
from launching_helpers import run
from serving import MODEL, drawing
from store_helpers import ENCODER, small_memory
from vsm.cli import main
from vsm.serve.server import open_socket
from vsm.stores import open_store


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(["serve", *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_an_open_server_without_a_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, "--host", "0.0.0.0")
    assert "host: everyone who reaches 0.0.0.0 could use and change this server" in told
    assert "--token-file, or --insecure" in told
    token = tmp_path / "token"
    token.write_text("short")
    assert "must hold at least 16 characters" in refusal(capsys, "--token-file", str(token))
    token.write_text("é" * 20)
    assert "not plain ASCII" in refusal(capsys, "--token-file", str(token))
    told = refusal(capsys, "--token-file", str(tmp_path / "none"), code=1)
    assert f"token_file: {tmp_path / 'none'}: No such file" in told
    assert "host: no.such.host.invalid is unknown" in refusal(
        capsys, "--host", "no.such.host.invalid"
    )


def test_what_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "limits.files: must be at least 1" in refusal(capsys, "--limits.files", "0")
    assert "limits.pixels: must be at most" in refusal(capsys, "--limits.pixels", "1000000000")
    assert "port: expected 0 to 65535" in refusal(capsys, "--model", MODEL, "--port", "70000")
    assert "no model of that name" in refusal(capsys, "--model", "nothing", "--port", "0")
    stranger = tmp_path / "stranger.sqlite"
    store = open_store(stranger)
    store.bind(ENCODER, small_memory())
    store.close()
    given = ["--model", MODEL, "--port", "0"]
    told = refusal(capsys, *given, "--store", str(stranger))
    assert "holds features of the encoder encoder of the tests" in told
    told = refusal(capsys, *given, "--store", "mysql://host/base")
    assert "store: expected a path or postgresql://" in told
    run_ = write_run(tmp_path / "kanerva", "kanerva")
    told = refusal(capsys, "--model", str(run_), "--port", "0", "--store", str(tmp_path / "k"))
    assert "do not stand for classes" in told


def test_a_taken_port_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refusal(capsys, "--model", MODEL, "--port", str(port), code=1)
    assert told == (
        f"vsm serve: 127.0.0.1:{port}: Address already in use; give another --port, or --port 0 "
        "for a free one\n"
    )


def test_simple_mistakes_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    script = (
        "import json, sys; from vsm.cli import main\n"
        "for words in json.loads(sys.argv[1]): main(['serve', *words])\n"
        "print('torch' in sys.modules)"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistakes = (
            (["--host", "0.0.0.0"], "host: everyone"),
            (["--token-file", str(token)], "token_file: "),
            (["--port", "70000"], "port: expected"),
            (["--port", str(taken.getsockname()[1])], "already in use"),
            (["--model", "nothing"], "no model of that name"),
            (["--model", str(tmp_path / "a" / "b")], "is not a run directory"),
        )
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps([words for words, _ in mistakes])],
            capture_output=True,
            text=True,
            check=False,
        )
    told = done.stderr.splitlines()
    assert len(told) == len(mistakes), told
    for line, (_, named) in zip(told, mistakes, strict=True):
        assert named in line
    assert done.stdout == "False\n"


def test_answers_are_sent_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listening:
        with socket.create_connection(listening.getsockname()):
            connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in ("fastapi", "psycopg") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    told = refusal(capsys, "--model", MODEL)
    assert "serve needs fastapi: pip install 'variational-semantic-memory[serve]'" in told
    assert main(["memory", "import", MODEL, "--store", "postgresql://host/base"]) == 2
    told = capsys.readouterr().err
    assert "PostgreSQL needs psycopg: pip install 'variational-semantic-memory[postgres]'" in told


def call(address: str, body: bytes | None = None, kind: str = "application/json") -> Any:
    request = urllib.request.Request(address, body, {"content-type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def form(label: str | None, content: bytes) -> bytes:
    fields = (
        b""
        if label is None
        else (
            b'--x\r\nContent-Disposition: form-data; name="label"\r\n\r\n'
            + label.encode()
            + b"\r\n"
        )
    )
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    return fields + head + content + b"\r\n--x--\r\n"


def test_sigterm_finishes_what_is_under_way_and_exits_with_zero(tmp_path: Path) -> None:
    words = ["--model", MODEL, "--port", "0", "--store", str(tmp_path / "store.sqlite")]
    slow = ["--limits.batch-milliseconds", "1500"]  # a request alone waits so long for others
    with run({}, "-m", "vsm", "serve", *words, *slow) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = line.split(", ")[0].removeprefix("vsm serve: ")
        assert address.startswith("http://127.0.0.1:"), line
        assert f"open {address} in a browser" in process.stderr.readline()
        multipart = "multipart/form-data; boundary=x"
        task = call(f"{address}/v1/tasks", b'{"name": "characters"}')["id"]
        examples = f"{address}/v1/tasks/{task}/examples"
        call(examples, form("anchor", drawing(0, 0)), multipart)
        answers: list[Any] = []

        def ask() -> None:
            asked = form(None, drawing(0, 1))
            answers.append(call(f"{address}/v1/tasks/{task}/classify", asked, multipart))

        asking = threading.Thread(target=ask)
        asking.start()
        while b"vsm_requests 1\n" not in _metrics(address):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        asking.join(30)
        assert answers[0]["answers"][0]["label"] == "anchor"
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
        with pytest.raises(urllib.error.URLError):
            call(f"{address}/healthz")
    store = open_store(tmp_path / "store.sqlite")
    assert store.task(task).classes == {"anchor": 1}
    store.close()


def _metrics(address: str) -> bytes:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        found: bytes = answer.read()
        return found
