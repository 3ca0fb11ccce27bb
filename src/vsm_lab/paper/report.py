"""Results of the paper's tables and figures: values, differences, tables and the report."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from vsm.errors import DataError, RunError
from vsm.evaluation.intervals import Estimate
from vsm.system.files import write_text
from vsm_lab.cells import Cell, read_cell
from vsm_lab.document import Block, Heading, Table, Text, to_html, write_markdown
from vsm_lab.job_files import STATES, JobStore
from vsm_lab.jobs import run_settings
from vsm_lab.paper.plan import Plan, make_plan, requests
from vsm_lab.paper.tables import BUDGETS, PaperTable, Row, table, tables

TITLE = "Reproduction of the paper's tables and figures"
EXPLANATION = (
    "Accuracies in percent, with 95% intervals. Our mean and interval are over training seeds and "
    "test episodes, both as samples: all rows and all seeds see the same episodes. With one seed "
    "the interval is over episodes alone and says nothing about other seeds. A star marks a paired "
    "difference of two or more seeds whose interval excludes zero; one in twenty does so by "
    "chance. The paper's values stand as printed; – means that there is none."
)
ABSENT = "–"
MISSING = {
    "failed": "failed",
    "waiting": "not run yet",
    "running": "running",
    "interrupted": "unfinished",
    "damaged": "damaged",
}
"""What replaces a missing value: the first of these states that one of its seeds has."""


class Quantity(NamedTuple):
    """A value that is measured on every episode.

    Attributes:
        name: see :meth:`vsm_lab.cells.Cell.values`.
        title: of its column; empty where the column's name is enough.
        factor: to the unit that is printed.
        compared: whether differences between rows mean anything.
    """

    name: str
    title: str
    factor: float = 1.0
    compared: bool = True

    def show(self, found: Estimate, sign: str = "") -> str:
        """Return the value with its interval."""
        return f"{self.factor * found.mean:{sign}.2f} ± {self.factor * found.ci95:.2f}"


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
        """Whether its 95% interval excludes zero; one seed says nothing about the next."""
        if self.estimate is None or self.seeds < 2:
            return False
        return abs(self.estimate.mean) > self.estimate.ci95

    def __str__(self) -> str:
        if self.estimate is None:
            return ABSENT
        return self.quantity.show(self.estimate, "+") + (" *" if self.is_clear else "")


@dataclass(frozen=True)
class Results:
    """A plan and its results.

    Attributes:
        plan: what was asked for.
        cells: by (row name, position of a planned column).
        failures: titles of failed jobs, and why.
    """

    plan: Plan
    cells: dict[tuple[str, int], Cell]
    failures: dict[str, str]

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

        def plain(found: Estimate | None) -> dict[str, float] | None:
            return vars(found) if found else None

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
                    **{one.name: plain(cell.estimate(one.name)) for one in self.quantities},
                }
                for (row, position), cell in self.cells.items()
            ],
            "differences": [
                {
                    "a": one.a,
                    "b": one.b,
                    "column": columns[one.position],
                    "quantity": one.quantity.name,
                    "difference": plain(one.estimate),
                    "clear_of_zero": one.is_clear,
                }
                for one in self.differences()
            ],
        }


def collect(plan: Plan, store: JobStore) -> Results:
    """Read what is done of ``plan``; RunError if a result is half-written or damaged."""
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


def value_table(results: Results, only: int | None = None) -> Table:
    """Return one line per row: what was measured here, then what the paper prints.

    ``only`` is the position of the one planned column to show; unset: all, side by side.
    """
    shown = results.plan.table

    def ours(position: int, quantity: Quantity) -> list[str]:
        return [_value(results, row, position, quantity) for row in shown.rows]

    def paper(at: int) -> list[str]:
        return [_printed(row, at) or ABSENT for row in shown.rows]

    titles = [shown.name, *(row.title for row in shown.rows)]
    return _side_by_side(results, titles, results.quantities, ours, paper, only)


def difference_table(results: Results, only: int | None = None) -> Table | None:
    """Return one line per claim: its paired difference in each column, a star if clear of zero."""
    found = {(one.a, one.b, one.position, one.quantity): one for one in results.differences()}
    if not found:
        return None
    claims = list(dict.fromkeys((a, b) for a, b, _, _ in found))

    def ours(position: int, quantity: Quantity) -> list[str]:
        return [str(found[a, b, position, quantity]) for a, b in claims]

    def paper(at: int) -> list[str]:
        """Subtract printed values; the paper gives no paired interval."""
        row = results.plan.table.row
        pairs = [(_printed(row(a), at), _printed(row(b), at)) for a, b in claims]
        return [f"{_mean(a) - _mean(b):+.2f}" if a and b else ABSENT for a, b in pairs]

    titles = ["paired difference", *(f"{a} − {b}" for a, b in claims)]
    compared = [quantity for quantity in results.quantities if quantity.compared]
    return _side_by_side(results, titles, compared, ours, paper, only)


def _side_by_side(
    results: Results,
    titles: list[str],
    quantities: Sequence[Quantity],
    ours: Callable[[int, Quantity], list[str]],
    paper: Callable[[int], list[str]],
    only: int | None,
) -> Table:
    """Put the paper's columns beside each of ours; ``titles`` is the first column."""
    plan, columns = results.plan, [titles]
    has_numbers = any(row.cells for row in plan.table.rows)  # a figure has none
    for position, planned in enumerate(plan.columns):
        if only not in (None, position):
            continue
        for quantity in quantities:
            what = f"{planned.column}, {quantity.title}" if quantity.title else planned.column
            columns.append([f"{what}: ours ({plan.budget.name})", *ours(position, quantity)])
        if has_numbers:
            columns += [[f"{plan.table.columns[at]}: paper", *paper(at)] for at in planned.beside]
    heading, *lines = map(list, zip(*columns, strict=True))
    return Table(heading, lines)


def _value(results: Results, row: Row, position: int, quantity: Quantity) -> str:
    if row.name in results.plan.unavailable:
        return "not available"
    cell = results.cells.get((row.name, position))
    if cell is None:
        return ABSENT
    found = cell.estimate(quantity.name)
    if found is None:
        return next(word for state, word in MISSING.items() if state in cell.states)
    done, wanted = len(cell.seeds), len(cell.states)
    return quantity.show(found) + ("" if done == wanted else f" ({done} of {wanted} seeds)")


def _printed(row: Row, at: int) -> str | None:
    return row.cells[at] if row.cells else None


def _mean(printed: str) -> float:
    return float(printed.partition(" ± ")[0])


def write_report(root: Path) -> tuple[Path, Path]:
    """Write ``report.md``, ``report.html`` and ``figures/`` below ``root``; return both pages."""
    store = JobStore(root)
    plans = plans_in_order(store)
    if not plans:
        raise RunError(
            f"{root} holds no reproduction; begin one with `vsm reproduce table-1 --budget smoke`"
        )
    blocks: list[Block] = [Heading(1, TITLE), Text(EXPLANATION)]
    for name, of_table in groupby(plans, lambda plan: plan.table.name):
        blocks += _introduction(table(name))
        for plan in of_table:
            blocks += _section(collect(plan, store), store)
    markdown, html = root / "report.md", root / "report.html"
    write_markdown(markdown, blocks)
    write_text(html, to_html(TITLE, blocks))
    return markdown, html


def plans_in_order(store: JobStore) -> list[Plan]:
    """Return the plans of all requests in the paper's order, small budgets first."""
    names, sizes = list(tables()), list(BUDGETS)
    found = requests(store)
    found.sort(key=lambda one: (names.index(one.table), sizes.index(one.budget)))
    return list(map(make_plan, found))


def _introduction(shown: PaperTable) -> list[Block]:
    name = shown.name.capitalize().replace("-", " ")
    texts = filter(None, [f"The paper: “{shown.caption}”", shown.remark])
    return [Heading(2, f"{name}: {shown.purpose}"), *map(Text, texts)]


def _section(results: Results, store: JobStore) -> list[Block]:
    """Return one budget on one choice of data."""
    plan = results.plan
    shown = filter(None, [value_table(results), difference_table(results)])
    notes = [*plan.unavailable.items(), *results.failures.items()]
    return [
        Heading(3, f"{plan.budget.name} budget on {', '.join(plan.datasets)}"),
        Text(describe(results)),
        *shown,
        *_plots(results, store),
        *(Text(f"{what}: {why}.") for what, why in notes),
    ]


def describe(results: Results) -> str:
    """Return a sentence on how the figures of a section were measured."""
    plan, seeds = results.plan, results.plan.request.seeds
    parts = [
        f"Budget {plan.budget.name} ({plan.budget.purpose})",
        f"{seeds} training seed{'s' * (seeds != 1)}, {plan.budget.episodes} test episodes with "
        f"{plan.budget.queries} queries per class",
    ]
    if stand_ins := dict.fromkeys(one.column.data for one in plan.columns if one.stands_in):
        parts.append(
            f"{', '.join(stand_ins)} stands in for the paper's data, so our columns and the "
            "paper's are of different images"
        )
    if narrow := plan.budget.narrow(plan.table.backbone):
        parts.append(f"a narrow network: {narrow}")
    packages = dict.fromkeys(name for cell in results.cells.values() for name in cell.packages)
    if packages:
        parts.append(f"computed by version {', '.join(packages)}")
    return "; ".join(parts) + "."


def _plots(results: Results, store: JobStore) -> Sequence[Block]:
    from vsm_lab.paper.figures import plots  # noqa: PLC0415 - it imports this module

    try:
        return plots(results, store)
    except DataError as error:
        return [Text(f"No plot of the prototypes: {error}.")]
