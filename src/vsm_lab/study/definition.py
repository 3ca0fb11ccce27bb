"""What a study asks for, read from its YAML file, and where its results go."""

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vsm import __version__
from vsm.errors import DocumentError, RunError, SettingsError
from vsm.runs.configuration import check_settings
from vsm.runs.directory import shipped_names
from vsm.settings import BaselineName
from vsm.system.files import read_mapping, read_object, write_json

BatchNorm = Literal["inductive", "transductive"]
Found = dict[str, Any]
"""What a result file, or a part of it, holds."""
PARTS = {
    "runs": {"study", "runs", "conditions"},
    "uncertainty": {"study", "models"},
    "pretraining": {"study", "pretrainings"},
    "transductive": {"study", "measured"},
}
"""Keys of a result file, by the kind of study."""


class Condition(NamedTuple):
    """The shape of episodes, and how batch norm is used in them."""

    way: int
    shot: int
    batch_norm: BatchNorm

    def __str__(self) -> str:
        unusual = ", transductive batch norm" if self.batch_norm == "transductive" else ""
        return f"{self.way}-way {self.shot}-shot{unusual}"


def _require_two(episodes: int) -> None:
    if episodes < 2:
        raise SettingsError(f"episodes: an interval needs at least 2, got {episodes}")


def condition_of(found: Found) -> Condition:
    """Return which condition a part of a result file is about."""
    return Condition(found["way"], found["shot"], found["batch_norm"])


@dataclass(frozen=True)
class StudySettings:
    """Which runs `vsm study` compares, trained or to be trained, and what it asks of them."""

    title: str
    """Title of the page."""
    data: str
    """What all runs are trained on."""
    rows: dict[str, str | dict[str, Any]]
    """Label of a row to its run directories, with {seed}, {shot} and {way} where they differ; or to
    settings that are trained, as changes of the base by their dotted names; or to an `encoder`,
    which may be the label of such a row, and the `gaussian` settings with which its memory is
    learned."""
    reference: str
    """Label of the row that the others are compared with."""
    remark: str | None = None
    """Added to the page; may be written when the results are known."""
    kind: Literal["runs"] = "runs"
    """Which kind of study this is."""
    base: str | None = None
    """Preset that rows of settings change."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that all rows of settings share, by their dotted names; `init` may hold {seed}."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Further differences: label of a row to that of the row that is subtracted from it."""
    without_memory: str | None = None
    """The control that lacks memory alone: what each class gains, and which answers changed."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds, and what {seed} stands for."""
    split: Literal["test", "validation"] = "test"
    """Whose classes are measured; choices are made on validation classes."""
    ways: tuple[int, ...] = (5,)
    """Classes of an episode."""
    shots: tuple[int, ...] = (1, 5)
    """Support images per class."""
    batch_norms: tuple[BatchNorm, ...] = ("inductive",)
    """Running statistics, or each episode's own (queries then see each other)."""
    queries: int = 15
    """Query images per class."""
    episodes: int = 2000
    """Episodes, the same for all rows."""
    episode_seed: int = 0
    """Seed of the list of episodes."""
    temperature_episodes: int = 600
    """Validation episodes to which a temperature is fitted, if test classes are measured."""
    baselines: tuple[BaselineName, ...] = ("cosine", "simpleshot", "logistic", "calibration")
    """Simple classifiers on the features of the reference."""
    memory_sizes: tuple[int, ...] = (0, 1, 4, 16, 32)
    """Slots that the reference is left with; all of them are always measured."""
    memory_subsets: int = 3
    """Choices of slots for each size: the first ones, and others at random."""

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1), ("seeds", 0)):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < least or len(set(numbers)) < len(numbers):
                raise SettingsError(
                    f"{name}: expected different numbers of at least {least}, got {list(numbers)}"
                )
        for name in ("queries", "memory_subsets"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: must be at least 1, got {getattr(self, name)}")
        _require_two(min(self.episodes, self.temperature_episodes))
        if not self.batch_norms:
            raise SettingsError("batch_norms: expected inductive, transductive or both, got none")
        if min(self.memory_sizes, default=0) < 0:
            raise SettingsError(f"memory_sizes: must not be negative, got {self.memory_sizes}")
        mentioned = [("reference", self.reference), ("without_memory", self.without_memory)]
        mentioned += [("pairs", label) for pair in self.pairs.items() for label in pair]
        for name, label in mentioned:
            if label is not None and label not in self.rows:
                known = ", ".join(map(repr, self.rows))
                raise SettingsError(f"{name}: {label!r} is none of the rows {known}")
        if self.reference == self.without_memory:
            raise SettingsError(f"without_memory: {self.reference!r} is the reference itself")
        for label, row in self.rows.items():
            self._check_row(label, row)

    def _check_row(self, label: str, row: str | dict[str, Any]) -> None:
        if label in self.baselines:
            raise SettingsError(f"rows: {label!r} is the name of a baseline; choose another")
        if not isinstance(row, str):
            if self.base is None and "encoder" not in row:
                raise SettingsError(
                    f"rows: {label!r} changes settings, but of no base; name a preset as base, or "
                    "an encoder whose memory is learned"
                )
            return
        try:
            row.format(seed=0, shot=0, way=0)
        except (KeyError, IndexError, ValueError):
            raise SettingsError(
                f"rows: {label!r} may hold {{seed}}, {{shot}} and {{way}}, got {row!r}"
            ) from None
        if len(self.seeds) > 1 and "{seed}" not in row:
            raise SettingsError(
                f"rows: {label!r} is the same run for all of {len(self.seeds)} seeds; put {{seed}} "
                f"into {row!r}"
            )

    @property
    def others(self) -> list[str]:
        """The rows that are subtracted from the reference."""
        return [label for label in self.rows if label != self.reference]

    @property
    def conditions(self) -> list[Condition]:
        """Every condition, those of one batch norm together."""
        shapes = product(self.batch_norms, self.ways, self.shots)
        return [Condition(way, shot, batch_norm) for batch_norm, way, shot in shapes]


@dataclass(frozen=True)
class UncertaintySettings:
    """Whose uncertainty `vsm study` measures."""

    kind: Literal["uncertainty"]
    """Which kind of study this is."""
    title: str
    """Title of the page."""
    models: tuple[str, ...] = field(default_factory=lambda: tuple(shipped_names()))
    """Names of shipped models, or run directories."""
    episodes: int = 500
    """Episodes of each split."""
    remark: str | None = None
    """Added to the page; may be written when the results are known."""

    def __post_init__(self) -> None:
        _require_two(self.episodes)


@dataclass(frozen=True)
class TransductiveSettings:
    """On which models `vsm study` compares transductive inference with other methods."""

    kind: Literal["transductive"]
    """Which kind of study this is."""
    title: str
    """Title of the page."""
    models: dict[str, str]
    """Label to the name of a shipped model, or a run directory."""
    baselines: tuple[str, ...]
    """Transductive methods of the lab."""
    queries: dict[str, int] = field(default_factory=dict)
    """Label to queries per class; unset: 15. Each class needs twice as many images."""
    many_way_queries: int = 5
    """The same of episodes with more than 5 classes."""
    ways: tuple[int, ...] = (5, 20)
    """Classes of an episode."""
    shots: tuple[int, ...] = (1, 5)
    """Examples of each class."""
    episodes: int = 400
    """Episodes of 5 classes in which ours is tried on all query sets; of more classes fewer."""
    compared_episodes: int = 200
    """Episodes of 5 classes in which methods are compared; of more classes fewer."""
    remark: str | None = None
    """Added to the page; may be written when the results are known."""

    def __post_init__(self) -> None:
        _require_two(min(self.episodes, self.compared_episodes) * 5 // max(self.ways, default=5))


@dataclass(frozen=True)
class PretrainingStudySettings:
    """Which pre-trainings `vsm study` compares on validation classes."""

    kind: Literal["pretraining"]
    """Which kind of study this is."""
    title: str
    """Title of the page."""
    data: str
    """What all are trained on."""
    rows: dict[str, dict[str, Any]]
    """Label of a row to settings of `vsm pretrain`, by their dotted names; `teacher` is the label
    of another row, whose pre-training teaches this one."""
    remark: str | None = None
    """Added to the page; may be written when the results are known."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that all rows share."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds."""

    def __post_init__(self) -> None:
        if not self.rows or not self.seeds:
            raise SettingsError("rows, seeds: expected at least one of each, got none")
        if "teacher" in self.changes:
            raise SettingsError("changes: a teacher teaches one row; name it there")
        for label, row in self.rows.items():
            path, above = [label], row.get("teacher")
            while above is not None:
                if above not in self.rows or above in path:
                    raise SettingsError(
                        f"rows: the teacher {above!r} of {path[-1]!r} is no other row above it"
                    )
                path, above = [*path, above], self.rows[above].get("teacher")
            if "distillation.teacher" in row:
                raise SettingsError(
                    f"rows: {label!r} names a directory as its teacher; name another row as teacher"
                )


AnyStudySettings = (
    StudySettings | UncertaintySettings | PretrainingStudySettings | TransductiveSettings
)


@dataclass(frozen=True)
class Study:
    """A study and its folder, which has the name of its file and lies beside it."""

    path: Path
    settings: AnyStudySettings

    @property
    def folder(self) -> Path:
        """Where results and charts go."""
        return self.path.with_suffix("")

    @property
    def results(self) -> Path:
        """The result file; written last and atomically."""
        return self.folder / "results.json"

    @property
    def page(self) -> Path:
        """The page, beside the YAML file."""
        return self.path.with_suffix(".md")

    def write_results(self, found: Found) -> Found:
        """Write the result file, and return all that it holds."""
        found = {"package": __version__, "study": asdict(self.settings), **found}
        write_json(self.results, found, indent=1)
        return found

    def read_results(self) -> Found:
        """Read the result file, or say how to fix it."""
        again = f"run vsm study {self.path}"
        if not self.results.is_file():
            raise RunError(f"{self.results} is not there yet; {again} first")
        try:
            found: Found = read_object(self.results)
            if not PARTS[self.settings.kind] <= found.keys():
                raise ValueError("parts are missing")
        except ValueError as error:
            raise RunError(f"{self.results} is half-written or damaged; {again} again") from error
        return found


def read_study(path: Path) -> Study:
    """Read a study, or say what is wrong with it in one line."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise SettingsError(f"study: expected a YAML file, and {path} is none")
    try:
        values = read_mapping(path)
        kinds: dict[str, type[AnyStudySettings]] = {
            "uncertainty": UncertaintySettings,
            "pretraining": PretrainingStudySettings,
            "transductive": TransductiveSettings,
        }
        kind = kinds.get(str(values.get("kind")), StudySettings)
        return Study(path, check_settings(kind, values, path))
    except (SettingsError, DocumentError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise SettingsError(f"{path}: {reason}") from error
