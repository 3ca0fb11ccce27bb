"""``python -m faults``: run all cases, print a table, and say how to repeat defects."""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from faults.processes import import_everything
from faults.report import Summary
from faults.sandbox import Group, Outcome, Result, Sandbox

SLICE = (
    *("mutations/config of a run", "mutations/weights of a run", "mutations/memory of a run"),
    *("mutations/thresholds", "mutations/saved classifier", "mutations/index of prepared data"),
    *("mutations/images", "mutations/features, arrays", "mutations/settings"),
    *("kills/memory add", "sharing/memory add × memory show"),
)
SLICE_SHARE = 0.06
_SANDBOX: list[Sandbox] = []  # of this process
_GROUPS: list[Group] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if there is a defect or no time for all of them."""
    options = _parser().parse_args(arguments)
    import_everything()
    from faults import concurrency, environments, formats

    requests = [
        Group(
            *("requests", f"every endpoint, {kind}", 1),
            concurrency.run_tests("serving_fuzz", kind, "VSM_FUZZ", 40, 18),
        )
        for kind in ("sqlite", "postgresql")
    ]
    known = [*formats.groups(), *concurrency.groups(), *environments.groups(), *requests]
    if options.slice:
        options.only, options.share, options.jobs = SLICE, SLICE_SHARE, 1
    only = options.only or [one.part for one in known]
    groups = [one for one in known if one.part in only or f"{one.part}/{one.name}" in only]
    if not groups:
        names = ", ".join(f"{one.part}/{one.name}" for one in known)
        print(f"faults: --only matches nothing; known: {names}", file=sys.stderr)
        return 2
    if options.case is not None:
        numbers = [range(options.case, options.case + 1)] * len(groups)
    else:
        numbers = [range(max(1, round(one.cases * options.share))) for one in groups]
    cases = [  # the first of every group first
        (group, number)
        for row in zip_longest(*numbers)
        for group, number in enumerate(row)
        if number is not None
    ]
    begin = time.monotonic()
    results = _run(groups, cases, options, begin)
    summary = Summary(results, len(cases), options.seed, time.monotonic() - begin)
    print(json.dumps(summary.as_dict(), indent=1) if options.json else summary.text())
    if options.output is not None:
        options.output.write_text(summary.page(), encoding="utf-8")
    return 1 if summary.defects or summary.left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="From which all cases are drawn.")
    parser.add_argument("--minutes", type=float, default=30.0, help="No case begins later.")
    parser.add_argument("--only", nargs="+", default=[], help="Parts, or PART/GROUP.")
    parser.add_argument("--case", type=int, help="This case alone, with --only PART/GROUP.")
    parser.add_argument("--share", type=float, default=1.0, help="Of the cases of every group.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases at a time.")
    parser.add_argument("--slice", action="store_true", help="About a minute, for the tests.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--output", type=Path, help="Write the page of the documentation.")
    return parser


def _run(
    groups: list[Group], cases: list[tuple[int, int]], options: argparse.Namespace, begin: float
) -> list[Result]:
    """Run cases in several processes and show the progress."""
    deadline, results = begin + 60 * options.minutes, []
    _GROUPS[:] = groups
    calls = [(*case, options.seed, deadline) for case in cases]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="vsm-faults-", ignore_cleanup_errors=True) as root:
        jobs = min(options.jobs, len(cases))
        with context.Pool(jobs, _prepare, (root, options.slice)) as pool:
            for done, result in enumerate(pool.imap_unordered(_run_case, calls), 1):
                results += [] if result is None else [result]
                if sys.stderr.isatty():
                    print(f"\r{done} of {len(calls)} cases", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    order = {(g.part, g.name): position for position, g in enumerate(groups)}
    return sorted(results, key=lambda one: (order[one.part, one.group], one.number))


def _prepare(root: str, quick: bool) -> None:
    sandbox = Sandbox(Path(root) / multiprocessing.current_process().name.rpartition("-")[2])
    sandbox.build(quick)
    _SANDBOX.append(sandbox)


def _run_case(call: tuple[int, int, int, float]) -> Result | None:
    position, number, seed, deadline = call
    if time.monotonic() > deadline:
        return None
    group = _GROUPS[position]
    try:
        return group.result(_SANDBOX[0], number, seed)
    except Exception as error:
        failed = Outcome("the harness itself", "other", (f"cannot run: {error!r:.300}",))
        return Result(group.part, group.name, number, failed)


if __name__ == "__main__":
    sys.exit(main())
