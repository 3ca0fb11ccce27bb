"""A server that is started, asked a few things, and stopped, as one program."""

import http.client
import json
import os
import signal
import socket
import threading
import time

from faults.processes import as_json, command

SECONDS = 30.0


def serve_and_ask(*words: str) -> int:
    """Run ``vsm serve WORDS``; print what it answers, or let it say why it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    answers: dict[str, object] = {}
    asking = threading.Thread(target=_ask, args=(port, answers), daemon=True)
    asking.start()
    code = command("serve", "--port", str(port), *words)()
    if answers:
        as_json(answers)
        return 0
    return code


def _ask(port: int, answers: dict[str, object]) -> None:
    """Wait until the server listens, ask it, and stop it."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            ready, _ = _get(port, "/readyz")
        except OSError:
            time.sleep(0.02)
            continue
        answers["ready"] = ready
        for path in ("/v1/tasks", "/v1/memory", "/v1/model"):
            status, text = _get(port, path)
            answers[path] = json.loads(text) if status == 200 else status
        break
    os.kill(os.getpid(), signal.SIGTERM)


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()
