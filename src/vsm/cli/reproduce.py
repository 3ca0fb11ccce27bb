"""``vsm reproduce``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonargparse

from vsm.cli.arguments import add_json_argument
from vsm.cli.launch import exit_when_stopped
from vsm.cli.output import console, print_json, print_table
from vsm.errors import RunError, SettingsError
from vsm.reproduction.budgets import BUDGETS, budget
from vsm.reproduction.catalog import Exhibit, exhibit, exhibits
from vsm.settings import SlurmSettings

if TYPE_CHECKING:
    from vsm.reproduction.jobs import Job
    from vsm.reproduction.plan import Plan
    from vsm.reproduction.runner import Outcome
    from vsm.reproduction.store import JobStore

OUTPUT = Path("runs/reproduce")
EVERYTHING = "all"
ACTIONS = {
    "list": "Every table and figure of the paper, its rows, and what each needs.",
    "status": "How far everything that was asked for is.",
    "report": "Write report.md and report.html of everything that was asked for.",
    EVERYTHING: "Every table and figure.",
}


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the actions, and every table and figure as one of them."""
    actions = parser.add_subcommands(dest="action", required=True)
    shown = {one.name: one.purpose for one in exhibits().values()}
    for name, purpose in {**ACTIONS, **shown}.items():
        action = jsonargparse.ArgumentParser(description=purpose)
        if name != "list":
            action.add_argument(
                "--output", type=Path, default=OUTPUT, help="Folder of jobs and reports."
            )
        if name not in ("list", "status", "report"):
            _add_request_arguments(action)
        add_json_argument(action)
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
    parser.add_argument("--jobs", type=int, default=1, help="Jobs to run side by side.")
    parser.add_argument(
        "--launcher",
        type=Literal["none", "local", "slurm"],
        default="none",
        help="Submit jobs through submitit: local for this machine's background, or slurm.",
    )
    parser.add_class_arguments(SlurmSettings, "slurm")
    parser.add_argument("--dry_run", action="store_true", help="Show the plan and do nothing.")


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List, run, watch or report."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in ACTIONS:
        exhibit(arguments[0])  # says which one was meant
    parsed = parser.parse_args(arguments)
    chosen = parsed[parsed.action]
    if parsed.action in ("list", "status", "report"):
        {"list": _list, "status": _status, "report": _report}[parsed.action](chosen)
    else:
        names = list(exhibits()) if parsed.action == EVERYTHING else [parsed.action]
        _reproduce(names, chosen)


def _list(chosen: jsonargparse.Namespace) -> None:
    if chosen.json:
        print_json({"exhibits": [_facts(one) for one in exhibits().values()]})
        return
    print_table(
        "tables and figures of the paper",
        ["name", "what it shows", "rows measured here", "quoted", "needs"],
        [
            [
                one.name,
                one.purpose,
                ", ".join(row.name for row in one.measured_rows),
                str(len(one.rows) - len(one.measured_rows)),
                ", ".join([*_datasets(one), one.backbone]),
            ]
            for one in exhibits().values()
        ],
        words=True,
    )


def _facts(shown: Exhibit) -> dict[str, Any]:
    """Return all that ``list --json`` prints of an exhibit."""
    return {
        "name": shown.name,
        "purpose": shown.purpose,
        "caption": shown.caption,
        "remark": shown.remark,
        "columns": [vars(column) for column in shown.columns],
        "rows": [
            {
                "name": row.name,
                "title": row.title,
                "measured": row.changes is not None,
                "in_paper": row.in_paper,
                "settings": dict(row.changes or {}),
                "paper": [cell.text if cell else None for cell in row.cells],
            }
            for row in shown.rows
        ],
        "needs": {"data": _datasets(shown), "backbone": shown.backbone},
        "budgets": [one.name for one in BUDGETS.values() if shown.backbone in one.channels],
    }


def _datasets(shown: Exhibit) -> list[str]:
    return list(dict.fromkeys(column.data for column in shown.columns))


def _reproduce(names: Sequence[str], chosen: jsonargparse.Namespace) -> None:
    """Plan, estimate, run, and print what came out."""
    from vsm.reproduction.costs import forecast
    from vsm.reproduction.jobs import in_order
    from vsm.reproduction.launchers import make_launcher
    from vsm.reproduction.plan import check_data
    from vsm.reproduction.runner import run_jobs
    from vsm.reproduction.store import JobStore
    from vsm.system.allocator import keep_allocations

    keep_allocations()
    plans = _plans(names, chosen)
    store = JobStore(chosen.output)
    slurm = SlurmSettings(**chosen.slurm.as_dict())
    launcher = make_launcher(chosen.output, chosen.launcher, chosen.jobs, slurm)
    jobs = in_order(job for plan in plans for job in plan.jobs)
    ahead = forecast(jobs, store).describe(chosen.jobs)
    if chosen.dry_run:
        _show_plan(plans, jobs, store, ahead, chosen.json)
        return
    for plan in plans:
        check_data(plan)
    for plan in plans:
        store.remember(plan.request)
    watcher = _Watcher(sum(not store.is_done(job) for job in jobs), quiet=chosen.json)
    watcher.say(f"{watcher.total} of {len(jobs)} jobs to do, {ahead}")
    for line in _unavailable(plans):
        watcher.say(line)
    with exit_when_stopped("reproduce"):
        outcome = run_jobs(jobs, store, launcher, watcher)
    _print_results(plans, store, outcome, chosen.json)
    if outcome.failed:
        job, why = outcome.failed[0]
        raise RunError(
            f"{len(outcome.failed)} failed and {len(outcome.blocked)} wait for them; the same "
            f"command tries again. First: {job.title}: {why}"
        )


def _plans(names: Sequence[str], chosen: jsonargparse.Namespace) -> "list[Plan]":
    """Return the plan of every exhibit, or say why there is nothing to do."""
    from vsm.reproduction.plan import Request, make_plan

    budget(chosen.budget)
    if chosen.rows and len(names) > 1:
        raise SettingsError("rows: they belong to one table; name it instead of all")
    data, rows = tuple(chosen.data), tuple(chosen.rows)
    plans = [make_plan(Request(name, chosen.budget, data, chosen.seeds, rows)) for name in names]
    if not any(plan.cells for plan in plans):
        raise SettingsError(
            f"nothing to do under the budget {chosen.budget}: {'; '.join(_unavailable(plans))}"
        )
    return [plan for plan in plans if plan.cells or len(plans) > 1]


def _unavailable(plans: "Sequence[Plan]") -> list[str]:
    return [
        f"{plan.exhibit.name}, row {row}: {reason}"
        for plan in plans
        for row, reason in plan.unavailable.items()
    ]


def _show_plan(
    plans: "Sequence[Plan]", jobs: "Sequence[Job]", store: "JobStore", ahead: str, as_json: bool
) -> None:
    """Print what would be done."""
    rows = [[job.key, store.state(job), job.title] for job in jobs]
    if as_json:
        listed = [dict(zip(("key", "state", "title"), row, strict=True)) for row in rows]
        print_json({"jobs": listed, "unavailable": _unavailable(plans), "estimate": ahead})
        return
    print_table("jobs", ["key", "state", "what"], rows, words=True)
    for line in [*_unavailable(plans), *_not_prepared(plans)]:
        print(line)
    waiting = sum(not store.is_done(job) for job in jobs)
    print(f"{waiting} of {len(jobs)} jobs to do, {ahead}; nothing was done")


def _not_prepared(plans: "Sequence[Plan]") -> list[str]:
    from vsm.reproduction.plan import UNPREPARED

    checksums = {data: found for plan in plans for data, found in plan.request.checksums.items()}
    missing = [data for data, checksum in checksums.items() if checksum == UNPREPARED]
    return [f"{data} is not prepared; see `vsm data list`" for data in missing]


class _Watcher:
    """Prints a line for every job that ends."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total = total
        self._quiet = quiet
        self._ended = 0

    def say(self, line: str) -> None:
        """Print a line, unless only JSON is wanted."""
        if not self._quiet:
            console().print(f"vsm reproduce: {line}", highlight=False, soft_wrap=True)

    def began(self, job: "Job") -> None:
        """Say nothing: the line comes when it ends."""

    def ended(self, job: "Job", failure: str | None) -> None:
        """Say how a job went."""
        self._ended += 1
        how = "done" if failure is None else f"failed ({failure})"
        self.say(f"[{self._ended}/{self.total}] {how}: {job.title}")


def _print_results(
    plans: "Sequence[Plan]", store: "JobStore", outcome: "Outcome", as_json: bool
) -> None:
    from vsm.reproduction.report import describe
    from vsm.reproduction.results import collect
    from vsm.reproduction.summary import outcome_as_dict, results_as_dict
    from vsm.reproduction.tables import difference_table, value_table

    found = [collect(plan, store) for plan in plans]
    if as_json:
        tables = [results_as_dict(results) for results in found]
        print_json({"exhibits": tables, "jobs": outcome_as_dict(outcome)})
        return
    for results in found:
        print(f"{results.plan.exhibit.name}: {describe(results)}")
        for position, planned in enumerate(results.plan.columns):
            table, differences = value_table(results, position), difference_table(results, position)
            print_table(str(planned.column), table.columns, table.rows)
            if differences is not None:
                title = "paired differences; * if clear of zero over two or more seeds"
                print_table(title, differences.columns, differences.rows)
    console().print(f"With pictures: vsm reproduce report --output {store.root}", highlight=False)


def _status(chosen: jsonargparse.Namespace) -> None:
    from vsm.reproduction.report import plans_in_order
    from vsm.reproduction.store import JobStore
    from vsm.reproduction.summary import status_of

    store = JobStore(chosen.output)
    found = [status_of(plan, store) for plan in plans_in_order(store)]
    if chosen.json:
        print_json({"requests": [status.as_dict() for status in found]})
        return
    print_table(
        f"asked for in {chosen.output}",
        ["", "budget", "data", "seeds", "jobs"],
        [
            [
                status.plan.exhibit.name,
                status.plan.budget.name,
                ", ".join(status.plan.datasets),
                str(status.plan.request.seeds),
                ", ".join(f"{count} {state}" for state, count in status.counts.items() if count),
            ]
            for status in found
        ],
        words=True,
    )
    for line in dict.fromkeys(line for status in found for line in status.remarks):
        print(line)


def _report(chosen: jsonargparse.Namespace) -> None:
    from vsm.reproduction.report import write_report

    written = write_report(chosen.output)
    if chosen.json:
        print_json({"markdown": str(written.markdown), "html": str(written.html)})
    else:
        print(f"{written.markdown} and {written.html}")
