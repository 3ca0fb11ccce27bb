"""What a reproduction leaves on disk: requests, and one folder a job.

``requests/`` holds what was asked for, so that ``status`` and ``report`` know what belongs in them.
``jobs/<key>/`` holds ``job.json`` (what it is), the run directory ``run`` of a training,
``result.json`` when it is done, and ``failure.json`` when it failed. A result is written last and
atomically: a job without a readable one is not done, and is taken up again.
"""

import hashlib
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from vsm import __version__
from vsm.errors import RunError, VsmError
from vsm.reproduction.jobs import Job
from vsm.reproduction.plan import Request
from vsm.system.files import write_text

State = Literal["done", "running", "failed", "interrupted", "damaged", "waiting"]
STATES: tuple[State, ...] = ("done", "running", "failed", "interrupted", "damaged", "waiting")


class JobStore:
    """The folder of a reproduction."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: Job) -> Path:
        """Return the folder of a job."""
        return self.root / "jobs" / job.key

    def run_folder(self, job: Job) -> Path:
        """Return the directory a training or pre-training writes."""
        return self.folder(job) / "run"

    def result_file(self, job: Job) -> Path:
        """Return the file that says that a job is done, and what came out."""
        return self.folder(job) / "result.json"

    def failure_file(self, job: Job) -> Path:
        """Return the file that says why a job failed."""
        return self.folder(job) / "failure.json"

    def state(self, job: Job) -> State:
        """Tell how far a job is."""
        if self.result_file(job).is_file():
            return "done" if self._read_result(job) is not None else "damaged"
        if self._is_locked(job):
            return "running"
        if self.failure_file(job).is_file():
            return "failed"
        return "interrupted" if self.run_folder(job).is_dir() else "waiting"

    def is_done(self, job: Job) -> bool:
        """Tell whether a job has a result that can be read."""
        return self._read_result(job) is not None

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return what a finished job found, or nothing if it is not done.

        Raises:
            RunError: if its result cannot be read; says how to mend it.
        """
        if not self.result_file(job).is_file():
            return None
        found = self._read_result(job)
        if found is None:
            raise RunError(
                f"{self.result_file(job)} is half-written or damaged ({job.title}); the command "
                "that asked for it does it again"
            )
        return found

    def _read_result(self, job: Job) -> dict[str, Any] | None:
        try:
            found = json.loads(self.result_file(job).read_text(encoding="utf-8"))
            whole = found["key"] == job.key and isinstance(found["outcome"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if whole else None

    def failure(self, job: Job) -> str | None:
        """Return why a job failed, in one line, if it did."""
        try:
            return str(json.loads(self.failure_file(job).read_text(encoding="utf-8"))["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def progress(self, job: Job) -> int:
        """Return the last step that a training logged."""
        log = self.run_folder(job) / "metrics.jsonl"
        if not log.is_file():
            return 0
        for line in reversed(log.read_text(encoding="utf-8").splitlines()):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
        return 0

    def describe(self, job: Job) -> Path:
        """Make the folder of a job, say in it what it is, and return it."""
        write_text(self.folder(job) / "job.json", _pretty(job.as_dict()))
        return self.folder(job)

    def begin(self, job: Job) -> None:
        """Make way for a new result."""
        self.failure_file(job).unlink(missing_ok=True)
        self.result_file(job).unlink(missing_ok=True)
        self.describe(job)

    def write_result(self, job: Job, outcome: dict[str, Any], seconds: float | None) -> None:
        """Say that a job is done, what came out, and how long it took unless it was resumed."""
        found = {
            "key": job.key,
            "title": job.title,
            "package": __version__,
            "seconds": seconds,
            "outcome": outcome,
        }
        write_text(self.result_file(job), json.dumps(found, ensure_ascii=False))

    def write_failure(self, job: Job, error: Exception) -> None:
        """Say why a job failed."""
        line = str(error) if isinstance(error, VsmError) else f"{type(error).__name__}: {error}"
        found = {
            "title": job.title,
            "error": " ".join(line.split()),
            "traceback": "".join(traceback.format_exception(error)),
        }
        write_text(self.failure_file(job), _pretty(found))

    @contextmanager
    def lock(self, job: Job) -> Iterator[None]:
        """Hold a job while the block runs, so that no other process works on it.

        Raises:
            RunError: if another process holds it.
        """
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w", encoding="utf-8") as file:
            if not _try_lock(file):
                raise RunError(f"{job.title}: another process is working on {folder}")
            yield

    def _is_locked(self, job: Job) -> bool:
        path = self.folder(job) / "lock"
        if not path.is_file():
            return False
        with path.open("r+", encoding="utf-8") as file:
            return not _try_lock(file)

    def remember(self, request: Request) -> Request:
        """Keep what was asked for, joined with what was asked before of the same columns."""
        path = self._request_file(request)
        if path.is_file():
            request = _read_request(path).joined(request)
        write_text(path, _pretty(request.as_dict()))
        return request

    def requests(self) -> list[Request]:
        """Return all that was asked for."""
        return [_read_request(path) for path in sorted((self.root / "requests").glob("*.json"))]

    def _request_file(self, request: Request) -> Path:
        columns = json.dumps([request.exhibit, request.budget, request.data])
        name = hashlib.sha256(columns.encode()).hexdigest()[:8]
        return self.root / "requests" / f"{request.exhibit}-{request.budget}-{name}.json"


def _read_request(path: Path) -> Request:
    try:
        return Request.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); delete it and ask for its table again: no job is lost"
        ) from error


def _pretty(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def _try_lock(file: Any) -> bool:
    """Lock an open file until it is closed; tell whether that worked. Without flock it does."""
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
