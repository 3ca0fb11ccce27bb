"""How long a reproduction may take: from a budget, a column and a row to the settings of a run.

``smoke`` and ``cpu`` are YAML files beside this one. ``paper`` is the presets ``paper-…``, the
paper's own schedule, with a reading under which its memory works. ``tiny`` serves the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vsm.errors import SettingsError
from vsm.runs.configuration import PRESETS, preset_paths, settings_from_files
from vsm.settings import METHODS, RunSettings
from vsm_lab.changes import with_changes
from vsm_lab.paper.catalog import Column, PaperTable, Row

FOLDER = Path(__file__).with_name("budgets")
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
        return with_changes(_base(self.file, column), {**setting, **row.changes})

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
        return settings_from_files(FOLDER / file)
    own = f"paper-{column.data}-{column.way}way-{column.shot}shot"
    if (PRESETS / f"{own}.yaml").is_file():
        return settings_from_files(*preset_paths(own))
    like = "omniglot" if column.data in CHARACTERS else "mini-imagenet"
    return settings_from_files(*preset_paths(f"paper-{like}-{column.way}way-{column.shot}shot"))
