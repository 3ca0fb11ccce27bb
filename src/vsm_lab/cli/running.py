"""What ``reproduce``, ``study`` and ``bench`` share: how jobs run, and what is printed of them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse

from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.cli.train import LauncherOptions
from vsm.errors import RunError
from vsm.settings import SlurmSettings

if TYPE_CHECKING:
    from vsm_lab.job_files import JobStore
    from vsm_lab.jobs import Job
    from vsm_lab.launchers import Launcher, Outcome


def add_output_argument(parser: jsonargparse.ArgumentParser, default: Path) -> None:
    """Declare where jobs are kept."""
    parser.add_argument("--output", type=Path, default=default, help="Folder of jobs and reports.")


def add_running_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare where jobs run, and how many at a time."""
    parser.add_argument("--jobs", type=int, default=1, help="Jobs to run side by side.")
    LauncherOptions.add_arguments(parser)
    parser.add_argument("--dry_run", action="store_true", help="Show the plan and compute nothing.")


def chosen_launcher(chosen: jsonargparse.Namespace) -> "Launcher":
    """Return what the arguments of :func:`add_running_arguments` ask for."""
    from vsm_lab.launchers import make_launcher

    slurm = SlurmSettings(**chosen.slurm.as_dict())
    return make_launcher(chosen.output, chosen.launcher, chosen.jobs, slurm)


def run_jobs(
    command: str, jobs: "Sequence[Job]", launcher: "Launcher", output: Path, quiet: bool
) -> "Outcome":
    """Run jobs, and print how each ended unless ``quiet``."""
    from vsm_lab import launchers
    from vsm_lab.job_files import JobStore

    store = JobStore(output)
    if not quiet:
        waiting = sum(not store.is_done(job) for job in jobs)
        say(f"vsm {command}: {waiting} of {len(jobs)} jobs to do", file=sys.stderr)
    with ProgressBar(quiet) as bar:
        return launchers.run_jobs(jobs, store, launcher, bar)


def require_success(outcome: "Outcome") -> None:
    """Raise if a job failed, naming the first."""
    if outcome.failed:
        job, why = outcome.failed[0]
        raise RunError(
            f"{len(outcome.failed)} failed and {len(outcome.blocked)} wait for them; the same "
            f"command tries again. First: {job.title}: {why}"
        )


def show_plan(
    jobs: "Sequence[Job]", store: "JobStore", remarks: dict[str, list[str]], as_json: bool
) -> None:
    """Print what would be done."""
    rows = [[job.key, store.state(job), job.title] for job in jobs]
    if as_json:
        listed = [dict(zip(("key", "state", "title"), row, strict=True)) for row in rows]
        print_json({"jobs": listed, **remarks})
        return
    print_table("jobs", ["key", "state", "what"], rows, words=True)
    for line in [line for lines in remarks.values() for line in lines]:
        say(line)
    waiting = sum(not store.is_done(job) for job in jobs)
    say(f"{waiting} of {len(jobs)} jobs to do; nothing was done")
