"""Results and states as plain values, for ``--json`` and for ``vsm reproduce status``."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vsm.reproduction.jobs import run_settings
from vsm.reproduction.plan import Plan
from vsm.reproduction.results import Results
from vsm.reproduction.runner import Outcome
from vsm.reproduction.store import STATES, JobStore


def results_as_dict(results: Results) -> dict[str, Any]:
    """Return every cell and every claim; accuracies are fractions."""
    plan = results.plan
    return {
        "name": plan.exhibit.name,
        "budget": plan.budget.name,
        "data": list(plan.datasets),
        "unavailable": dict(plan.unavailable),
        "cells": [
            {
                "row": row,
                "column": vars(plan.columns[position].column),
                "seeds": list(cell.seeds),
                "states": list(cell.states),
                **{
                    quantity.name: vars(found) if found else None
                    for quantity in results.quantities
                    for found in [cell.estimate(quantity.name)]
                },
            }
            for (row, position), cell in results.cells.items()
        ],
        "differences": [
            {
                "a": one.a.name,
                "b": one.b.name,
                "column": vars(plan.columns[one.position].column),
                "quantity": one.quantity.name,
                "difference": vars(one.estimate) if one.estimate else None,
                "clear_of_zero": one.is_clear,
            }
            for one in results.differences()
        ],
    }


def outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return how running the jobs went."""
    return {
        "skipped": len(outcome.skipped),
        "done": len(outcome.done),
        "failed": [{"job": job.title, "key": job.key, "error": why} for job, why in outcome.failed],
        "blocked": len(outcome.blocked),
    }


@dataclass(frozen=True)
class PlanStatus:
    """How far a plan is.

    Attributes:
        plan: what was asked for.
        counts: jobs in each state.
        remarks: unfinished and failed jobs, one line each.
    """

    plan: Plan
    counts: dict[str, int]
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**self.plan.request.as_dict(), "jobs": self.counts, "remarks": list(self.remarks)}


def status_of(plan: Plan, store: JobStore) -> PlanStatus:
    """Look at the folder of every job of a plan."""
    states = {job.key: store.state(job) for job in plan.jobs}
    counted = Counter(states.values())
    remarks = []
    for job in plan.jobs:
        state = states[job.key]
        if state == "failed":
            remarks.append(f"failed: {job.title}: {store.failure(job)}")
        elif state in ("running", "interrupted") and job.kind == "train":
            steps = run_settings(job).steps
            remarks.append(f"{state}: {job.title}: step {store.progress(job)} of {steps}")
        elif state in ("running", "interrupted", "damaged"):
            remarks.append(f"{state}: {job.title}")
    return PlanStatus(plan, {state: counted[state] for state in STATES}, tuple(remarks))
