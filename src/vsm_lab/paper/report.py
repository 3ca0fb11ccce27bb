"""The report of the paper's tables and figures that were asked for, in Markdown and HTML."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from vsm.errors import DataError, RunError
from vsm.system.files import write_text
from vsm_lab.document import Block, Heading, Text, to_html, write_markdown
from vsm_lab.paper.budgets import BUDGETS
from vsm_lab.paper.catalog import PaperTable, table, tables
from vsm_lab.paper.plan import Plan, make_plan, requests
from vsm_lab.paper.results import Results, collect
from vsm_lab.paper.tables import difference_table, value_table
from vsm_lab.store import JobStore

TITLE = "Reproduction of the paper's tables and figures"
EXPLANATION = (
    "Accuracies in percent, with 95% intervals. Our mean and interval are over training seeds and "
    "test episodes, both as samples: all rows and all seeds see the same episodes. With one seed "
    "the interval is over episodes alone and says nothing of other seeds. A star marks a paired "
    "difference of two or more seeds whose interval excludes zero; one in twenty does so by "
    "chance. The paper's values stand as printed; – means that there is none."
)


def write_report(root: Path) -> tuple[Path, Path]:
    """Write ``report.md``, ``report.html`` and ``figures/`` below ``root``; return both pages.

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
    heading = Heading(3, f"{plan.budget.name} budget on {', '.join(plan.datasets)}")
    shown = filter(None, [value_table(results), difference_table(results)])
    notes = [*plan.unavailable.items(), *results.failures.items()]
    return [
        heading,
        Text(describe(results)),
        *shown,
        *_pictures(results, store),
        *(Text(f"{what}: {why}.") for what, why in notes),
    ]


def describe(results: Results) -> str:
    """Say what produced the figures of a section."""
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
    if results.packages:
        parts.append(f"computed by version {', '.join(results.packages)}")
    return "; ".join(parts) + "."


def _pictures(results: Results, store: JobStore) -> Sequence[Block]:
    try:
        from vsm_lab.paper.pictures import pictures  # noqa: PLC0415 - matplotlib is an extra
    except ImportError:
        hint = "pip install 'variational-semantic-memory[plots]'"
        return [Text(f"No pictures here: pictures need matplotlib: {hint}.")]
    try:
        return pictures(results, store)
    except DataError as error:
        return [Text(f"No picture of the prototypes here: {error}.")]
