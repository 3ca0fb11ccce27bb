"""What a plan of the paper's tables found, and how far it is."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

from vsm.evaluation.statistics import Estimate
from vsm_lab.jobs import run_settings
from vsm_lab.paper.plan import Plan
from vsm_lab.results import Cell, read_cell
from vsm_lab.store import STATES, JobStore


@dataclass(frozen=True)
class Quantity:
    """Something that is measured on every episode.

    Attributes:
        name: of its values, see :meth:`vsm_lab.results.Cell.values`.
        title: what a column is called; empty where the column's name says it all.
        factor: to the unit that is printed.
        compared: whether differences between rows mean anything.
    """

    name: str
    title: str
    factor: float = 1.0
    compared: bool = True


QUANTITIES: dict[str, tuple[Quantity, ...]] = {
    "evaluate": (Quantity("accuracy", "", factor=100.0),),
    "prototypes": (
        Quantity("ratio", "distance ÷ std"),
        Quantity("overlap", "overlap (%)", factor=100.0),
        Quantity("distance", "distance", compared=False),
        Quantity("std", "std", compared=False),
    ),
}


@dataclass(frozen=True)
class Difference:
    """A claim of a table, measured: row ``a`` minus row ``b`` in one column, over ``seeds``."""

    a: str
    b: str
    position: int
    quantity: Quantity
    seeds: int
    estimate: Estimate | None

    @property
    def is_clear(self) -> bool:
        """Whether its 95% interval excludes zero; one seed tells nothing of the next."""
        if self.estimate is None or self.seeds < 2:
            return False
        return abs(self.estimate.mean) > self.estimate.ci95


@dataclass(frozen=True)
class Results:
    """A plan and what was found of it.

    Attributes:
        plan: what was asked for.
        cells: by (row name, position of a planned column).
        failures: titles of failed jobs, and why.
    """

    plan: Plan
    cells: dict[tuple[str, int], Cell]
    failures: dict[str, str]

    @property
    def packages(self) -> list[str]:
        """Versions of this package that computed the results."""
        return list(dict.fromkeys(name for cell in self.cells.values() for name in cell.packages))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What was measured."""
        return QUANTITIES[self.plan.table.kind]

    def differences(self) -> list[Difference]:
        """Return every claim of the table whose two rows were asked for, column by column."""
        found = []
        for (a, b), position in product(self.plan.table.claims, range(len(self.plan.columns))):
            first, second = self.cells.get((a, position)), self.cells.get((b, position))
            if first is None or second is None:
                continue
            seeds = len(first.shared_seeds(second))
            found += [
                Difference(a, b, position, quantity, seeds, first.minus(second, quantity.name))
                for quantity in self.quantities
                if quantity.compared
            ]
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints: every cell and every claim; accuracies are fractions."""
        plan = self.plan
        columns = [vars(planned.column) for planned in plan.columns]
        return {
            "name": plan.table.name,
            "budget": plan.budget.name,
            "data": plan.datasets,
            "unavailable": dict(plan.unavailable),
            "cells": [
                {
                    "row": row,
                    "column": columns[position],
                    "seeds": list(cell.seeds),
                    "states": list(cell.states),
                    **{one.name: _plain(cell.estimate(one.name)) for one in self.quantities},
                }
                for (row, position), cell in self.cells.items()
            ],
            "differences": [
                {
                    "a": one.a,
                    "b": one.b,
                    "column": columns[one.position],
                    "quantity": one.quantity.name,
                    "difference": _plain(one.estimate),
                    "clear_of_zero": one.is_clear,
                }
                for one in self.differences()
            ],
        }


def _plain(found: Estimate | None) -> dict[str, float] | None:
    return vars(found) if found else None


def collect(plan: Plan, store: JobStore) -> Results:
    """Read what is done of ``plan``.

    Raises:
        RunError: if a result is half-written or damaged; says how to fix it.
    """
    seeds = range(plan.request.seeds)
    cells = {
        (row, position): read_cell(store, [plan.cells[row, position, s] for s in seeds], seeds)
        for row, position, seed in plan.cells
        if seed == 0
    }
    failed = [job for job in plan.jobs if store.state(job) == "failed"]
    return Results(plan, cells, {job.title: store.failure(job) or "" for job in failed})


def status_of(plan: Plan, store: JobStore) -> tuple[dict[str, int], list[str]]:
    """Return how many jobs of a plan are in each state, and a line on each that is unfinished."""
    states = [store.state(job) for job in plan.jobs]
    remarks = []
    for job, state in zip(plan.jobs, states, strict=True):
        line = f"{state}: {job.title}"
        if state == "failed":
            remarks.append(f"{line}: {store.failure(job)}")
        elif state in ("running", "interrupted") and job.kind == "train":
            remarks.append(f"{line}: step {store.progress(job)} of {run_settings(job).steps}")
        elif state in ("running", "interrupted", "damaged"):
            remarks.append(line)
    counted = Counter(states)
    return {state: counted[state] for state in STATES}, remarks
