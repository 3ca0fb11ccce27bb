"""From results of jobs to estimates: a cell is one row under one condition, over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vsm.evaluation.intervals import Estimate, class_bootstrap, crossed_estimate
from vsm.seeding import generator
from vsm_lab.job_files import JobStore, State
from vsm_lab.jobs import Job


@dataclass(frozen=True)
class Cell:
    """The results of one row under one condition.

    Attributes:
        states: of each seed's measurement, or of the training it waits for.
        seeds: the S seeds that are done.
        outcomes: of those seeds.
        packages: versions of this package that computed them.
    """

    states: tuple[State, ...]
    seeds: tuple[int, ...]
    outcomes: tuple[dict[str, Any], ...]
    packages: tuple[str, ...] = ()

    def values(self, quantity: str) -> Tensor:
        """Return a quantity by seed and episode ``[S, E]``."""
        if quantity == "ratio":
            return self.values("distance") / self.values("std")
        if quantity == "accuracy":
            queries: int = self.outcomes[0]["queries"]
            return self._column("correct") / queries
        return self._column(quantity)

    def _column(self, name: str) -> Tensor:
        return torch.tensor([one[name] for one in self.outcomes], dtype=torch.float64)

    @cached_property
    def confusions(self) -> Tensor:
        """Share of each class's queries that each class answered ``[S, E, N, N]``."""
        counts = self._column("confusions")
        per_class: float = self.outcomes[0]["queries"] / counts.shape[-1]
        return counts / per_class

    def estimate(self, quantity: str = "accuracy") -> Estimate | None:
        """Return the mean over seeds and episodes, if any seed is done."""
        return crossed_estimate(self.values(quantity)) if self.seeds else None

    def shared_seeds(self, other: "Cell") -> list[int]:
        """Return the seeds that both have done."""
        return [seed for seed in self.seeds if seed in other.seeds]

    def minus(self, other: "Cell", quantity: str = "accuracy") -> Estimate | None:
        """Return the paired difference over the seeds that both have done, on equal episodes."""
        shared = self.shared_seeds(other)
        if not shared:
            return None
        mine = self.values(quantity)[[self.seeds.index(seed) for seed in shared]]
        theirs = other.values(quantity)[[other.seeds.index(seed) for seed in shared]]
        return crossed_estimate(mine - theirs)


def read_cell(store: JobStore, jobs: Sequence[Job], seeds: Sequence[int]) -> Cell:
    """Read the measurements of one row under one condition, one job per seed."""
    found = [store.result(job) for job in jobs]
    done = [one for one in found if one]
    return Cell(
        tuple(state_of_chain(store, job) for job in jobs),
        tuple(seed for seed, one in zip(seeds, found, strict=True) if one),
        tuple(one["outcome"] for one in done),
        tuple(dict.fromkeys(one["package"] for one in done)),
    )


def state_of_chain(store: JobStore, job: Job) -> State:
    """Return the state of a job; one that waits has that of the job it waits for."""
    state = store.state(job)
    if state != "waiting":
        return state
    before = [state_of_chain(store, one) for one in job.after]
    return next((one for one in before if one != "done"), "waiting")


def class_interval(more: Tensor, class_ids: Tensor, seed: int) -> float | None:
    """Return the half-width of a difference's 95% interval over *classes*.

    ``more`` is the confusions of one row minus those of another ``[E, N, N]``, ``class_ids`` are
    ``[E, N]``, and ``seed`` resamples the same classes for all differences.
    """
    random = generator(seed, "class-bootstrap")
    return number(class_bootstrap(-more, class_ids, random).ci95)  # fewer errors are a gain


def interval(found: Estimate) -> dict[str, float | None]:
    """Return a mean and its interval as a result file has them."""
    return {"mean": found.mean, "ci95": number(found.ci95)}


def number(value: float) -> float | None:
    """Return None for NaN, which JSON cannot hold."""
    return None if math.isnan(value) else value
