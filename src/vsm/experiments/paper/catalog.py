"""What the paper prints, which of its rows can be measured here, by which settings, and claims.

Printed values are read from paper.json. A row is a few changes to the settings of its column
(:mod:`vsm.experiments.paper.budgets`). Rows without changes are quoted: the paper's number stands
alone.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vsm.errors import SettingsError
from vsm.experiments.changes import Changes
from vsm.settings import NETWORK_SETTINGS

PAPER = Path(__file__).with_name("paper.json")
MEMORY_SIZES = (4, 8, 16, 32)
RETENTIONS = tuple(tenths / 10 for tenths in range(11))


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
    claims: tuple[tuple[str, str], ...]
    backbone: str
    kind: str
    remark: str

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


@dataclass(frozen=True)
class _Addition:
    """What this package adds to a table of the paper."""

    purpose: str
    measured: Mapping[str, Changes]
    claims: Sequence[tuple[str, str]] = ()
    extra: Sequence[Row] = ()
    backbone: str = "conv4"
    kind: str = "evaluate"
    remark: str = ""


_PROTONET: Changes = {"method": "protonet"}
_VPN: Changes = {"method": "vpn"}
_VSM: Changes = {"method": "vsm"}
_CONJUGATE = Row(
    "vsm-conjugate",
    "VSM, conjugate inference (not in the paper)",
    {
        "method": "vsm",
        "model.residual": True,
        "model.inference": "conjugate",
        **dict.fromkeys(NETWORK_SETTINGS),  # budgets give some of them, for the network
    },
    in_paper=False,
)


def _size_rows() -> list[Row]:
    """Rows of Figure 3: the memory bounded while training, and cut at test alone."""
    bounded = [
        Row(f"capacity-{size}", f"{size} slots, in training and test", changes)
        for size, changes in ((size, {**_VSM, "memory.capacity": size}) for size in MEMORY_SIZES)
    ]
    cut = [
        Row(f"slots-{size}", f"{size} slots, at test alone", _VSM, slots=size)
        for size in (0, *MEMORY_SIZES)
    ]
    return [*bounded, Row("capacity-all", "one slot per class", _VSM), *cut]


_ADDITIONS: dict[str, _Addition] = {
    "table-1": _Addition(
        "variational prototypes against ProtoNet",
        {"protonet": _PROTONET, "vpn": _VPN},
        [("vpn", "protonet")],
    ),
    "table-2": _Addition(
        "ways to recall: rote, transformed, variational",
        {
            "vpn": _VPN,
            "rote": {"method": "rote"},
            "transformed": {"method": "transformed"},
            "vsm": _VSM,
        },
        [
            ("rote", "vpn"),
            ("transformed", "vpn"),
            ("vsm", "vpn"),
            ("vsm", "rote"),
            ("vsm", "transformed"),
            ("vsm-conjugate", "vsm"),
        ],
        extra=[_CONJUGATE],
    ),
    "table-3": _Addition(
        "attention against the mean in the memory update",
        {"mean-update": {**_VSM, "memory.update": "mean"}, "attention-update": _VSM},
        [("attention-update", "mean-update")],
    ),
    "table-4": _Addition(
        "other memories: MANN and the Kanerva machine",
        {"mann": {"method": "mann"}, "kanerva": {"method": "kanerva"}, "vsm": _VSM},
        [("vsm", "mann"), ("vsm", "kanerva")],
    ),
    "table-5": _Addition(
        "state of the art with a shallow network",
        {"vsm": _VSM},
        [("vsm-conjugate", "vsm")],
        extra=[_CONJUGATE],
    ),
    "table-6": _Addition(
        "state of the art with ResNet-12",
        {"vsm": _VSM},
        backbone="resnet12",
        remark="The paper gives no schedule for deep networks: that of its shallow tables is used.",
    ),
    "table-7": _Addition("Omniglot", {"protonet": _PROTONET, "vsm": _VSM}, [("vsm", "protonet")]),
    "table-8": _Addition("20-way episodes", {"vsm": _VSM}),
    "table-9": _Addition(
        "WRN-28-10",
        {"vsm": _VSM},
        backbone="wrn28_10",
        remark="The paper gives no schedule for deep networks: that of its shallow tables is used.",
    ),
    "table-10": _Addition(
        "how much old content an update keeps: α from 0 to 1",
        {f"alpha-{alpha:.1f}": {**_VSM, "memory.retention": alpha} for alpha in RETENTIONS},
        [(f"alpha-{best}", f"alpha-{end}") for best in ("0.7", "0.8") for end in ("0.0", "1.0")],
        remark="The table's columns do not say how many classes an episode has; its best values "
        "are those of the 5-way tables.",
    ),
    "table-11": _Addition(
        "Gumbel-softmax against softmax addressing",
        {"gumbel": {**_VSM, "memory.recall": "gumbel"}, "softmax": _VSM},
        [("softmax", "gumbel")],
    ),
    "figure-2": _Addition(
        "prototype distributions without and with memory",
        {},
        [("vsm", "vpn")],
        extra=[
            Row("vpn", "without memory", _VPN),
            Row("vsm", "with variational semantic memory", _VSM),
        ],
        kind="prototypes",
        remark="The paper prints a picture and no numbers, of miniImageNet; 1-shot is assumed.",
    ),
    "figure-3": _Addition(
        "effect of memory size",
        {},
        [("capacity-all", "capacity-4"), ("capacity-all", "slots-0")],
        extra=_size_rows(),
        remark="The paper prints a curve and no numbers; the sizes are chosen here. Whether the "
        "memory was bounded while training or cut at test is open: both are measured.",
    ),
}


@cache
def tables() -> dict[str, PaperTable]:
    """Return every table and figure of results by name, in the paper's order, tables first."""
    printed = json.loads(PAPER.read_text(encoding="utf-8"))
    return {name: _table(name, one, _ADDITIONS[name]) for name, one in printed.items()}


def _table(name: str, printed: dict[str, Any], added: _Addition) -> PaperTable:
    rows = [
        Row(
            row["name"],
            row["title"],
            added.measured.get(row["name"]),
            tuple(map(PaperCell.read, row["cells"])),
        )
        for row in printed["rows"]
    ]
    return PaperTable(
        name,
        printed["label"],
        added.purpose,
        printed["caption"],
        tuple(Column(**column) for column in printed["columns"]),
        (*rows, *added.extra),
        tuple(added.claims),
        added.backbone,
        added.kind,
        added.remark,
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
