"""Downloads against a local server that drops connections, truncates and lies."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tiny import RecordedProgress
from vsm.data import downloads
from vsm.data.downloads import PublicFile, fetch
from vsm.data.published import CATALOG
from vsm.errors import DataError
from vsm.system.progress import NULL_PROGRESS

CONTENT = bytes(range(256)) * 4000  # 1 MB
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()

Answer = Callable[["Handler", int], None]  # (request, byte asked for)


class Handler(BaseHTTPRequestHandler):
    """Answers the n-th request with the n-th scripted answer, and the last one ever after."""

    server: "Server"

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        script = self.server.script
        answer = script[min(len(self.server.asked), len(script) - 1)]
        self.server.asked.append(start)
        answer(self, start)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    script: list[Answer]
    asked: list[int]

    def handle_error(self, *_: object) -> None:
        """Say nothing when a client hangs up."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(downloads, "TIMEOUT_SECONDS", 0.5)
    running = Server(("127.0.0.1", 0), Handler)
    running.script, running.asked = [], []
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def public(server: Server, md5: str = MD5) -> PublicFile:
    return PublicFile(f"http://127.0.0.1:{server.server_port}/some/file.zip", md5, 2 << 20)


def get(server: Server, folder: Path, tries: int = 4) -> Path:
    return fetch(public(server), folder, NULL_PROGRESS, tries=tries, wait_seconds=0.01)


def complete(request: Handler, start: int) -> None:
    """Ignore the range that was asked for."""
    request.head(200, Content_Length=str(len(CONTENT)))
    request.wfile.write(CONTENT)


def ranged(request: Handler, start: int) -> None:
    rest = CONTENT[start:]
    if not start:
        complete(request, start)
        return
    request.head(
        206,
        Content_Length=str(len(rest)),
        Content_Range=f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}",
    )
    request.wfile.write(rest)


def cut(request: Handler, start: int) -> None:
    """Promise everything, send a third of what is left, and hang up."""
    rest = CONTENT[start:]
    promised = {"Content_Length": str(len(rest))}
    if start:
        promised["Content_Range"] = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
    request.head(206 if start else 200, **promised)
    request.wfile.write(rest[: len(rest) // 3])


def hang_up(request: Handler, start: int) -> None:
    request.connection.close()


def stall(request: Handler, start: int) -> None:
    request.head(200, Content_Length=str(len(CONTENT)))
    request.wfile.write(CONTENT[:1000])
    request.wfile.flush()
    threading.Event().wait(1.0)


def lie(request: Handler, start: int) -> None:
    """Send other bytes of the right length."""
    request.head(200, Content_Length=str(len(CONTENT)))
    request.wfile.write(bytes(len(CONTENT)))


def lie_about_the_range(request: Handler, start: int) -> None:
    request.head(206, Content_Length="10", Content_Range=f"bytes 7-16/{len(CONTENT)}")
    request.wfile.write(CONTENT[7:17])


def endless(request: Handler, start: int) -> None:
    request.head(200)
    for _ in range(100):
        request.wfile.write(bytes(1 << 20))


def unavailable(request: Handler, start: int) -> None:
    request.head(503, Content_Length="0")


def unannounced(request: Handler, start: int) -> None:
    """Send everything, and do not say how much that is."""
    request.head(200)
    request.wfile.write(CONTENT)


def missing(request: Handler, start: int) -> None:
    request.head(404, Content_Length="0")


def exhausted(request: Handler, start: int) -> None:
    request.head(416, Content_Length="0")


def test_a_file_is_fetched_once_and_progress_is_shown(server: Server, tmp_path: Path) -> None:
    server.script = [ranged]
    progress = RecordedProgress()
    path = fetch(public(server), tmp_path, progress)
    assert path == tmp_path / "file.zip"
    assert path.read_bytes() == CONTENT
    assert progress.shown[-1] == ("downloading file.zip", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in progress.shown] == sorted(done for _, done, _ in progress.shown)
    assert get(server, tmp_path) == path
    assert len(server.asked) == 1


def test_a_length_that_is_not_known_is_not_shown(server: Server, tmp_path: Path) -> None:
    server.script = [unannounced]
    progress = RecordedProgress()
    assert fetch(public(server), tmp_path, progress).read_bytes() == CONTENT
    assert progress.shown[-1] == ("downloading file.zip", len(CONTENT), None)


def test_a_resumed_transfer_goes_on_counting(server: Server, tmp_path: Path) -> None:
    server.script = [cut, ranged]
    progress = RecordedProgress()
    fetch(public(server), tmp_path, progress, wait_seconds=0.01)
    third = len(CONTENT) // 3
    assert ("downloading file.zip", third, len(CONTENT)) in progress.shown
    assert progress.shown[-1] == ("downloading file.zip", len(CONTENT), len(CONTENT))


def test_a_dropped_transfer_is_resumed_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.script = [cut, cut, ranged]
    assert get(server, tmp_path).read_bytes() == CONTENT
    third = len(CONTENT) // 3
    assert server.asked == [0, third, third + (len(CONTENT) - third) // 3]
    assert [path.name for path in tmp_path.iterdir()] == ["file.zip"]


def test_a_later_call_resumes_what_an_earlier_one_left(server: Server, tmp_path: Path) -> None:
    server.script = [cut]
    with pytest.raises(DataError, match=r"failed 1 times .*connection closed after"):
        get(server, tmp_path, tries=1)
    server.script = [ranged]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == len(CONTENT) // 3


@pytest.mark.parametrize("trouble", [hang_up, stall, unavailable, lie, lie_about_the_range])
def test_trouble_that_passes_is_survived(trouble: Answer, server: Server, tmp_path: Path) -> None:
    server.script = [trouble, complete]
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_server_without_ranges_is_asked_for_everything(server: Server, tmp_path: Path) -> None:
    server.script = [cut, complete]
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_false_range_does_not_corrupt_the_file(server: Server, tmp_path: Path) -> None:
    server.script = [cut, lie_about_the_range, ranged]
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_complete_partial_file_is_recognized(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(CONTENT)
    server.script = [exhausted]
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_partial_file_with_wrong_content_is_begun_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(b"x" * 5000)
    server.script = [ranged]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [5000, 0]


def test_a_lying_server_is_given_up_and_nothing_of_it_stays(server: Server, tmp_path: Path) -> None:
    server.script = [lie]
    with pytest.raises(
        DataError, match=rf"failed 4 times \(its MD5 is .*, expected {MD5}\).*--from"
    ):
        get(server, tmp_path)
    assert len(server.asked) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", [hang_up, unavailable, cut])
def test_tries_are_bounded(trouble: Answer, server: Server, tmp_path: Path) -> None:
    server.script = [trouble]
    with pytest.raises(DataError, match="failed 3 times"):
        get(server, tmp_path, tries=3)
    assert len(server.asked) == 3
    assert not (tmp_path / "file.zip").exists()


def test_a_missing_file_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    server.script = [missing]
    with pytest.raises(DataError, match=r"file\.zip answered 404 .*pass it with --from"):
        get(server, tmp_path)
    assert len(server.asked) == 1


def test_an_endless_answer_does_not_fill_the_disk(server: Server, tmp_path: Path) -> None:
    server.script = [endless]
    with pytest.raises(DataError, match="sent more than"):
        get(server, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_no_server_at_all_is_reported(server: Server, tmp_path: Path) -> None:
    nobody = PublicFile("http://127.0.0.1:9/file.zip", MD5, 1 << 20)
    with pytest.raises(DataError, match=r"failed 2 times .*connection lost"):
        fetch(nobody, tmp_path, NULL_PROGRESS, tries=2, wait_seconds=0.01)


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    server.script = [complete]
    (tmp_path / "file.zip.part").mkdir()
    with pytest.raises(DataError, match=r"cannot write .*file\.zip\.part.*VSM_DATA"):
        get(server, tmp_path)


def test_addresses_are_encrypted_and_names_are_plain() -> None:
    files = {file for entry in CATALOG.values() for file in entry.downloads}
    assert len(files) == 3
    for file in files:
        assert urlsplit(file.url).scheme == "https"
        assert "/" not in file.name
        assert len(file.md5) == 32
