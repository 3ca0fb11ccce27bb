"""What the paper prints: every table of results with every quoted method, read from paper.json."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAPER = Path(__file__).with_name("paper.json")


@dataclass(frozen=True)
class Column:
    """A column of accuracies: ``way``-way ``shot``-shot episodes of ``data``."""

    data: str
    way: int
    shot: int

    def __str__(self) -> str:
        return f"{self.data} {self.way}-way {self.shot}-shot"


@dataclass(frozen=True)
class PaperCell:
    """A printed accuracy in percent; ``interval`` is absent where the paper gives none."""

    text: str
    value: float
    interval: float | None

    @staticmethod
    def read(text: str | None) -> "PaperCell | None":
        """Read ``47.40 ± 0.60``, ``59.04 ± n/a``, ``96.7``, or nothing for a dash."""
        if text is None:
            return None
        value, _, interval = text.partition(" ± ")
        return PaperCell(text, float(value), float(interval) if interval[:1].isdigit() else None)


@dataclass(frozen=True)
class PaperRow:
    """A method as the paper prints it, one cell a column."""

    name: str
    title: str
    cells: tuple[PaperCell | None, ...]


@dataclass(frozen=True)
class PaperExhibit:
    """A table, or a figure, which has no printed numbers and therefore no rows."""

    name: str
    label: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]


@cache
def paper_exhibits() -> dict[str, PaperExhibit]:
    """Return every table and figure of results, in the paper's order, tables first."""
    stored = json.loads(PAPER.read_text(encoding="utf-8"))
    return {
        name: PaperExhibit(
            name,
            exhibit["label"],
            exhibit["caption"],
            tuple(Column(**column) for column in exhibit["columns"]),
            tuple(
                PaperRow(row["name"], row["title"], tuple(map(PaperCell.read, row["cells"])))
                for row in exhibit["rows"]
            ),
        )
        for name, exhibit in stored.items()
    }
