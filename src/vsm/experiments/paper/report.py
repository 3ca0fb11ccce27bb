"""The report of the paper's tables and figures that were asked for, in Markdown and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vsm.errors import DataError, RunError
from vsm.experiments.document import Block, Heading, Text, to_html, write_markdown
from vsm.experiments.paper.budgets import BUDGETS
from vsm.experiments.paper.catalog import tables
from vsm.experiments.paper.plan import Plan, make_plan, requests
from vsm.experiments.paper.results import Results, collect
from vsm.experiments.paper.tables import difference_table, value_table
from vsm.experiments.store import JobStore
from vsm.system.files import write_text

TITLE = "Reproduction of the paper's tables and figures"
EXPLANATION = (
    "Accuracies in percent, with 95% intervals. Our mean and interval are over training seeds and "
    "test episodes, both as samples: all rows and all seeds see the same episodes. With one seed "
    "the interval is over episodes alone and says nothing of other seeds. A star marks a paired "
    "difference of two or more seeds whose interval excludes zero; one in twenty does so by "
    "chance. The paper's values stand as printed; – means that there is none."
)


@dataclass(frozen=True)
class WrittenReport:
    """Where a report is."""

    markdown: Path
    html: Path


def write_report(root: Path) -> WrittenReport:
    """Write ``report.md``, ``report.html`` and ``figures/`` below ``root``.

    Raises:
        RunError: if nothing was asked for yet, or a result is damaged.
    """
    store = JobStore(root)
    plans = plans_in_order(store)
    if not plans:
        raise RunError(
            f"{root} holds no reproduction; begin one with `vsm reproduce table-1 --budget smoke`"
        )
    blocks: list[Block] = [Heading(1, TITLE), Text(EXPLANATION)]
    shown = ""
    for plan in plans:
        if plan.table.name != shown:
            shown = plan.table.name
            blocks += _introduction(plan)
        blocks += _section(collect(plan, store), store)
    written = WrittenReport(root / "report.md", root / "report.html")
    write_markdown(written.markdown, blocks)
    write_text(written.html, to_html(TITLE, blocks))
    return written


def plans_in_order(store: JobStore) -> list[Plan]:
    """Return the plans of all requests in the paper's order, small budgets first."""
    names, sizes = list(tables()), list(BUDGETS)
    plans = [make_plan(request) for request in requests(store)]
    return sorted(
        plans, key=lambda plan: (names.index(plan.table.name), sizes.index(plan.budget.name))
    )


def _introduction(plan: Plan) -> list[Block]:
    table = plan.table
    kind, number = table.name.split("-")
    heading = Heading(2, f"{kind.capitalize()} {number}: {table.purpose}")
    caption = Text(f"The paper: “{table.caption}”")
    return [heading, caption, *([Text(table.remark)] if table.remark else [])]


def _section(results: Results, store: JobStore) -> list[Block]:
    """Return one budget on one choice of data."""
    plan = results.plan
    heading = Heading(3, f"{plan.budget.name} budget on {', '.join(plan.datasets)}")
    blocks: list[Block] = [heading, Text(describe(results)), value_table(results)]
    differences = difference_table(results)
    if differences is not None:
        blocks.append(differences)
    blocks += _pictures(results, store)
    notes = [*plan.unavailable.items(), *results.failures.items()]
    return [*blocks, *(Text(f"{what}: {why}.") for what, why in notes)]


def describe(results: Results) -> str:
    """Say what produced the figures of a section."""
    plan = results.plan
    seeds = plan.request.seeds
    parts = [
        f"Budget {plan.budget.name} ({plan.budget.purpose})",
        f"{seeds} training seed{'s' * (seeds != 1)}, {plan.budget.episodes} test episodes with "
        f"{plan.budget.queries} queries per class",
    ]
    stand_ins = dict.fromkeys(one.column.data for one in plan.columns if one.stands_in)
    if stand_ins:
        parts.append(
            f"{', '.join(stand_ins)} stands in for the paper's data, so our columns and the "
            "paper's are of different images"
        )
    narrow = plan.budget.narrow(plan.table.backbone)
    if narrow:
        parts.append(f"a narrow network: {narrow}")
    if results.packages:
        parts.append(f"computed by version {', '.join(results.packages)}")
    return "; ".join(parts) + "."


def _pictures(results: Results, store: JobStore) -> Sequence[Block]:
    try:
        from vsm.experiments.paper.pictures import pictures  # noqa: PLC0415 - matplotlib is an extra
    except ImportError:
        missing = "pictures need matplotlib: pip install 'variational-semantic-memory[plots]'"
        return [Text(f"No pictures here: {missing}.")]
    try:
        return pictures(results, store)
    except DataError as error:
        return [Text(f"No picture of the prototypes here: {error}.")]
