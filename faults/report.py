"""The results of all cases as Markdown."""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from faults.oracles import Outcome

COLUMNS = ("part", "what", "tried", "same answer", "refused", "other answer", "defects")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PACKAGES = ("variational-semantic-memory", "torch", "numpy", "pillow", "safetensors")


class Result(NamedTuple):
    """The outcome of one case of a group."""

    part: str
    group: str
    number: int
    outcome: Outcome


def describe(results: Sequence[Result], planned: int, seed: int, seconds: float) -> str:
    """Return a table with a row for each part and their sums, and how to repeat defects."""
    parts: dict[str, list[Result]] = {}
    for one in results:
        parts.setdefault(one.part, []).append(one)
    rows = [
        [part, _escape("; ".join(dict.fromkeys(one.group for one in found))), *_counts(found)]
        for part, found in parts.items()
    ]
    rows.append(["all", "", *_counts(results)])
    defects = [
        f"- {_escape('; '.join(one.outcome.defects))} ({_escape(one.outcome.fault)}): "
        f"`--only '{one.part}/{one.group}' --case {one.number} --seed {seed}`"
        for one in results
        if one.outcome.defects
    ]
    versions = [f"{name} {version(name)}" for name in PACKAGES]
    left = planned - len(results)
    lines = [
        f"- {len(results)} cases of seed {seed} in {seconds / 60:.1f} minutes; "
        f"{len(defects)} with a defect",
        f"- {', '.join([f'Python {platform.python_version()}', *versions])}",
        *([f"- no time for {left} cases"] if left else []),
        "",
        *(f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)),
        "",
        *defects,
    ]
    return "\n".join(lines)


def write(text: str, path: Path) -> None:
    """Write the results into a page of the documentation, between two comments."""
    page = path.read_text(encoding="utf-8") if path.is_file() else f"{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    page = f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"
    path.write_text(page, encoding="utf-8")


def _counts(results: Sequence[Result]) -> list[str]:
    outcomes = [one.outcome for one in results]
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts["defect"] += len(one.defects) > 0
        counts[one.kind] += one.tried - (len(one.defects) > 0)
    named = [str(counts[name]) for name in ("same", "refused", "other", "defect")]
    return [str(sum(one.tried for one in outcomes)), *named]


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_<>[]|" else c for c in text.replace("\n", " "))
