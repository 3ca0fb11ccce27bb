"""Files of experiments: one folder for each job, and the checksums of datasets.

``jobs/<key>/`` holds ``job.json`` (what it is), the run directory ``run`` of a training,
``result.json`` when it is done, and ``failure.json`` when it failed. A result is written last and
atomically: a job without a readable one is not done, and is taken up again.
"""

import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

from vsm import __version__
from vsm.data import open_dataset, prepared
from vsm.data.catalog import FOLDER_PREFIX
from vsm.data.folder import key as folder_key
from vsm.data.glyphs import GENERATOR_VERSION
from vsm.data.published import CATALOG
from vsm.errors import DataError, RunError, VsmError
from vsm.runs.directory import RunDirectory
from vsm.system.files import exclusive_lock, is_locked, read_json, write_json
from vsm_lab.jobs import Job

State = Literal["done", "running", "failed", "interrupted", "damaged", "waiting"]
STATES: tuple[State, ...] = get_args(State)
UNPREPARED = "not prepared"


class JobStore:
    """The folder of an experiment."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: Job) -> Path:
        """Return the folder of a job."""
        return self.root / "jobs" / job.key

    def run_folder(self, job: Job) -> Path:
        """Return the directory of a trained model: where a job writes it, or where it is given."""
        return Path(job.options["path"]) if job.is_given else self.folder(job) / "run"

    def result_file(self, job: Job) -> Path:
        """Return the file that holds the result of a finished job."""
        return self.folder(job) / "result.json"

    def failure_file(self, job: Job) -> Path:
        """Return the file that says why a job failed."""
        return self.folder(job) / "failure.json"

    def state(self, job: Job) -> State:
        """Return the state of a job."""
        if self.is_done(job):
            return "done"
        if self.result_file(job).is_file():
            return "damaged"
        if is_locked(self.folder(job)):
            return "running"
        if self.failure_file(job).is_file():
            return "failed"
        return "interrupted" if self.run_folder(job).is_dir() else "waiting"

    def is_done(self, job: Job) -> bool:
        """Whether a job has a readable result, or needs none."""
        return job.is_given or self._read_result(job) is not None

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return what a finished job wrote, or None if it is not done.

        Raises:
            RunError: if its result cannot be read; says how to fix it.
        """
        found = self._read_result(job)
        if found is None and self.result_file(job).is_file():
            raise RunError(
                f"{self.result_file(job)} is half-written or damaged ({job.title}); the command "
                "that asked for it does it again"
            )
        return found

    def outcome(self, job: Job) -> dict[str, Any]:
        """Return the outcome of a finished job."""
        found = self.result(job)
        if found is None:
            raise RunError(f"{job.title} is not done: {self.result_file(job)} is missing")
        outcome: dict[str, Any] = found["outcome"]
        return outcome

    def _read_result(self, job: Job) -> dict[str, Any] | None:
        try:
            found = read_json(self.result_file(job))
            complete = found["key"] == job.key and isinstance(found["outcome"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if complete else None

    def failure(self, job: Job) -> str | None:
        """Return why a job failed, in one line, if it did."""
        try:
            return str(read_json(self.failure_file(job))["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def progress(self, job: Job) -> int:
        """Return the last step that a training logged."""
        rows = RunDirectory(self.run_folder(job)).read_metrics()
        return int(rows[-1]["step"]) if rows else 0

    def describe(self, job: Job) -> Path:
        """Make the folder of a job with its description, and return it."""
        write_json(self.folder(job) / "job.json", job.as_dict(), indent=1)
        return self.folder(job)

    def begin(self, job: Job) -> None:
        """Describe a job and remove what an earlier attempt left."""
        self.failure_file(job).unlink(missing_ok=True)
        self.forget(job)
        self.describe(job)

    def forget(self, job: Job) -> None:
        """Remove the result of a job, so that it is done again."""
        self.result_file(job).unlink(missing_ok=True)

    def write_result(self, job: Job, outcome: dict[str, Any], seconds: float | None) -> None:
        """Record the outcome of a job, and how long it took unless it was resumed."""
        found = {"key": job.key, "title": job.title, "package": __version__}
        write_json(self.result_file(job), {**found, "seconds": seconds, "outcome": outcome})

    def write_failure(self, job: Job, error: Exception) -> None:
        """Record why a job failed."""
        line = str(error) if isinstance(error, VsmError) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        found = {"title": job.title, "error": " ".join(line.split()), "traceback": trace}
        write_json(self.failure_file(job), found, indent=1)

    def lock(self, job: Job) -> AbstractContextManager[None]:
        """Hold a job while the block runs; RunError if another process holds it."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        return exclusive_lock(folder, f"{job.title}: another process is working on {folder}")

    def timing_lock(self) -> AbstractContextManager[None]:
        """Keep other processes from timing for this folder; RunError if one does already."""
        return exclusive_lock(
            self.root / "jobs" / "timing",
            f"another process is timing for {self.root}, and processes that run side by side slow "
            "each other down; wait until it ends",
        )


def data_checksum(data: str, remembered: Mapping[str, str]) -> str:
    """Return the checksum of a dataset's pixels: now, or when it was last there.

    Raises:
        DataError: if there is no dataset of that name.
    """
    if data == "glyphs":
        return f"generator version {GENERATOR_VERSION}"
    if data.startswith(FOLDER_PREFIX):
        try:
            return folder_key(Path(data.removeprefix(FOLDER_PREFIX)))
        except DataError:
            return remembered.get(data, UNPREPARED)
    if prepared.is_prepared(data):
        return str(prepared.read_index(data)["sha256"])
    if data not in CATALOG:
        open_dataset(data)  # raises, and lists the names
    return remembered.get(data, UNPREPARED)
