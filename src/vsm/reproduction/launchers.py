"""Where jobs run: in this process, in processes of this machine, or as jobs of a scheduler."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, Protocol

from vsm.errors import RunError, SettingsError
from vsm.reproduction.execution import execute
from vsm.reproduction.jobs import Job
from vsm.reproduction.store import JobStore
from vsm.reproduction.worker import SubmittedWork
from vsm.settings import SlurmSettings
from vsm.system.launching import scheduler_parameters

LauncherName = Literal["none", "local", "slurm"]
LOG_NAME = "worker.log"


class Handle(Protocol):
    """A job that was begun."""

    def finished(self) -> bool:
        """Tell whether it has ended, well or not; its folder says which."""

    def reason(self) -> str:
        """Say what is known of its end, should its folder say nothing."""

    def stop(self) -> None:
        """Ask it to save and end, and wait until it has."""


class Launcher(Protocol):
    """Begins jobs; ``room`` of them can run at a time."""

    room: int

    def begin(self, job: Job) -> Handle:
        """Begin a job."""


class _Ended:
    """A job that ended before anyone could ask."""

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def finished(self) -> bool:
        """It has."""
        return True

    def reason(self) -> str:
        """Say why it could not be done."""
        return self._reason

    def stop(self) -> None:
        """There is nothing to stop."""


class InProcess:
    """One job after another, in this process."""

    room = 1

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, job: Job) -> Handle:
        """Do a job, whole."""
        try:
            execute(self._root, job)
        except RunError as error:
            return _Ended(str(error))
        return _Ended()


class _Process:
    """A job in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log

    def finished(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    def reason(self) -> str:
        """Return its exit code."""
        return f"its process ended with code {self._process.returncode}; see {self._log}"

    def stop(self) -> None:
        """Send SIGTERM, upon which training saves, and wait."""
        self._process.terminate()
        self._process.wait()


class Processes:
    """Several jobs at a time, each in a process of its own, which share the cores."""

    def __init__(self, root: Path, count: int) -> None:
        self._root = root
        self.room = count
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._threads = max(1, (cores or 1) // count)

    def begin(self, job: Job) -> Handle:
        """Start a process; Ctrl-C reaches it only through :meth:`_Process.stop`."""
        path = JobStore(self._root).describe(job) / LOG_NAME
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vsm.reproduction.worker", str(self._root), job.key],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                start_new_session=True,
            )
        return _Process(process, path)


class _Submitted:
    """A job of a scheduler."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def finished(self) -> bool:
        """Tell whether the scheduler says so."""
        return bool(self._job.done())

    def reason(self) -> str:
        """Return where the scheduler's log is."""
        return f"the submitted job {self._job.job_id} left no result; see {self._job.paths.stderr}"

    def stop(self) -> None:
        """Leave it: what was submitted goes on without this process."""


class Submitit:
    """Jobs submitted to SLURM or to this machine's background, ``room`` of them at a time."""

    def __init__(
        self, root: Path, cluster: Literal["local", "slurm"], room: int, slurm: SlurmSettings
    ) -> None:
        if slurm.processes > 1:
            raise SettingsError(
                f"slurm: a job of a reproduction is one process, got {slurm.processes}; run more "
                "jobs side by side with --jobs"
            )
        try:
            submitit = importlib.import_module("submitit")
        except ImportError:
            raise SettingsError(
                f"launcher: {cluster} needs submitit: "
                "pip install 'variational-semantic-memory[slurm]'"
            ) from None
        self.room = room
        self._root = root.resolve()
        self._slurm = slurm
        restarts = {f"{cluster}_max_num_timeout": slurm.restarts}
        try:
            self._executor = submitit.AutoExecutor(self._root / "submitted", cluster, **restarts)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(f"launcher: {error}") from error

    def begin(self, job: Job) -> Handle:
        """Submit a job."""
        JobStore(self._root).describe(job)
        parameters = scheduler_parameters(self._slurm, f"vsm-{job.kind}-{job.key}")
        self._executor.update_parameters(**parameters)
        return _Submitted(self._executor.submit(SubmittedWork(str(self._root), job.key)))


def make_launcher(root: Path, name: LauncherName, count: int, slurm: SlurmSettings) -> Launcher:
    """Return the launcher called ``name`` with room for ``count`` jobs."""
    if count < 1:
        raise SettingsError(f"jobs: must be at least 1, got {count}")
    if name == "none":
        return InProcess(root) if count == 1 else Processes(root, count)
    return Submitit(root, name, count, slurm)
