"""Where jobs run: in this process, in processes of this machine, or as jobs of a scheduler."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from vsm.errors import RunError, SettingsError
from vsm.settings import SlurmSettings
from vsm.system.launching import open_executor, scheduler_parameters
from vsm_lab.execution import execute
from vsm_lab.jobs import Job
from vsm_lab.store import JobStore
from vsm_lab.worker import SubmittedWork

LauncherName = Literal["none", "local", "slurm"]


@dataclass(frozen=True)
class Handle:
    """A job that was begun.

    Attributes:
        finished: returns whether it has ended, well or not; its folder says which.
        reason: returns what is known of its end, should its folder say nothing.
        stop: asks it to save and end, and waits until it has.
    """

    finished: Callable[[], bool] = lambda: True
    reason: Callable[[], str] = str
    stop: Callable[[], None] = lambda: None


class Launcher(Protocol):
    """Begins jobs; ``capacity`` of them can run at a time."""

    capacity: int

    def begin(self, job: Job) -> Handle:
        """Begin a job."""


class InProcess:
    """One job after another, in this process."""

    capacity = 1

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, job: Job) -> Handle:
        """Run a job to its end."""
        try:
            execute(self._root, job)
        except RunError as error:
            return Handle(reason=partial(str, error))
        return Handle()


class Processes:
    """Several jobs at a time, each in a process of its own, which share the cores."""

    def __init__(self, root: Path, count: int) -> None:
        self._root = root
        self.capacity = count
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._threads = max(1, (cores or 1) // count)

    def begin(self, job: Job) -> Handle:
        """Start a process; Ctrl-C reaches it only through the handle."""
        path = JobStore(self._root).describe(job) / "worker.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vsm_lab.worker", str(self._root), job.key],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                start_new_session=True,
            )

        def stop() -> None:
            process.terminate()  # upon which training saves
            process.wait()

        return Handle(
            lambda: process.poll() is not None,
            lambda: f"its process ended with code {process.returncode}; see {path}",
            stop,
        )


class Submitit:
    """Jobs submitted to SLURM or to this machine's background, ``capacity`` of them at a time.

    What was submitted goes on without this process, so its handles stop nothing.
    """

    def __init__(
        self, root: Path, cluster: Literal["local", "slurm"], capacity: int, slurm: SlurmSettings
    ) -> None:
        if slurm.processes > 1:
            raise SettingsError(
                f"slurm: a job of an experiment is one process, got {slurm.processes}; run more "
                "jobs side by side with --jobs"
            )
        self.capacity = capacity
        self._root = root.resolve()
        self._slurm = slurm
        self._executor = open_executor(self._root / "submitted", cluster, slurm.restarts)

    def begin(self, job: Job) -> Handle:
        """Submit a job."""
        JobStore(self._root).describe(job)
        name = f"vsm-{job.kind}-{job.key}"
        self._executor.update_parameters(**scheduler_parameters(self._slurm, name))
        submitted = self._executor.submit(SubmittedWork(str(self._root), job.key))

        def reason() -> str:
            where = submitted.paths.stderr
            return f"the submitted job {submitted.job_id} left no result; see {where}"

        return Handle(lambda: bool(submitted.done()), reason)


def make_launcher(root: Path, name: LauncherName, count: int, slurm: SlurmSettings) -> Launcher:
    """Return the launcher called ``name`` for ``count`` jobs at a time."""
    if count < 1:
        raise SettingsError(f"jobs: must be at least 1, got {count}")
    if name == "none":
        return InProcess(root) if count == 1 else Processes(root, count)
    return Submitit(root, name, count, slurm)
