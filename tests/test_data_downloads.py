"""Downloads from a local server that drops connections, truncates and sends wrong bytes."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tiny import RecordedProgress
from vsm.data import catalog
from vsm.data.catalog import fetch
from vsm.data.published import CATALOG, PublicFile
from vsm.errors import DataError
from vsm.system.progress import NULL_PROGRESS

CONTENT = bytes(range(256)) * 4000  # 1 MB
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers the n-th request with the n-th scripted answer, and the last one ever after."""

    server: "Server"

    def do_GET(self) -> None:
        answer = self.server.script[min(self.server.asked, len(self.server.script) - 1)]
        self.server.asked += 1
        answer(self)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def head(self, status: int, length: int | None = None) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    script: list[Answer]
    asked: int

    def handle_error(self, *_: object) -> None:
        """Say nothing when a client hangs up."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in (
        ("TIMEOUT_SECONDS", 0.5),
        ("TRIES", 4),
        ("WAIT_SECONDS", 0.01),
        ("MAX_BYTES", 2 << 20),
    ):
        monkeypatch.setattr(catalog, name, value)
    running = Server(("127.0.0.1", 0), Handler)
    running.script, running.asked = [], 0
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def public(server: Server, md5: str = MD5) -> PublicFile:
    return PublicFile(f"http://127.0.0.1:{server.server_port}/some/file.zip", md5)


def get(server: Server, folder: Path) -> Path:
    return fetch(public(server), folder, NULL_PROGRESS)


def complete(request: Handler) -> None:
    request.head(200, len(CONTENT))
    request.wfile.write(CONTENT)


def cut(request: Handler) -> None:
    """Promise everything, send a third of it, and hang up."""
    request.head(200, len(CONTENT))
    request.wfile.write(CONTENT[: len(CONTENT) // 3])


def hang_up(request: Handler) -> None:
    request.connection.close()


def stall(request: Handler) -> None:
    request.head(200, len(CONTENT))
    request.wfile.write(CONTENT[:1000])
    request.wfile.flush()
    threading.Event().wait(1.0)


def lie(request: Handler) -> None:
    """Send other bytes of the right length."""
    request.head(200, len(CONTENT))
    request.wfile.write(bytes(len(CONTENT)))


def endless(request: Handler) -> None:
    request.head(200)
    for _ in range(100):
        request.wfile.write(bytes(1 << 20))


def unavailable(request: Handler) -> None:
    request.head(503, 0)


def unannounced(request: Handler) -> None:
    """Send everything, and do not say how much that is."""
    request.head(200)
    request.wfile.write(CONTENT)


def missing(request: Handler) -> None:
    request.head(404, 0)


def test_a_file_is_fetched_once_and_progress_is_shown(server: Server, tmp_path: Path) -> None:
    server.script = [complete]
    progress = RecordedProgress()
    path = fetch(public(server), tmp_path / "new", progress)
    assert path == tmp_path / "new" / "file.zip"
    assert path.read_bytes() == CONTENT
    assert progress.shown[-1] == ("downloading file.zip", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in progress.shown] == sorted(done for _, done, _ in progress.shown)
    assert get(server, tmp_path / "new") == path
    assert server.asked == 1


def test_a_length_that_is_not_known_is_not_shown(server: Server, tmp_path: Path) -> None:
    server.script = [unannounced]
    progress = RecordedProgress()
    assert fetch(public(server), tmp_path, progress).read_bytes() == CONTENT
    assert progress.shown[-1] == ("downloading file.zip", len(CONTENT), None)


def test_a_stored_file_with_other_contents_is_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip").write_bytes(b"x" * 5000)
    server.script = [complete]
    assert get(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("trouble", [hang_up, stall, unavailable, lie, cut])
def test_trouble_that_passes_is_survived(trouble: Answer, server: Server, tmp_path: Path) -> None:
    server.script = [trouble, complete]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.zip"]


def test_a_lying_server_is_given_up_and_nothing_of_it_stays(server: Server, tmp_path: Path) -> None:
    server.script = [lie]
    with pytest.raises(
        DataError, match=rf"failed 4 times \(.* with MD5 .*, expected {MD5}\).*--from"
    ):
        get(server, tmp_path)
    assert server.asked == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", [hang_up, unavailable, cut])
def test_tries_are_bounded(trouble: Answer, server: Server, tmp_path: Path) -> None:
    server.script = [trouble]
    with pytest.raises(DataError, match="failed 4 times"):
        get(server, tmp_path)
    assert server.asked == 4
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    server.script = [missing]
    with pytest.raises(
        DataError, match=r"file\.zip: the server answered 404 .*pass it with --from"
    ):
        get(server, tmp_path)
    assert server.asked == 1


def test_an_endless_answer_does_not_fill_the_disk(server: Server, tmp_path: Path) -> None:
    server.script = [endless]
    with pytest.raises(DataError, match="sent more than"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_server_at_all_is_reported(server: Server, tmp_path: Path) -> None:
    nobody = PublicFile("http://127.0.0.1:9/file.zip", MD5)
    with pytest.raises(DataError, match=r"failed 4 times .*connection lost"):
        fetch(nobody, tmp_path, NULL_PROGRESS)


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    server.script = [complete]
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write .*file\.zip.*VSM_DATA"):
        get(server, tmp_path / "folder")


def test_addresses_are_encrypted_and_names_are_plain() -> None:
    files = {file for entry in CATALOG.values() for file in entry.downloads}
    assert len(files) == 3
    for file in files:
        assert urlsplit(file.url).scheme == "https"
        assert "/" not in file.name
        assert len(file.md5) == 32
