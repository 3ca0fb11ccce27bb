"""Running jobs: in this process, in processes of this machine, or through a scheduler.

``python -m vsm_lab.launchers ROOT KEY`` runs one job that is described in its folder. Exit codes:
0 done, 2 failed (the job's folder says why), 128 + signal when stopped after saving.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from vsm.cli.train import open_executor, scheduler_parameters
from vsm.errors import DocumentError, RunError, SettingsError
from vsm.settings import SlurmSettings
from vsm.system.allocator import keep_allocations
from vsm.system.files import read_object
from vsm.system.interruption import Interrupted, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.execution import execute
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import Job

LauncherName = Literal["none", "local", "slurm"]
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Handle:
    """A job that was begun.

    Attributes:
        finished: whether it has ended, well or not; its folder says which.
        reason: why it ended, in case its folder does not say.
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
        self._root, self.capacity = root, count
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._threads = max(1, (cores or 1) // count)

    def begin(self, job: Job) -> Handle:
        """Start a process; Ctrl-C reaches it only through the handle."""
        path = JobStore(self._root).describe(job) / "worker.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vsm_lab.launchers", str(self._root), job.key],
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

    Submitted jobs continue without this process, so their handles stop nothing.
    """

    def __init__(
        self, root: Path, cluster: Literal["local", "slurm"], capacity: int, slurm: SlurmSettings
    ) -> None:
        if slurm.processes > 1:
            raise SettingsError(
                f"slurm: a job of an experiment is one process, got {slurm.processes}; run more "
                "jobs side by side with --jobs"
            )
        self.capacity, self._root, self._slurm = capacity, root.resolve(), slurm
        self._executor = open_executor(self._root / "submitted", cluster, slurm.restarts)

    def begin(self, job: Job) -> Handle:
        """Submit a job."""
        JobStore(self._root).describe(job)
        name = f"vsm-{job.kind}-{job.key}"
        self._executor.update_parameters(**scheduler_parameters(self._slurm, name))
        submitted = self._executor.submit(SubmittedJob(str(self._root), job.key))

        def reason() -> str:
            where = submitted.paths.stderr
            return f"the submitted job {submitted.job_id} left no result; see {where}"

        return Handle(lambda: bool(submitted.done()), reason)


@dataclass(frozen=True)
class SubmittedJob:
    """A job in a scheduler's queue, which is queued again when its time is up."""

    root: str
    key: str

    def __call__(self) -> int:
        """Run it; if time is running out, ask for another turn after saving."""
        ask_again = signal.getsignal(signal.SIGUSR2)  # submitit's; training takes its place
        code = run_described_job(self.root, self.key)
        if code == 128 + signal.SIGUSR2 and callable(ask_again):
            ask_again(signal.SIGUSR2, None)
        return code

    def checkpoint(self) -> Any:
        """Return what submitit queues when time runs out: the same job."""
        return importlib.import_module("submitit.core.utils").DelayedSubmission(self)


def run_described_job(root: str, key: str) -> int:
    """Run the job that ``job.json`` in its folder describes, and return the exit code."""
    keep_allocations()
    try:
        job = Job.from_dict(read_object(Path(root) / "jobs" / key / "job.json"))
        execute(Path(root), job)
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except (RunError, DocumentError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def make_launcher(root: Path, name: LauncherName, count: int, slurm: SlurmSettings) -> Launcher:
    """Return the launcher called ``name`` for ``count`` jobs at a time."""
    if count < 1:
        raise SettingsError(f"jobs: must be at least 1, got {count}")
    if name == "none":
        return InProcess(root) if count == 1 else Processes(root, count)
    return Submitit(root, name, count, slurm)


@dataclass
class Outcome:
    """Jobs that were done before, done now, failed (and why), or wait for one that failed."""

    skipped: list[Job] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)
    blocked: list[Job] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        failed = [{"job": job.title, "key": job.key, "error": why} for job, why in self.failed]
        counts = {name: len(getattr(self, name)) for name in ("skipped", "done", "blocked")}
        return {**counts, "failed": failed}


def run_jobs(
    jobs: Sequence[Job], store: JobStore, launcher: Launcher, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Run ``jobs``, which are in an order in which they can be done.

    Finished jobs are skipped, interrupted ones continue, and a failure affects only the jobs that
    need its result.

    Raises:
        Interrupted: when asked to stop, after everything that was running here has saved.
    """
    outcome = Outcome(skipped=[job for job in jobs if store.is_done(job)])
    skipped = {job.key for job in outcome.skipped}
    waiting = [job for job in jobs if job.key not in skipped]
    running: list[tuple[Job, Handle]] = []
    total = len(waiting)
    if waiting:
        progress.start("jobs", total)
    with stop_request() as stop:
        try:
            while (waiting or running) and not stop:
                for job, handle in [one for one in running if one[1].finished()]:
                    running.remove((job, handle))
                    ending = _record(job, handle, store, outcome)
                    ended = len(outcome.done) + len(outcome.failed)
                    progress.message(f"[{ended}/{total}] {ending}: {job.title}")
                    progress.advance()
                ready = _next_job(waiting, outcome)
                if ready is not None and len(running) < launcher.capacity:
                    waiting.remove(ready)
                    running.append((ready, launcher.begin(ready)))
                elif running:
                    time.sleep(POLL_SECONDS)
        except Interrupted as interruption:  # a training in this process
            stop.signal_number = interruption.exit_code - 128
        if stop.signal_number is not None:
            for _, handle in running:
                handle.stop()
            count = len(outcome.done)
            raise Interrupted(
                stop.signal_number,
                f"stopped and saved after {count} job{'s' * (count != 1)}; "
                "the same command goes on",
            )
    return outcome


def _record(job: Job, handle: Handle, store: JobStore, outcome: Outcome) -> str:
    """Record how a job ended, and return it for people."""
    if store.is_done(job):
        outcome.done.append(job)
        seconds = (store.result(job) or {}).get("seconds")
        return "done" if seconds is None else f"done in {seconds:.0f} s"
    why = store.failure(job) or handle.reason()
    outcome.failed.append((job, why))
    return f"failed ({why})"


def _next_job(waiting: list[Job], outcome: Outcome) -> Job | None:
    """Return the first job whose needs are met, after moving those that never will be."""
    lost = {job.key for job, _ in outcome.failed} | {job.key for job in outcome.blocked}
    for job in list(waiting):
        if any(before.key in lost for before in job.after):
            waiting.remove(job)
            lost.add(job.key)
            outcome.blocked.append(job)
    done = {job.key for job in (*outcome.skipped, *outcome.done)}
    for job in waiting:
        if all(before.is_given or before.key in done for before in job.after):
            return job
    return None


if __name__ == "__main__":
    sys.exit(run_described_job(*sys.argv[1:]))
