"""How long a reproduction may take: from a budget, a column and a row to the settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vsm.errors import SettingsError
from vsm.experiments.changes import UnknownSettingError, with_changes
from vsm.experiments.paper.catalog import Column, PaperTable, Row
from vsm.runs.configuration import (
    PRESETS,
    check_settings,
    preset_paths,
    settings_from_files,
)
from vsm.settings import METHODS, RunSettings

FILE = Path(__file__).with_name("budgets.yaml")
FULL_WIDTH = 64
CHARACTERS = ("glyphs", "omniglot", "omniglot-vinyals")
RETENTION_OF_SHOT = {1: 0.7, 5: 0.8}  # the paper's best α (Table 10)


class Unavailable(Exception):  # noqa: N818 - a property of a row, not an error
    """A row cannot be measured under this budget or by this version; the message says why."""


@dataclass(frozen=True)
class Budget:
    """One budget.

    Attributes:
        name: what ``--budget`` takes.
        purpose: one line for people.
        channels: width of each backbone it affords.
        episodes: test episodes per cell.
        queries: query images per class at test.
        data: datasets that stand in for the paper's unless ``--data`` says otherwise.
        base: settings of its runs; empty for the paper's presets.
        refusal: why a backbone that is not in ``channels`` is not trained.
        pretraining_epochs: by dataset, or "other",, if runs begin with a pre-trained
            backbone.
    """

    name: str
    purpose: str
    channels: Mapping[str, int]
    episodes: int
    queries: int = 15
    data: Sequence[str] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    pretraining_epochs: Mapping[str, int] = field(default_factory=dict)

    def settings(self, table: PaperTable, column: Column, row: Row, seed: int) -> RunSettings:
        """Return the settings of a row's training run.

        Raises:
            Unavailable: if this budget or this version cannot train it; says why.
        """
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
        base = _settings(yaml.safe_dump(dict(self.base))) if self.base else _preset(column)
        try:
            return with_changes(base, {**setting, **row.changes})
        except UnknownSettingError as error:
            raise Unavailable(f"not available in this version: {error}") from error

    def narrow(self, backbone: str) -> str:
        """Say that a backbone is narrower than the published one, if it is."""
        width = self.channels.get(backbone, FULL_WIDTH)
        return f"{backbone} with {width} of {FULL_WIDTH} channels" if width < FULL_WIDTH else ""

    def epochs(self, data: str) -> int | None:
        """Return the epochs of pre-training on ``data``; None if runs begin from scratch."""
        return self.pretraining_epochs.get(data, self.pretraining_epochs.get("other"))


BUDGETS = {
    name: Budget(name, **values)
    for name, values in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
}


def budget(name: str) -> Budget:
    """Return the budget called ``name``, or say which there are."""
    if name not in BUDGETS:
        raise SettingsError(f"budget: expected one of {', '.join(BUDGETS)}, got {name!r}")
    return BUDGETS[name]


@cache
def _preset(column: Column) -> RunSettings:
    """Return the paper's schedule for a column, or for the one that is most like it."""
    data = column.data
    if not (PRESETS / f"paper-{data}-{column.way}way-{column.shot}shot.yaml").is_file():
        data = "omniglot" if data in CHARACTERS else "mini-imagenet"
    return settings_from_files(*preset_paths(f"paper-{data}-{column.way}way-{column.shot}shot"))


@cache
def _settings(values: str) -> RunSettings:
    return check_settings(RunSettings, yaml.safe_load(values), FILE)
