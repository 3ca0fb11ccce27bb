"""The paper's tables and figures, as paper.json has them: what is printed, and what is measured.

A row is a few changes to the settings of its column (:mod:`vsm.experiments.paper.budgets`). A row
without changes is quoted: the paper's number stands alone.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vsm.errors import SettingsError
from vsm.experiments.changes import Changes

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
        cells: the paper's values, one per column of the table; empty where it prints none.
        slots: at test, the memory keeps only so many of its first slots; unset: all.
        in_paper: whether the paper has this row at all.
    """

    name: str
    title: str
    changes: Changes | None = None
    cells: tuple[PaperCell | None, ...] = ()
    slots: int | None = None
    in_paper: bool = True


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or a figure, of which the paper prints no numbers.

    Attributes:
        name: ``table-1`` … ``table-11``, ``figure-2``, ``figure-3``, numbered as in the paper.
        label: the LaTeX label.
        purpose: what it shows, in a few words.
        caption: the paper's.
        columns: the paper's.
        rows: measured and quoted ones, in the paper's order; rows beyond the paper come last.
        claims: pairs (a, b) of rows whose difference a − b the table is about.
        backbone: feature extractor of its measured rows.
        kind: of the jobs that measure it: accuracies, or distances between prototypes.
        remark: what the paper leaves open, and how it is read here.
    """

    name: str
    label: str
    purpose: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: tuple[tuple[str, str], ...] = ()
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


@cache
def tables() -> dict[str, PaperTable]:
    """Return every table and figure of results by name, in the paper's order, tables first."""
    stored = json.loads(PAPER.read_text(encoding="utf-8"))
    return {name: _table(name, **values) for name, values in stored.items()}


def _table(
    name: str,
    columns: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    claims: Sequence[tuple[str, str]] = (),
    **rest: str,
) -> PaperTable:
    return PaperTable(
        name,
        columns=tuple(Column(**column) for column in columns),
        rows=tuple(
            Row(**{**row, "cells": tuple(map(PaperCell.read, row.get("cells", ())))})
            for row in rows
        ),
        claims=tuple((a, b) for a, b in claims),
        **rest,
    )


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
