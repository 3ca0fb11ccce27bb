"""Doing one job, in this process: under its lock, from wherever it was left."""

import time
from pathlib import Path
from typing import Any

from vsm.errors import RunError
from vsm.evaluation.comparison import EpisodeProtocol, evaluate_run
from vsm.pretraining.loop import pretrain
from vsm.reproduction.jobs import Job, pretrain_settings, run_settings
from vsm.reproduction.separation import measure_separation
from vsm.reproduction.store import JobStore
from vsm.system.interruption import Interrupted
from vsm.training import train


class JobError(RunError):
    """A job failed; why is recorded in its folder."""


def execute(root: Path, job: Job) -> None:
    """Do ``job`` and record its result, or why it failed.

    Raises:
        JobError: if it failed.
        Interrupted: after saving, when the process was asked to stop.
    """
    store = JobStore(root)
    with store.lock(job):
        if store.is_done(job):
            return
        resumed = store.run_folder(job).is_dir()
        store.begin(job)
        started = time.monotonic()
        try:
            outcome = _WAYS[job.kind](store, job)
        except Interrupted:
            raise
        except Exception as error:
            store.write_failure(job, error)
            raise JobError(str(error)) from error
        store.write_result(job, outcome, None if resumed else time.monotonic() - started)


def _pretrain(store: JobStore, job: Job) -> dict[str, Any]:
    finished = pretrain(pretrain_settings(job), store.run_folder(job), resume=True)
    validations = [row for row in finished.read_metrics() if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["mean_accuracy"])
    return {"best_epoch": best["epoch"], "validation": best["validation"]}


def _train(store: JobStore, job: Job) -> dict[str, Any]:
    settings = run_settings(job)
    if job.after is not None:
        settings = run_settings(job, init=str(store.run_folder(job.after).resolve()))
    finished = train(settings, store.run_folder(job), resume=True)
    validations = [row for row in finished.read_metrics() if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["accuracy"])
    return {"best_step": best["step"], "validation": best["validation"]}


def protocol_of(job: Job) -> EpisodeProtocol:
    """Return the episodes of an ``evaluate`` job."""
    return EpisodeProtocol(**job.recipe["protocol"])


def _evaluate(store: JobStore, job: Job) -> dict[str, Any]:
    if job.after is None:
        raise ValueError("job: a measurement needs a training run")
    run, protocol = store.run_folder(job.after), protocol_of(job)
    if job.recipe["measure"] == "prototypes":
        found = measure_separation(run, protocol)
        return {name: values.tolist() for name, values in found._asdict().items()}
    measured = evaluate_run(run, protocol)
    correct = measured.evaluation.correct  # [E, B]
    summary = measured.as_dict()
    return {
        "correct": correct.sum(1).tolist(),
        "queries": correct.shape[1],
        **{name: summary[name] for name in ("accuracy", "ci95", "nll", "ece", "memory_slots")},
    }


_WAYS = {"pretrain": _pretrain, "train": _train, "evaluate": _evaluate}
