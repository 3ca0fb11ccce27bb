"""``vsm reproduce``."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import CommandParser, JsonOption
from vsm.cli.output import print_json, print_table, require_extra, say
from vsm.errors import SettingsError
from vsm_lab.cli.running import (
    add_output_argument,
    add_running_arguments,
    chosen_launcher,
    require_success,
    run_jobs,
    show_plan,
)
from vsm_lab.paper.tables import BUDGETS, table, tables

if TYPE_CHECKING:
    from vsm_lab.paper.plan import Plan

OVERVIEWS = {
    "list": "Every table and figure of the paper, its rows, and what each needs.",
    "status": "Progress of everything that was asked for.",
    "report": "Write report.md and report.html of everything that was asked for.",
}
ALL = {"all": "Every table and figure."}


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the actions, and every table and figure as one of them."""
    actions = parser.add_subcommands(dest="action", required=True)
    shown = {one.name: one.purpose for one in tables().values()}
    for name, purpose in {**OVERVIEWS, **ALL, **shown}.items():
        action = CommandParser(description=purpose)
        if name != "list":
            add_output_argument(action, Path("runs/reproduce"))
        if name not in OVERVIEWS:
            _add_request_arguments(action)
        JsonOption.add_arguments(action)
        actions.add_subcommand(name, action, help=purpose)


def _add_request_arguments(parser: jsonargparse.ArgumentParser) -> None:
    purposes = "; ".join(f"{one.name}: {one.purpose}" for one in BUDGETS.values())
    parser.add_argument("--budget", type=str, default="smoke", help=purposes + ".")
    parser.add_argument("--seeds", type=int, default=3, help="Training runs of each cell.")
    parser.add_argument("--rows", type=str, nargs="+", default=[], help="Rows; unset: all.")
    parser.add_argument(
        "--data",
        type=str,
        nargs="+",
        default=[],
        help="Datasets; unset: the budget's (glyphs for smoke), else the paper's. Others than the "
        "paper's stand in for them.",
    )
    add_running_arguments(parser)


def start(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List, run, watch or report."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in {**OVERVIEWS, **ALL}:
        table(arguments[0])  # suggests a name if there is none like it
    parsed = parser.parse_args(arguments)
    chosen = parsed[parsed.action]
    if parsed.action in OVERVIEWS:
        {"list": _list, "status": _status, "report": _report}[parsed.action](chosen)
    else:
        _reproduce(list(tables()) if parsed.action in ALL else [parsed.action], chosen)


def _list(chosen: jsonargparse.Namespace) -> None:
    if chosen.json:
        print_json({"tables": [asdict(one) for one in tables().values()]})
        return
    rows = [
        [
            one.name,
            one.purpose,
            ", ".join(row.name for row in one.measured_rows),
            str(len(one.rows) - len(one.measured_rows)),
            ", ".join([*one.datasets, one.backbone]),
        ]
        for one in tables().values()
    ]
    columns = ["name", "what it shows", "rows measured here", "quoted", "needs"]
    print_table("tables and figures of the paper", columns, rows, words=True)


def _reproduce(names: Sequence[str], chosen: jsonargparse.Namespace) -> None:
    """Plan, run, and print the results."""
    from vsm.system.allocator import keep_allocations
    from vsm_lab.job_files import UNPREPARED, JobStore
    from vsm_lab.jobs import in_order
    from vsm_lab.paper.plan import Request, check_data, make_plan, remember

    keep_allocations()
    if chosen.rows and len(names) > 1:
        raise SettingsError("rows: they belong to one table; name it instead of all")
    data, rows = tuple(chosen.data), tuple(chosen.rows)
    plans = [make_plan(Request(name, chosen.budget, data, chosen.seeds, rows)) for name in names]
    unavailable = [
        f"{plan.table.name}, row {row}: {reason}"
        for plan in plans
        for row, reason in plan.unavailable.items()
    ]
    if not any(plan.cells for plan in plans):
        raise SettingsError(
            f"nothing to do under the budget {chosen.budget}: {'; '.join(unavailable)}"
        )
    store, launcher = JobStore(chosen.output), chosen_launcher(chosen)
    jobs = in_order(job for plan in plans for job in plan.jobs)
    if chosen.dry_run:
        checksums = {data: one for plan in plans for data, one in plan.request.checksums.items()}
        missing = [data for data, checksum in checksums.items() if checksum == UNPREPARED]
        unprepared = [f"{data} is not prepared; see `vsm data list`" for data in missing]
        remarks = {"unavailable": unavailable, "unprepared": unprepared}
        show_plan(jobs, store, remarks, chosen.json)
        return
    for plan in plans:
        check_data(plan)
    for plan in plans:
        remember(store, plan.request)
    for line in [] if chosen.json else unavailable:
        say(f"vsm reproduce: {line}", file=sys.stderr)
    outcome = run_jobs("reproduce", jobs, launcher, chosen.output, chosen.json)
    _print_results(plans, chosen, outcome.as_dict())
    require_success(outcome)


def _print_results(
    plans: "Sequence[Plan]", chosen: jsonargparse.Namespace, outcome: dict[str, Any]
) -> None:
    from vsm_lab.job_files import JobStore
    from vsm_lab.paper.report import collect, describe, difference_table, value_table

    found = [collect(plan, JobStore(chosen.output)) for plan in plans]
    if chosen.json:
        print_json({"tables": [results.as_dict() for results in found], "jobs": outcome})
        return
    for results in found:
        say(f"{results.plan.table.name}: {describe(results)}")
        for position, planned in enumerate(results.plan.columns):
            values = value_table(results, position)
            print_table(str(planned.column), values.columns, values.rows)
            if differences := difference_table(results, position):
                title = "paired differences; * if clear of zero over two or more seeds"
                print_table(title, differences.columns, differences.rows)
    say(f"With plots: vsm reproduce report --output {chosen.output}", file=sys.stderr)


def _status(chosen: jsonargparse.Namespace) -> None:
    from vsm_lab.job_files import JobStore
    from vsm_lab.paper.report import plans_in_order, status_of

    store = JobStore(chosen.output)
    found = [(plan, *status_of(plan, store)) for plan in plans_in_order(store)]
    if chosen.json:
        requests = [
            {**asdict(plan.request), "jobs": counts, "remarks": remarks}
            for plan, counts, remarks in found
        ]
        print_json({"requests": requests})
        return
    rows = [
        [
            plan.table.name,
            plan.budget.name,
            ", ".join(plan.datasets),
            str(plan.request.seeds),
            ", ".join(f"{count} {state}" for state, count in counts.items() if count),
        ]
        for plan, counts, _ in found
    ]
    columns = ["", "budget", "data", "seeds", "jobs"]
    print_table(f"asked for in {chosen.output}", columns, rows, words=True)
    for line in dict.fromkeys(line for _, _, remarks in found for line in remarks):
        say(line)


def _report(chosen: jsonargparse.Namespace) -> None:
    require_extra("the report", "plots")

    from vsm_lab.paper.report import write_report

    markdown, html = write_report(chosen.output)
    if chosen.json:
        print_json({"markdown": str(markdown), "html": str(html)})
    else:
        say(f"{markdown} and {html}")
