"""What a plan found: values by seed and episode, their means, and paired differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vsm.evaluation.statistics import Estimate, crossed_estimate
from vsm.reproduction.catalog import Row
from vsm.reproduction.jobs import Job
from vsm.reproduction.plan import Plan
from vsm.reproduction.store import JobStore, State


@dataclass(frozen=True)
class Quantity:
    """Something that is measured on every episode.

    Attributes:
        name: key of its values.
        title: what a column is called; empty where the column's name says it all.
        factor: to the unit that is printed.
        compared: whether differences between rows mean anything.
    """

    name: str
    title: str
    factor: float = 1.0
    compared: bool = True


QUANTITIES: dict[str, tuple[Quantity, ...]] = {
    "accuracy": (Quantity("accuracy", "", factor=100.0),),
    "prototypes": (
        Quantity("ratio", "distance ÷ spread"),
        Quantity("overlap", "overlap (%)", factor=100.0),
        Quantity("distance", "distance", compared=False),
        Quantity("spread", "spread", compared=False),
    ),
}


@dataclass(frozen=True)
class Cell:
    """What is known of one row in one column.

    Attributes:
        states: how far each seed's measurement is, or the training it waits for.
        seeds: seeds that are done.
        values: of those seeds, by quantity ``[S, E]``.
    """

    states: tuple[State, ...]
    seeds: tuple[int, ...]
    values: dict[str, Tensor]

    def estimate(self, quantity: str) -> Estimate | None:
        """Return the mean over seeds and episodes, if any seed is done."""
        return crossed_estimate(self.values[quantity]) if self.seeds else None

    def shared_seeds(self, other: "Cell") -> list[int]:
        """Return the seeds that both have done."""
        return [seed for seed in self.seeds if seed in other.seeds]

    def minus(self, other: "Cell", quantity: str) -> Estimate | None:
        """Return the paired difference over the seeds that both have done, on equal episodes."""
        shared = self.shared_seeds(other)
        if not shared:
            return None
        mine = self.values[quantity][[self.seeds.index(seed) for seed in shared]]
        theirs = other.values[quantity][[other.seeds.index(seed) for seed in shared]]
        return crossed_estimate(mine - theirs)


@dataclass(frozen=True)
class Difference:
    """A claim of the exhibit, measured: row ``a`` minus row ``b`` in one column, over ``seeds``."""

    a: Row
    b: Row
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
        packages: versions of this package that computed the results.
    """

    plan: Plan
    cells: dict[tuple[str, int], Cell]
    failures: dict[str, str]
    packages: tuple[str, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What was measured."""
        return QUANTITIES[self.plan.exhibit.measure]

    def differences(self) -> list[Difference]:
        """Return every claim of the exhibit whose two rows were asked for, column by column."""
        exhibit = self.plan.exhibit
        compared = [quantity for quantity in self.quantities if quantity.compared]
        found = []
        for (a, b), position in product(exhibit.claims, range(len(self.plan.columns))):
            first, second = self.cells.get((a, position)), self.cells.get((b, position))
            if first is None or second is None:
                continue
            seeds = len(first.shared_seeds(second))
            rows = (exhibit.row(a), exhibit.row(b))
            found += [
                Difference(*rows, position, quantity, seeds, first.minus(second, quantity.name))
                for quantity in compared
            ]
        return found


def collect(plan: Plan, store: JobStore) -> Results:
    """Read what is done of ``plan``.

    Raises:
        RunError: if a result is half-written or damaged; says how to mend it.
    """
    names = dict.fromkeys((row, position) for row, position, _ in plan.cells)
    cells = {}
    packages: dict[str, None] = {}
    for row, position in names:
        jobs = [plan.cells[row, position, seed] for seed in range(plan.request.seeds)]
        found = [store.result(job) for job in jobs]
        packages |= dict.fromkeys(one["package"] for one in found if one)
        cells[row, position] = Cell(
            tuple(state_of_chain(store, job) for job in jobs),
            tuple(seed for seed, one in enumerate(found) if one),
            _stack([_values(one["outcome"]) for one in found if one]),
        )
    failed = [job for job in plan.jobs if store.state(job) == "failed"]
    failures = {job.title: store.failure(job) or "" for job in failed}
    return Results(plan, cells, failures, tuple(packages))


def state_of_chain(store: JobStore, job: Job) -> State:
    """Return how far a job is; one that waits is as far as the job it waits for."""
    state = store.state(job)
    if state != "waiting" or job.after is None:
        return state
    before = state_of_chain(store, job.after)
    return "waiting" if before == "done" else before


def _values(outcome: dict[str, Any]) -> dict[str, Tensor]:
    """Return the values ``[E]`` of one measurement."""
    if "correct" in outcome:
        correct = torch.tensor(outcome["correct"], dtype=torch.float64)
        return {"accuracy": correct / outcome["queries"]}
    values = {
        name: torch.tensor(outcome[name], dtype=torch.float64)
        for name in ("distance", "spread", "overlap")
    }
    return {**values, "ratio": values["distance"] / values["spread"]}


def _stack(measured: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    if not measured:
        return {}
    return {name: torch.stack([one[name] for one in measured]) for name in measured[0]}
