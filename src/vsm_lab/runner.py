"""Running jobs: what is done is skipped, what was begun goes on, what fails harms no other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vsm.system.interruption import Interrupted, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.jobs import Job
from vsm_lab.launchers import Handle, Launcher
from vsm_lab.store import JobStore

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
    jobs: Sequence[Job], store: JobStore, launcher: Launcher, progress: Progress = NULL_PROGRESS
) -> Outcome:
    """Run ``jobs``, which are in an order in which they can be done.

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
                    ending = _collect(job, handle, store, outcome)
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


def _collect(job: Job, handle: Handle, store: JobStore, outcome: Outcome) -> str:
    """Record how a job ended, and return it for people."""
    if store.is_done(job):
        outcome.done.append(job)
        seconds = (store.result(job) or {}).get("seconds")
        return "done" if seconds is None else f"done in {seconds:.0f} s"
    why = store.failure(job) or handle.reason()
    outcome.failed.append((job, why))
    return f"failed ({why})"


def _next_job(waiting: list[Job], outcome: Outcome) -> Job | None:
    """Return the first job that has what it needs, once those that never will are blocked."""
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
