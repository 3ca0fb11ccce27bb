"""Results as tables: each measured value beside the paper's, and each claim as a difference."""

from collections.abc import Sequence

from vsm.evaluation.statistics import Estimate
from vsm.experiments.document import Table
from vsm.experiments.paper.catalog import Row
from vsm.experiments.paper.plan import PlannedColumn
from vsm.experiments.paper.results import Difference, Quantity, Results
from vsm.experiments.results import Cell

ABSENT = "–"
CLEAR = " *"
WORDS = {
    "waiting": "not run yet",
    "running": "running",
    "interrupted": "unfinished",
    "failed": "failed",
    "damaged": "damaged",
}


def value_table(results: Results, only: int | None = None) -> Table:
    """Return one line per row: what was measured here, then what the paper prints.

    A column holds one budget and one dataset; the paper's columns say of which data they are.

    Args:
        results: what was found.
        only: position of the one planned column to show; unset: all, side by side.
    """
    shown = results.plan.table
    columns = [shown.name, *_headings(results, results.quantities, only)]
    return Table(columns, [_value_line(results, row, only) for row in shown.rows])


def _value_line(results: Results, row: Row, only: int | None) -> list[str]:
    line = [row.title]
    for position, planned in _shown(results, only):
        cell = results.cells.get((row.name, position))
        line += [_ours(results, row, cell, quantity) for quantity in results.quantities]
        line += [_paper(row, at) for at in _beside(results, planned)]
    return line


def _headings(results: Results, quantities: Sequence[Quantity], only: int | None) -> list[str]:
    """Name the columns: of which data and budget ours are, and of which data the paper's."""
    plan = results.plan
    columns = []
    for _, planned in _shown(results, only):
        columns += [
            f"{planned.column}{_of(quantity)}: ours ({plan.budget.name})" for quantity in quantities
        ]
        columns += [f"{plan.table.columns[at]}: paper" for at in _beside(results, planned)]
    return columns


def _shown(results: Results, only: int | None) -> list[tuple[int, PlannedColumn]]:
    return [
        (position, planned)
        for position, planned in enumerate(results.plan.columns)
        if only in (None, position)
    ]


def _beside(results: Results, planned: PlannedColumn) -> tuple[int, ...]:
    """Return the paper's columns to show; a figure has no printed numbers."""
    has_numbers = any(row.cells for row in results.plan.table.rows)
    return planned.beside if has_numbers else ()


def _ours(results: Results, row: Row, cell: Cell | None, quantity: Quantity) -> str:
    if row.name in results.plan.unavailable:
        return "not available"
    if cell is None:
        return ABSENT
    found = cell.estimate(quantity.name)
    if found is None:
        worst = next(state for state in ("failed", *WORDS) if state in cell.states)
        return WORDS[worst]
    text = _plus_minus(found, quantity)
    done, wanted = len(cell.seeds), len(cell.states)
    return text if done == wanted else f"{text} ({done} of {wanted} seeds)"


def _paper(row: Row, at: int) -> str:
    cell = row.cells[at] if row.cells else None
    return cell.text if cell else ABSENT


def difference_table(results: Results, only: int | None = None) -> Table | None:
    """Return one line per claim: its paired difference in each column, a star if clear of zero."""
    table = results.plan.table
    found: dict[tuple[str, str], dict[tuple[int, str], Difference]] = {}
    for difference in results.differences():
        pair = found.setdefault((difference.a.name, difference.b.name), {})
        pair[difference.position, difference.quantity.name] = difference
    if not found:
        return None
    compared = [quantity for quantity in results.quantities if quantity.compared]
    lines = []
    for (a, b), by_place in found.items():
        line = [f"{a} − {b}"]
        for position, planned in _shown(results, only):
            line += [_difference(by_place[position, quantity.name]) for quantity in compared]
            line += [
                _paper_difference(table.row(a), table.row(b), at)
                for at in _beside(results, planned)
            ]
        lines.append(line)
    return Table(["paired difference", *_headings(results, compared, only)], lines)


def _difference(difference: Difference) -> str:
    if difference.estimate is None:
        return ABSENT
    star = CLEAR if difference.is_clear else ""
    return f"{_plus_minus(difference.estimate, difference.quantity, '+')}{star}"


def _paper_difference(a: Row, b: Row, at: int) -> str:
    """Return the difference of two printed values; the paper gives no paired interval."""
    cells = [row.cells[at] if row.cells else None for row in (a, b)]
    if cells[0] is None or cells[1] is None:
        return ABSENT
    return f"{cells[0].value - cells[1].value:+.2f}"


def _of(quantity: Quantity) -> str:
    return f", {quantity.title}" if quantity.title else ""


def _plus_minus(found: Estimate, quantity: Quantity, sign: str = "") -> str:
    mean, ci95 = quantity.factor * found.mean, quantity.factor * found.ci95
    return f"{mean:{sign}.2f} ± {ci95:.2f}"
