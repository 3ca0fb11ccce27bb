"""The results of all cases, as text and as a page of the documentation."""

import platform
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from faults.processes import HANG_SECONDS, MOST_BYTES, OWN_INTERPRETER_EVERY
from faults.sandbox import Result

COLUMNS = ("part", "what", "tried", "same answer", "refused", "other answer", "defects")
PACKAGES = ("variational-semantic-memory", "torch", "numpy", "pillow", "safetensors")


@dataclass
class Summary:
    """All results, in the order of groups.

    Attributes:
        results: of the finished cases.
        planned: number of cases.
        seed: from which they were drawn.
        seconds: wall time.
    """

    results: list[Result]
    planned: int
    seed: int
    seconds: float

    @property
    def left(self) -> int:
        """Number of cases for which there was no time."""
        return self.planned - len(self.results)

    @cached_property
    def defects(self) -> list[Result]:
        """Cases with a defect."""
        return [one for one in self.results if one.outcome.defects]

    def table(self) -> str:
        """Return a Markdown table with a row for each group, and their sums."""
        found: dict[tuple[str, str], list[Result]] = {}
        for one in self.results:
            found.setdefault((one.part, one.group), []).append(one)
        rows = [[_escape(cell) for cell in (*key, *_counts(of))] for key, of in found.items()]
        sums = ["all", "", *_counts(self.results)]
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows, sums]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def text(self) -> str:
        """Return the table and the defects as text."""
        return "\n".join([self.table(), "", *self._notes(), *map(self._describe, self.defects)])

    def page(self) -> str:
        """Return the page of the documentation."""
        listed = [f"- {_escape(self._describe(one))}" for one in self.defects] or ["None."]
        return PAGE.format(
            table=self.table(),
            notes="\n".join(f"- {note}" for note in self._notes()),
            defects="\n".join(listed),
            seconds=HANG_SECONDS,
            gigabytes=MOST_BYTES >> 30,
            every=OWN_INTERPRETER_EVERY,
        )

    def _notes(self) -> list[str]:
        versions = [f"{name} {version(name)}" for name in PACKAGES]
        notes = [
            f"{len(self.results)} cases of seed {self.seed} in {self.seconds / 60:.1f} minutes; "
            f"{len(self.defects)} with a defect",
            ", ".join([f"Python {platform.python_version()}", *versions]),
        ]
        return [*notes, f"no time for {self.left} cases"] if self.left else notes

    def _describe(self, one: Result) -> str:
        again = f"--only '{one.part}/{one.group}' --case {one.number} --seed {self.seed}"
        return f"{'; '.join(one.outcome.defects)} [{one.outcome.fault}] {again}"


def _counts(results: list[Result]) -> list[str]:
    counts: Counter[str] = Counter()
    for one in (result.outcome for result in results):
        counts["defect"] += len(one.defects) > 0
        counts[one.kind] += one.tried - (len(one.defects) > 0)
    named = [str(counts[name]) for name in ("same", "refused", "other", "defect")]
    return [str(sum(result.outcome.tried for result in results)), *named]


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_<>[]|" else c for c in text.replace("\n", " "))


PAGE = """\
# Faults

`make faults` damages every kind of file that is read, kills commands that write, fills disks,
removes permissions, runs processes on the same files, and sends malformed requests. Results of the
last run:

{notes}

{table}

A case is handled if the program gives the same answer as without the fault, or refuses in at most
three lines with a documented [exit code](commands.md), or gives another answer where one is right
(files that people write). A defect is: a traceback, a crash, more than {seconds:.0f} seconds or
{gigabytes} GB, an opened canary file, executed code of a file, printed control characters or
invalid JSON, a refusal that changes files, or another answer without a message.

## Defects

{defects}

## What it does not cover

- Cases are forked from a process that has imported everything; every {every}th case and those of
  `LC_ALL=C`, closed output and Ctrl-C start a new interpreter.
- Opened files are seen by Python's audit events, not in C libraries.
- Kills end processes, not the machine: disks that ignore `fsync` are not tested.
- Archives and pickles of published datasets: see `tests/test_data_archives.py` and
  `tests/test_data_pickles.py`.
- GPUs, several machines, SLURM, Windows and macOS; files of more than 6 GB.
- Damage with a valid digest: whoever may write a model may change its answers.
"""
