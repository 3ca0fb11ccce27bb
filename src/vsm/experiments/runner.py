"""Running jobs: what is done is skipped, what was begun goes on, what fails harms no other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vsm.experiments.jobs import Job
from vsm.experiments.launchers import Handle, Launcher
from vsm.experiments.store import JobStore
from vsm.system.interruption import Interrupted, StopRequest, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress

POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """How running jobs went.

    Attributes:
        skipped: jobs that were done before.
        done: jobs that were done now.
        failed: jobs that failed, and why.
        blocked: jobs that wait for one that failed.
    """

    skipped: list[Job] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)
    blocked: list[Job] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        failed = [{"job": job.title, "key": job.key, "error": why} for job, why in self.failed]
        return {
            "skipped": len(self.skipped),
            "done": len(self.done),
            "failed": failed,
            "blocked": len(self.blocked),
        }


def run_jobs(
    jobs: Sequence[Job],
    store: JobStore,
    launcher: Launcher,
    progress: Progress = NULL_PROGRESS,
) -> Outcome:
    """Run ``jobs``, which are in an order in which they can be done.

    Raises:
        Interrupted: when asked to stop, after everything that was running here has saved.
    """
    work = _Work(jobs, store, launcher, progress)
    with stop_request() as stop:
        try:
            while not stop and work.go_on():
                pass
        except Interrupted as interruption:  # a training in this process
            stop.signal_number = interruption.exit_code - 128
        work.stop_if_asked(stop)
    return work.outcome


class _Work:
    """What waits, what runs, and how the rest ended."""

    def __init__(
        self, jobs: Sequence[Job], store: JobStore, launcher: Launcher, progress: Progress
    ) -> None:
        self._store, self._launcher, self._progress = store, launcher, progress
        self.outcome = Outcome(skipped=[job for job in jobs if store.is_done(job)])
        self._finished = {job.key for job in self.outcome.skipped}
        self._lost: set[str] = set()
        self._waiting = [job for job in jobs if job.key not in self._finished]
        self._running: list[tuple[Job, Handle]] = []
        self._total, self._ended = len(self._waiting), 0
        if self._total:
            progress.start("jobs", self._total)

    def go_on(self) -> bool:
        """Begin one job if one can begin, else wait for one to end; return whether more is left."""
        self._collect()
        self._block()
        ready = next((job for job in self._waiting if self._can_begin(job)), None)
        if ready is not None and len(self._running) < self._launcher.capacity:
            self._waiting.remove(ready)
            self._running.append((ready, self._launcher.begin(ready)))
        elif self._running:
            time.sleep(POLL_SECONDS)
        return bool(self._waiting or self._running)

    def stop_if_asked(self, stop: StopRequest) -> None:
        """Stop all that runs and say how far it came, if there was a request."""
        if stop.signal_number is None:
            return
        for _, handle in self._running:
            handle.stop()
        count = len(self.outcome.done)
        raise Interrupted(
            stop.signal_number,
            f"stopped and saved after {count} job{'s' * (count != 1)}; the same command goes on",
        )

    def _can_begin(self, job: Job) -> bool:
        return all(before.is_given or before.key in self._finished for before in job.after)

    def _block(self) -> None:
        """Give up jobs that need one that was lost."""
        for job in list(self._waiting):
            if any(before.key in self._lost for before in job.after):
                self._waiting.remove(job)
                self._lost.add(job.key)
                self.outcome.blocked.append(job)

    def _collect(self) -> None:
        """Take in what has ended."""
        for job, handle in list(self._running):
            if not handle.finished():
                continue
            self._running.remove((job, handle))
            failure = None
            if self._store.is_done(job):
                self._finished.add(job.key)
                self.outcome.done.append(job)
            else:
                failure = self._store.failure(job) or handle.reason()
                self._lost.add(job.key)
                self.outcome.failed.append((job, failure))
            self._report(job, failure)

    def _report(self, job: Job, failure: str | None) -> None:
        self._ended += 1
        seconds = (self._store.result(job) or {}).get("seconds") if failure is None else None
        took = "" if seconds is None else f" in {seconds:.0f} s"
        how = f"done{took}" if failure is None else f"failed ({failure})"
        self._progress.message(f"[{self._ended}/{self._total}] {how}: {job.title}")
        self._progress.advance()
