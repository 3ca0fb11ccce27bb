"""Results as tables: each measured value beside the paper's, and each claim as a difference."""

from collections.abc import Callable, Sequence

from vsm.evaluation.statistics import Estimate
from vsm_lab.document import Table
from vsm_lab.paper.catalog import PaperCell, Row
from vsm_lab.paper.results import Difference, Quantity, Results

ABSENT = "–"
WORDS = {
    "failed": "failed",
    "waiting": "not run yet",
    "running": "running",
    "interrupted": "unfinished",
    "damaged": "damaged",
}
"""What stands for a missing value: that of the first of these states that one of its seeds has."""


def value_table(results: Results, only: int | None = None) -> Table:
    """Return one line per row: what was measured here, then what the paper prints.

    A column holds one budget and one dataset; the paper's columns say of which data they are.

    Args:
        results: what was found.
        only: position of the one planned column to show; unset: all, side by side.
    """
    table = results.plan.table

    def ours(position: int, quantity: Quantity) -> list[str]:
        return [_value(results, row, position, quantity) for row in table.rows]

    def paper(at: int) -> list[str]:
        printed = [_printed(row, at) for row in table.rows]
        return [cell.text if cell else ABSENT for cell in printed]

    titles = [table.name, *(row.title for row in table.rows)]
    return _table(results, titles, results.quantities, ours, paper, only)


def difference_table(results: Results, only: int | None = None) -> Table | None:
    """Return one line per claim: its paired difference in each column, a star if clear of zero."""
    found = {(one.a, one.b, one.position, one.quantity): one for one in results.differences()}
    if not found:
        return None
    claims = list(dict.fromkeys((a, b) for a, b, _, _ in found))

    def ours(position: int, quantity: Quantity) -> list[str]:
        return [_difference(found[a, b, position, quantity]) for a, b in claims]

    def paper(at: int) -> list[str]:
        """Subtract printed values; the paper gives no paired interval."""
        row = results.plan.table.row
        pairs = [(_printed(row(a), at), _printed(row(b), at)) for a, b in claims]
        return [f"{a.value - b.value:+.2f}" if a and b else ABSENT for a, b in pairs]

    titles = ["paired difference", *(f"{a} − {b}" for a, b in claims)]
    compared = [quantity for quantity in results.quantities if quantity.compared]
    return _table(results, titles, compared, ours, paper, only)


def _table(
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
        return next(word for state, word in WORDS.items() if state in cell.states)
    done, wanted = len(cell.seeds), len(cell.states)
    seeds = "" if done == wanted else f" ({done} of {wanted} seeds)"
    return _plus_minus(found, quantity) + seeds


def _printed(row: Row, at: int) -> PaperCell | None:
    return row.cells[at] if row.cells else None


def _difference(difference: Difference) -> str:
    if difference.estimate is None:
        return ABSENT
    star = " *" if difference.is_clear else ""
    return _plus_minus(difference.estimate, difference.quantity, "+") + star


def _plus_minus(found: Estimate, quantity: Quantity, sign: str = "") -> str:
    mean, ci95 = quantity.factor * found.mean, quantity.factor * found.ci95
    return f"{mean:{sign}.2f} ± {ci95:.2f}"
