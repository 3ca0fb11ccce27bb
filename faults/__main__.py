"""``python -m faults``: run the campaign, print a table, say how to repeat what was found."""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from faults import report
from faults.bench import Attempt, Bench, Group, Result
from faults.processes import import_everything

SLICE = (
    *("mutations/config of a run", "mutations/weights of a run", "mutations/memory of a run"),
    *("mutations/thresholds", "mutations/saved classifier", "mutations/index of prepared data"),
    *("mutations/pictures", "mutations/features, arrays", "mutations/settings"),
    *("kills/memory add", "sharing/memory add × memory show"),
)
SLICE_SHARE = 0.06
_BENCH: list[Bench] = []
_GROUPS: list[Group] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and return 1 if there is a defect, or if it could not be finished."""
    asked = _parser().parse_args(arguments)
    import_everything()
    from faults.parts import all_groups

    if asked.slice:
        asked.only, asked.share, asked.jobs = SLICE, SLICE_SHARE, 1
    groups = [one for one in all_groups() if _is_asked(one, asked.only)]
    if not groups:
        known = ", ".join(f"{one.part}/{one.name}" for one in all_groups())
        print(f"faults: --only names nothing; known: {known}", file=sys.stderr)
        return 2
    numbers = [
        [asked.case] if asked.case is not None else range(max(1, round(one.cases * asked.share)))
        for one in groups
    ]
    begin = time.monotonic()
    cases = list(_dealt(numbers))
    results = _tried(groups, cases, asked, begin)
    summary = report.Summary(results, len(cases), asked.seed, time.monotonic() - begin)
    if asked.json:
        print(json.dumps(summary.as_dict(), indent=1))
    else:
        print(summary.text())
    if asked.output is not None:
        asked.output.write_text(summary.page(), encoding="utf-8")
    return 1 if summary.defects or summary.left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="From which all cases are drawn.")
    parser.add_argument("--minutes", type=float, default=30.0, help="No case begins later.")
    parser.add_argument("--only", nargs="+", default=[], help="Parts, or PART/GROUP.")
    parser.add_argument("--case", type=int, help="This case alone, with --only PART/GROUP.")
    parser.add_argument("--share", type=float, default=1.0, help="Of the cases of every group.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases at a time.")
    parser.add_argument("--slice", action="store_true", help="A minute of it, for the tests.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--output", type=Path, help="Write the page of the documentation.")
    return parser


def _is_asked(group: Group, only: Sequence[str]) -> bool:
    return not only or group.part in only or f"{group.part}/{group.name}" in only


def _dealt(numbers: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield group and number of every case, the first of all groups first."""
    for row in zip_longest(*numbers):
        yield from ((group, number) for group, number in enumerate(row) if number is not None)


def _tried(
    groups: list[Group], cases: list[tuple[int, int]], asked: argparse.Namespace, begin: float
) -> list[Result]:
    """Try cases in a few processes, and show that it goes on."""
    deadline, results = begin + 60 * asked.minutes, []
    _GROUPS[:] = groups
    work = [(*case, asked.seed, deadline) for case in cases]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="vsm-faults-", ignore_cleanup_errors=True) as root:
        count = min(asked.jobs, len(cases))
        with context.Pool(count, _prepare, (root, asked.slice)) as pool:
            for done, result in enumerate(pool.imap_unordered(_try, work), 1):
                results += [] if result is None else [result]
                if sys.stderr.isatty():
                    print(f"\r{done} of {len(work)} cases", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    order = {(g.part, g.name): position for position, g in enumerate(groups)}
    return sorted(results, key=lambda one: (order[one.part, one.group], one.number))


def _prepare(root: str, quick: bool) -> None:
    bench = Bench(Path(root) / multiprocessing.current_process().name.rpartition("-")[2])
    bench.build(quick)
    _BENCH.append(bench)


def _try(work: tuple[int, int, int, float]) -> Result | None:
    group, number, seed, deadline = work
    if time.monotonic() > deadline:
        return None
    tried = _GROUPS[group]
    try:
        return tried.result(_BENCH[0], number, seed)
    except Exception as error:  # a campaign that fails has found nothing out
        failed = Attempt("the campaign itself", "other", (f"cannot try it: {error!r:.300}",))
        return Result(tried.part, tried.name, number, failed)


if __name__ == "__main__":
    sys.exit(main())
