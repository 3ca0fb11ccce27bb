"""The paper's tables and figures, and the settings with which their rows are measured.

Printed values are read from paper.json, what is measured of them from measured.yaml. A row is a few
changes to the settings of its column, which depend on the budget. Rows without changes are only
quoted from the paper.

Settings of the budgets ``tiny`` (for the tests), ``smoke`` and ``cpu`` are in ``budgets/``. Those
of ``paper`` are the presets ``paper-…``: the paper's own schedule, with a reading under which its
memory works.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vsm.errors import SettingsError
from vsm.runs.configuration import PRESETS, preset_paths, read_settings
from vsm.settings import METHODS, RunSettings
from vsm_lab.jobs import Changes, with_changes

HERE = Path(__file__).parent
FOLDER = HERE / "budgets"
FULL_WIDTH = 64
CHARACTERS = ("glyphs", "omniglot", "omniglot-vinyals")
RETENTION_OF_SHOT = {1: 0.7, 5: 0.8}  # the paper's best α (Table 10)


class Unavailable(Exception):  # noqa: N818 - a property of a row, not an error
    """A row cannot be measured under this budget or by this version; the message says why."""


@dataclass(frozen=True)
class Column:
    """A column of accuracies: ``way``-way ``shot``-shot episodes of ``data``."""

    data: str
    way: int
    shot: int

    def __str__(self) -> str:
        return f"{self.data} {self.way}-way {self.shot}-shot"


@dataclass(frozen=True)
class Row:
    """One row, with the paper's title and values, one per column of the table.

    Attributes:
        changes: settings that make it this row; None for a row that is only quoted.
        slots: at test, the memory keeps only so many of its first slots; unset: all.
        in_paper: whether the paper has this row at all.
    """

    name: str
    title: str
    changes: Changes | None
    cells: tuple[str | None, ...] = ()
    slots: int | None = None
    in_paper: bool = True


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or a figure, of which the paper prints no numbers.

    Caption, LaTeX label and columns are the paper's. Rows are in its order, measured and quoted;
    rows beyond the paper come last. The rest is explained in ``measured.yaml``.
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
        Row(one["name"], one["title"], measured.get(one["name"]), tuple(one["cells"]))
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
    printed = json.loads((HERE / "paper.json").read_text(encoding="utf-8"))
    added = yaml.safe_load((HERE / "measured.yaml").read_text(encoding="utf-8"))
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


@dataclass(frozen=True)
class Budget:
    """How long a reproduction may take.

    Attributes:
        channels: width of each backbone it affords.
        episodes: test episodes per cell.
        queries: query images per class at test.
        data: datasets that stand in for the paper's unless ``--data`` says otherwise.
        file: settings of its runs; None for the paper's presets.
        refusal: why a backbone that is not in ``channels`` is not trained.
        pretraining_epochs: by dataset ("" for any other), if runs begin with a pre-trained
            backbone.
    """

    name: str
    purpose: str
    channels: Mapping[str, int]
    episodes: int
    queries: int = 15
    data: tuple[str, ...] = ()
    file: str | None = None
    refusal: str = ""
    pretraining_epochs: Mapping[str, int] = field(default_factory=dict)

    def settings(self, table: PaperTable, column: Column, row: Row, seed: int) -> RunSettings:
        """Return the settings of a row's training run, or raise :class:`Unavailable`."""
        if row.changes is None:
            raise Unavailable("quoted from the paper")
        if table.backbone not in self.channels:
            raise Unavailable(self.refusal)
        method = row.changes.get("method")
        if method not in METHODS:
            raise Unavailable(f"not available in this version: method {method}")
        setting: dict[str, Any] = {
            "data": column.data,
            "way": column.way,
            "shot": column.shot,
            "seed": seed,
            "model.backbone": table.backbone,
            "model.channels": self.channels[table.backbone],
            "memory.retention": RETENTION_OF_SHOT.get(column.shot, RETENTION_OF_SHOT[1]),
        }
        if table.backbone != "conv4":
            setting["model.keep_probability"] = 1.0  # the paper's dropout is of its shallow network
        return with_changes(_base(self.file, column), {**setting, **row.changes}, row.changes)

    def narrow(self, backbone: str) -> str:
        """Say that a backbone is narrower than the published one, if it is."""
        width = self.channels.get(backbone, FULL_WIDTH)
        return f"{backbone} with {width} of {FULL_WIDTH} channels" if width < FULL_WIDTH else ""

    def epochs(self, data: str) -> int | None:
        """Return the epochs of pre-training on ``data``; None if runs begin from scratch."""
        return self.pretraining_epochs.get(data, self.pretraining_epochs.get(""))


BUDGETS: dict[str, Budget] = {
    "tiny": Budget(
        "tiny",
        "two steps per run, for the tests of this package",
        {"conv4": 4, "resnet12": 4, "wrn28_10": 4},
        episodes=4,
        queries=3,
        data=("glyphs",),
        file="tiny.yaml",
    ),
    "smoke": Budget(
        "smoke",
        "seconds per run, on glyphs: proves the plumbing; deep networks are narrow",
        {"conv4": 32, "resnet12": 8, "wrn28_10": 4},
        episodes=200,
        data=("glyphs",),
        file="smoke.yaml",
    ),
    "cpu": Budget(
        "cpu",
        "minutes per run on two cores, from one pre-trained backbone per dataset; no deep networks",
        {"conv4": 64},
        episodes=2000,
        file="cpu.yaml",
        refusal="a deep network takes days on a CPU; choose --budget smoke (narrow) or paper",
        pretraining_epochs={"": 20, "cifar-fs": 40, "mini-imagenet": 15, "tiered-imagenet": 2},
    ),
    "paper": Budget(
        "paper",
        "the paper's schedule: 100,000 to 150,000 steps per run",
        {"conv4": 64, "resnet12": 64, "wrn28_10": 64},
        episodes=2000,
    ),
}


def budget(name: str) -> Budget:
    """Return the budget called ``name``, or say which there are."""
    if name not in BUDGETS:
        raise SettingsError(f"budget: expected one of {', '.join(BUDGETS)}, got {name!r}")
    return BUDGETS[name]


@cache
def _base(file: str | None, column: Column) -> RunSettings:
    """Return the settings that all rows of a column share."""
    if file is not None:
        return read_settings(RunSettings, FOLDER / file)
    own = f"paper-{column.data}-{column.way}way-{column.shot}shot"
    if (PRESETS / f"{own}.yaml").is_file():
        return read_settings(RunSettings, *preset_paths(own))
    like = "omniglot" if column.data in CHARACTERS else "mini-imagenet"
    return read_settings(
        RunSettings, *preset_paths(f"paper-{like}-{column.way}way-{column.shot}shot")
    )
