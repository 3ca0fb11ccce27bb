"""``python -m faults``: run all cases, print a table, and say how to repeat defects."""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from pathlib import Path
from random import Random

from faults.oracles import Outcome
from faults.processes import import_everything
from faults.report import Result, describe, write
from faults.sandbox import Group, Sandbox

SLICE = (
    *("mutations/config of a run", "mutations/weights of a run", "mutations/memory of a run"),
    *("mutations/thresholds", "mutations/saved classifier", "mutations/index of prepared data"),
    *("mutations/images", "mutations/features, arrays", "mutations/settings"),
    *("kills/memory add", "sharing/memory add × memory show"),
)
SLICE_SHARE = 0.03  # of the cases
_SANDBOX: list[Sandbox] = []  # of this process
_GROUPS: list[Group] = []  # inherited by forked processes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if there is a defect or no time for all of them."""
    options = _parser().parse_args(arguments)
    import_everything()
    from faults import concurrency, environments, formats

    known = [*formats.groups(), *concurrency.groups(), *environments.groups()]
    only = SLICE if options.slice else options.only or [one.part for one in known]
    groups = [one for one in known if one.part in only or f"{one.part}/{one.name}" in only]
    if not groups:
        names = ", ".join(f"{one.part}/{one.name}" for one in known)
        print(f"faults: --only matches nothing; known: {names}", file=sys.stderr)
        return 2
    share = SLICE_SHARE if options.slice else 1.0
    numbers = [range(max(1, round(one.cases * share))) for one in groups]
    if options.case is not None:
        numbers = [range(options.case, options.case + 1)] * len(groups)
    begin = time.monotonic()
    cases = [  # the first of every group first
        (place, number, options.seed, begin + 60 * options.minutes)
        for row in zip_longest(*numbers)
        for place, number in enumerate(row)
        if number is not None
    ]
    results = _run(groups, cases, 1 if options.slice else options.jobs, options.slice)
    text = describe(results, len(cases), options.seed, time.monotonic() - begin)
    print(text)
    if options.output is not None:
        write(text, options.output)
    return int(len(results) < len(cases) or any(one.outcome.defects for one in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="From which all cases are drawn.")
    parser.add_argument("--minutes", type=float, default=30.0, help="No case begins later.")
    parser.add_argument("--only", nargs="+", default=[], help="Parts, or PART/GROUP.")
    parser.add_argument("--case", type=int, help="This case alone, with --only PART/GROUP.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases at a time.")
    parser.add_argument("--slice", action="store_true", help="Half a minute, for the tests.")
    parser.add_argument("--output", type=Path, help="Page to write the results into.")
    return parser


def _run(
    groups: list[Group], cases: list[tuple[int, int, int, float]], jobs: int, quick: bool
) -> list[Result]:
    """Run cases in several processes and show the progress."""
    results: list[tuple[int, Result]] = []
    _GROUPS[:] = groups
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="vsm-faults-", ignore_cleanup_errors=True) as root,
        ProcessPoolExecutor(min(jobs, len(cases)), context, _prepare, (root, quick)) as pool,
    ):
        for done, result in enumerate(pool.map(_run_case, cases), 1):
            results += [] if result is None else [result]
            if sys.stderr.isatty():
                end = "\n" if done == len(cases) else ""
                print(f"\r{done} of {len(cases)} cases", end=end, file=sys.stderr, flush=True)
    return [one for _, one in sorted(results, key=lambda pair: pair[0])]


def _prepare(root: str, quick: bool) -> None:
    name = multiprocessing.current_process().name.rpartition("-")[2]
    _SANDBOX.append(Sandbox(Path(root) / name, quick))


def _run_case(case: tuple[int, int, int, float]) -> tuple[int, Result] | None:
    place, number, seed, deadline = case
    if time.monotonic() > deadline:
        return None
    group, [sandbox] = _GROUPS[place], _SANDBOX
    random = Random(f"{seed} {group.part} {group.name} {number}")
    try:
        sandbox.restore()
        outcome = group.run(sandbox, number, random)
    except Exception as error:
        outcome = Outcome("the harness itself", "other", (f"cannot run: {error!r:.300}",))
    return place, Result(group.part, group.name, number, outcome)


if __name__ == "__main__":
    sys.exit(main())
