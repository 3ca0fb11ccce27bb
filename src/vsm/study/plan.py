"""What a study asks for, read from its YAML file, and where its results go."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from vsm.errors import SettingsError
from vsm.runs.configuration import read_settings
from vsm.settings import StudySettings


class Condition(NamedTuple):
    """The shape of episodes, and how batch norm is used in them."""

    way: int
    shot: int
    batch_norm: Literal["inductive", "transductive"]

    def __str__(self) -> str:
        unusual = ", transductive batch norm" if self.batch_norm == "transductive" else ""
        return f"{self.way}-way {self.shot}-shot{unusual}"


@dataclass(frozen=True)
class Study:
    """A study and its folder, which has the name of its file and lies beside it."""

    path: Path
    settings: StudySettings

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return self.path.with_suffix("")

    @property
    def results(self) -> Path:
        """The result file; written last, as a whole."""
        return self.folder / "results.json"

    @property
    def figures(self) -> Path:
        """Pictures; they show images of the dataset, which may not be ours to publish."""
        return self.folder / "figures"

    @property
    def parts(self) -> Path:
        """Single measurements, kept so that none is made twice."""
        return self.folder / "measured"

    @property
    def conditions(self) -> list[Condition]:
        """Every condition, those of one batch norm together."""
        asked = self.settings
        return [
            Condition(way, shot, batch_norm)
            for batch_norm, way, shot in product(asked.batch_norms, asked.ways, asked.shots)
        ]

    def run(self, label: str, condition: Condition, seed: int) -> Path:
        """Return the run directory of a row."""
        pattern = self.settings.rows[label]
        return Path(pattern.format(seed=seed, shot=condition.shot, way=condition.way))


def read_study(path: Path) -> Study:
    """Read a study, or say what is wrong with it in one line."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise SettingsError(f"study: expected a YAML file, and {path} is none")
    try:
        return Study(path, read_settings(StudySettings, path))
    except SettingsError as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise SettingsError(f"{path}: {reason}") from error


MOST_CLASSES_DRAWN = 10  # an episode of more does not fit a picture


def picture_name(condition: Condition, position: int, kind: str) -> str:
    """Return the name of the file of a picture, without its ending."""
    words = kind.replace(" ", "-")
    return f"{condition.way}way-{condition.shot}shot-{position + 1}-{words}"
