"""The results of all cases, as text and as a page of the documentation."""

import platform
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from faults.sandbox import Result

COLUMNS = ("part", "what", "tried", "same answer", "refused", "other answer", "defects")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PACKAGES = ("variational-semantic-memory", "torch", "numpy", "pillow", "safetensors")


@dataclass
class Summary:
    """All results, in the order of groups."""

    results: list[Result]  # of the finished cases
    planned: int  # number of cases
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

    def write(self, path: Path) -> None:
        """Write the results into a page of the documentation, between two comments."""
        page = path.read_text(encoding="utf-8") if path.is_file() else f"{BEGIN}\n{END}\n"
        notes = [f"- {note}" for note in self._notes()]
        defects = [f"- {_escape(self._describe(one))}" for one in self.defects]
        results = "\n".join([BEGIN, *notes, "", self.table(), "", *defects, END])
        before, _, rest = page.partition(BEGIN)
        path.write_text(before + results + rest.partition(END)[2], encoding="utf-8")

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
