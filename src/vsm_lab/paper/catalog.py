"""What the paper prints, which of its rows can be measured here, by which settings, and claims.

Printed values are read from paper.json, what is measured of them from measured.yaml. A row is a few
changes to the settings of its column (:mod:`vsm_lab.paper.budgets`). Rows without changes
are quoted: the paper's number stands alone.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vsm.errors import SettingsError
from vsm_lab.changes import Changes


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
    """A printed accuracy in percent; ``interval`` is None where the paper gives none."""

    text: str
    value: float
    interval: float | None

    @staticmethod
    def read(text: str | None) -> "PaperCell | None":
        """Read ``47.40 ± 0.60``, ``59.04 ± n/a``, ``96.7``, or None for a dash."""
        if text is None:
            return None
        value, _, interval = text.partition(" ± ")
        return PaperCell(text, float(value), float(interval) if interval[:1].isdigit() else None)


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: what ``--rows`` takes.
        title: what the paper calls it.
        changes: settings that make it this row; None for a row that is only quoted.
        cells: the paper's values, one per column of the table.
        slots: at test, the memory keeps only so many of its first slots; unset: all.
        in_paper: whether the paper has this row at all.
    """

    name: str
    title: str
    changes: Changes | None
    cells: tuple[PaperCell | None, ...] = ()
    slots: int | None = None
    in_paper: bool = True


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or a figure, of which the paper prints no numbers.

    Attributes:
        name: ``table-1`` … ``table-11``, ``figure-2``, ``figure-3``, numbered as in the paper.
        label: the LaTeX label.
        caption: the paper's, as its columns are.
        rows: measured and quoted ones, in the paper's order; rows beyond the paper come last.
        purpose, claims, backbone, kind, remark: see ``measured.yaml``.
    """

    name: str
    label: str
    purpose: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: Sequence[Sequence[str]] = ()
    backbone: str = "conv4"
    kind: str = "evaluate"
    remark: str = ""

    def row(self, name: str) -> Row:
        """Return the row called ``name``, or say which there are."""
        for row in self.rows:
            if row.name == name:
                return row
        known = [row.name for row in self.rows]
        raise SettingsError(
            f"rows: {self.name} has no row {name!r}{_suggest(name, known)}; known: "
            f"{', '.join(known)}"
        )

    @property
    def measured_rows(self) -> tuple[Row, ...]:
        """The rows that are more than a quotation."""
        return tuple(row for row in self.rows if row.changes is not None)

    @property
    def datasets(self) -> list[str]:
        """The datasets of its columns, each once."""
        return list(dict.fromkeys(column.data for column in self.columns))


def _table(name: str, printed: dict[str, Any], added: dict[str, Any]) -> PaperTable:
    measured, extra = added.pop("measured", {}), added.pop("extra", ())
    rows = [
        Row(
            one["name"],
            one["title"],
            measured.get(one["name"]),
            tuple(map(PaperCell.read, one["cells"])),
        )
        for one in printed["rows"]
    ]
    return PaperTable(
        name,
        label=printed["label"],
        caption=printed["caption"],
        columns=tuple(Column(**column) for column in printed["columns"]),
        rows=(*rows, *(Row(**row) for row in extra)),
        **added,
    )


@cache
def tables() -> dict[str, PaperTable]:
    """Return every table and figure of results by name, in the paper's order, tables first."""
    here = Path(__file__)
    printed = json.loads(here.with_name("paper.json").read_text(encoding="utf-8"))
    added = yaml.safe_load(here.with_name("measured.yaml").read_text(encoding="utf-8"))
    return {name: _table(name, printed[name], added[name]) for name in printed}


def table(name: str) -> PaperTable:
    """Return the table or figure called ``name``, or suggest the one that was meant."""
    known = tables()
    if name not in known:
        raise SettingsError(
            f"unknown table or figure {name!r}{_suggest(name, list(known))}; "
            "`vsm reproduce list` shows all"
        )
    return known[name]


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
