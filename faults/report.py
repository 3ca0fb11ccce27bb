"""What was tried, what was handled, and what was not: on the terminal, as JSON, and as a page."""

import platform
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

from faults.bench import Result
from faults.processes import HANG_SECONDS, MOST_BYTES, TRUE_PROCESS_EVERY

COLUMNS = ("part", "what", "tried", "same answer", "refused", "other answer", "defects")


@dataclass
class Summary:
    """All results of a campaign.

    Attributes:
        results: in the order of groups.
        planned: how many there should be.
        seed: from which they were drawn.
        seconds: of wall time.
    """

    results: list[Result]
    planned: int
    seed: int
    seconds: float

    @property
    def left(self) -> int:
        """Return how many cases there was no time for."""
        return self.planned - len(self.results)

    @cached_property
    def defects(self) -> list[Result]:
        """Return the cases with a defect."""
        return [one for one in self.results if one.attempt.defects]

    def rows(self) -> list[list[str]]:
        """Return the table, a row for each group, and the sum."""
        groups: dict[tuple[str, str], list[Result]] = {}
        for one in self.results:
            groups.setdefault((one.part, one.group), []).append(one)
        rows = [[*key, *_counts(found)] for key, found in groups.items()]
        return [*rows, ["all", "", *_counts(self.results)]]

    def text(self) -> str:
        """Return what people see."""
        table = [list(COLUMNS), *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*lines, "", *self._notes(), *map(self._told, self.defects)])

    def page(self) -> str:
        """Return the page of the documentation."""
        rows = "\n".join(f"| {' | '.join(row)} |" for row in self.rows())
        listed = "\n".join(f"- {_escaped(self._told(one))}" for one in self.defects) or "None."
        return PAGE.format(
            columns=" | ".join(COLUMNS),
            rule="|".join("---" for _ in COLUMNS),
            rows=rows,
            notes="\n".join(f"- {note}" for note in self._notes()),
            defects=listed,
            seconds=HANG_SECONDS,
            gigabytes=MOST_BYTES >> 30,
            every=TRUE_PROCESS_EVERY,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "versions": _versions(),
            "tried": len(self.results),
            "left": self.left,
            "defects": len(self.defects),
            "table": [dict(zip(COLUMNS, row, strict=True)) for row in self.rows()],
            "cases": [_flat(one) for one in self.results],
        }

    def _notes(self) -> list[str]:
        listed = ", ".join(f"{name} {number}" for name, number in _versions().items())
        notes = [
            f"{len(self.results)} cases of seed {self.seed} in {self.seconds / 60:.1f} minutes; "
            f"{len(self.defects)} with a defect",
            listed,
        ]
        return [*notes, f"no time for {self.left} cases"] if self.left else notes

    def _told(self, one: Result) -> str:
        again = f"--only '{one.part}/{one.group}' --case {one.number} --seed {self.seed}"
        return f"{'; '.join(one.attempt.defects)} [{one.attempt.what}] {again}"


def _counts(results: list[Result]) -> list[str]:
    outcomes: Counter[str] = Counter()
    for one in (result.attempt for result in results):
        outcomes["defect"] += len(one.defects) > 0
        outcomes[one.outcome] += one.tried - (len(one.defects) > 0)
    named = [str(outcomes[name]) for name in ("same", "refused", "other", "defect")]
    return [str(sum(result.attempt.tried for result in results)), *named]


def _flat(one: Result) -> dict[str, Any]:
    place = {"part": one.part, "group": one.group, "number": one.number}
    return place | asdict(one.attempt)


def _versions() -> dict[str, str]:
    packages = ("variational-semantic-memory", "torch", "numpy", "pillow", "safetensors")
    return {"Python": platform.python_version(), **{name: version(name) for name in packages}}


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_<>[]|" else c for c in text.replace("\n", " "))


PAGE = """\
# Faults

`make faults` damages every kind of file that is read, kills what writes, fills disks, takes rights
away, lets processes share files, and sends strange requests. This page is what it wrote last:

{notes}

| {columns} |
|{rule}|
{rows}

A case is handled if the program gives the same answer as without the fault, or refuses in at most
three lines with a documented [exit code](commands.md), or gives another answer where one is right
(files that people write). It is a defect if there is a traceback, a crash, more than {seconds:.0f}
seconds or {gigabytes} GB, another file is opened, code of a file is run, control characters or
numbers that are no JSON are printed, a refusal leaves something changed, or the answer is another
without a word.

## Defects

{defects}

## What it does not cover

- Cases are forked from a process that has imported everything; every {every}th, `LC_ALL=C`, closed
  output and Ctrl-C begin with an interpreter of their own.
- That no other file is opened is seen by Python's audit events, not for libraries in C.
- Kills end processes, not the machine: disks that lie about `fsync` are not tried.
- Archives and pickles of published datasets: see `tests/test_data_archives.py` and
  `tests/test_data_pickles.py`.
- GPUs, several machines, SLURM, Windows and macOS; files of more than 6 GB.
- Damage that its author signs: whoever may write a model may change its answers.
"""
