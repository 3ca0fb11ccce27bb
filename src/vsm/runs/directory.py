"""Run directories, and the models that ship with the package; nothing here imports torch.

A shipped model is a folder with those files of a run directory that using it needs, and a card: one
JSON object that says what it is, how good it was measured to be, and how it was made.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO

from vsm.errors import DocumentError, RunError, SettingsError
from vsm.runs.configuration import AnyDataclass, read_settings, settings_to_yaml
from vsm.settings import PretrainSettings, RunSettings
from vsm.system.files import (
    MAX_JSON_BYTES,
    add_filename_to_errors,
    exclusive_lock,
    parse_json,
    read_file,
    read_json,
    read_yaml,
    with_digest,
    write_text,
)

CONFIG_NAME = "config.yaml"
MODEL_NAME = "model.safetensors"
BACKBONE_NAME = "backbone.safetensors"
MEMORY_NAME = "memory.safetensors"
CALIBRATION_NAME = "calibration.json"
METRICS_NAME = "metrics.jsonl"
RESUME_NAME = "resume.safetensors"
GAUSSIAN_NAME = "gaussian"
CARD_NAME = "card.json"
COMMAND_OF_KEY = {"method": "train", "epochs": "pretrain"}
"""A setting that one command alone writes to config.yaml."""
CARD_TYPES = {"name": str, "way": int, "shot": int, "encoder": dict}
"""What code reads of a card; the rest is for people."""

MODELS = Path(__file__).parents[1] / "models"
LOG_EVERY = 10

Card = dict[str, Any]


def require_made_by(command: str, path: Path) -> None:
    """Refuse a directory whose config.yaml another command wrote."""
    try:
        keys = read_yaml(path / CONFIG_NAME)
    except (FileNotFoundError, NotADirectoryError, DocumentError):
        return  # reading it reports the error
    for key, maker in COMMAND_OF_KEY.items():
        if maker != command and isinstance(keys, dict) and key in keys:
            raise RunError(
                f"{path} was written by vsm {maker}, but one of vsm {command} is needed; "
                "choose another directory"
            )


def _line(row: dict[str, Any]) -> str:
    return json.dumps(with_digest(row)) + "\n"


class StepLog:
    """Appends the measurements of a run, one JSON object per line; without a file, none."""

    def __init__(self, file: TextIO | None) -> None:
        self._file, self._started = file, time.monotonic()

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        if self._file is not None:
            with add_filename_to_errors(Path(self._file.name)):
                self._file.write(_line(row))
                self._file.flush()

    def step(self, position: dict[str, int], measured: dict[str, float], advice: str = "") -> None:
        """Append every tenth step, and the first; raise with ``advice`` if the loss is not finite.

        ``position`` holds ``step``, and ``measured`` holds ``loss``.
        """
        if not math.isfinite(measured["loss"]):
            raise RunError(
                f"training diverged: the loss is {measured['loss']} at step {position['step']}; "
                f"lower optimizer.learning_rate {advice}".rstrip()
            )
        if position["step"] % LOG_EVERY == 0 or position["step"] == 1:
            self.write({**position, "seconds": time.monotonic() - self._started, **measured})


class Directory:
    """The files of a training run, of a pre-training, or of a shipped model.

    ``model``, ``memory``, ``calibration`` and ``backbone`` are of the best validation; ``resume``
    is the last state. ``gaussian`` is a run directory with the Gaussian memory of the features, if
    that was no worse on validation classes.
    """

    command: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG_NAME
        self.metrics = path / METRICS_NAME
        self.resume = path / RESUME_NAME
        self.backbone = path / BACKBONE_NAME
        self.model = path / MODEL_NAME
        self.memory = path / MEMORY_NAME
        self.calibration = path / CALIBRATION_NAME
        self.gaussian = path / GAUSSIAN_NAME

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def has_state(self) -> bool:
        """Whether there is a run with a state to go on from."""
        return self.exists() and self.resume.is_file()

    def open(
        self,
        settings: RunSettings | PretrainSettings,
        resume: bool,
        agree: Callable[[bool], float] = bool,
        writes: bool = True,
    ) -> bool:
        """Begin a run, or take up the one that is here; return whether there is a state to resume.

        ``agree`` returns what the first of several processes sees, the one that ``writes``.

        Raises:
            RunError: if there is a run and ``resume`` is false.
        """
        exists, has_state = bool(agree(self.exists())), bool(agree(self.has_state()))
        if exists and not resume:
            raise RunError(
                f"output: {self.path} already holds a run; go on with --resume, replace it with "
                "--overwrite, or choose another --output"
            )
        if self.resume.exists() and not self.resume.is_file():
            raise RunError(f"{self.resume} is not a regular file; remove it")
        if writes and has_state:
            write_text(self.config, settings_to_yaml(settings))  # more steps may be asked for
        elif writes:
            self.create(settings)
        return has_state

    @contextmanager
    def locked(self, writes: bool = True) -> Iterator[None]:
        """Keep other processes from writing this run inside the block, or raise a ``RunError``."""
        if not writes:
            yield
            return
        self._make_folder()
        refusal = f"output: another process is writing the run in {self.path}; wait until it ends"
        try:
            with exclusive_lock(self.path, f"{refusal}, or choose another --output"):
                yield
        finally:
            with suppress(OSError):
                self.path.rmdir()  # if nothing was written

    def _make_folder(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"output: cannot make the folder {self.path}: {error.strerror}; choose another "
                "--output"
            ) from error

    def create(self, settings: RunSettings | PretrainSettings) -> None:
        """Begin a run: write its settings and remove what an earlier run left."""
        self._make_folder()
        results = (self.backbone, self.model, self.memory, self.calibration)
        for leftover in (self.metrics, self.resume, *results):
            leftover.unlink(missing_ok=True)
        self.remove_gaussian()
        write_text(self.config, settings_to_yaml(settings))

    def remove_gaussian(self) -> None:
        """Remove the Gaussian memory of features that are no more."""
        if (self.gaussian / MODEL_NAME).is_file():
            shutil.rmtree(self.gaussian)

    def read_settings(self, kind: type[AnyDataclass]) -> AnyDataclass:
        """Read settings of one kind, or say that there is no run, or that another command's is."""
        if not self.exists():
            raise RunError(f"{self.path} is not a run directory: it has no {CONFIG_NAME}")
        try:
            return read_settings(kind, self.config)
        except SettingsError:
            require_made_by(self.command, self.path)  # no command reads what another one writes
            raise

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return every complete measurement; a last line cut short by a kill is passed over."""
        if not self.metrics.is_file():
            return []
        *lines, _ = read_file(self.metrics, MAX_JSON_BYTES).split(b"\n")
        rows = []
        for number, line in enumerate(lines, 1):
            row = parse_json(line, f"{self.metrics}, line {number}")
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise RunError(f"{self.metrics}, line {number}: has no step; remove that line")
            rows.append(row)
        return rows

    def read_validations(self) -> list[dict[str, Any]]:
        """Return the measurements that hold a validation."""
        return [row for row in self.read_metrics() if "validation" in row]

    @contextmanager
    def step_log(self, step: int, writes: bool = True) -> Iterator[StepLog]:
        """Open the log for appending, if this process ``writes``; drop rows after ``step``."""
        if not writes:
            yield StepLog(None)
            return
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_text(self.metrics, "".join(map(_line, kept)))
        file = self.metrics.open("a", encoding="utf-8")
        try:
            yield StepLog(file)
        finally:
            with add_filename_to_errors(self.metrics):  # a full disk may have room by now
                file.close()


class RunDirectory(Directory):
    """The directory of a training run, or of a shipped model."""

    command = "train"

    @property
    def used(self) -> "RunDirectory":
        """The directory to use: this one, or that of its Gaussian memory."""
        return RunDirectory(self.gaussian) if (self.gaussian / MODEL_NAME).is_file() else self

    def settings(self) -> RunSettings:
        """Read the run's settings, or say that there is no run."""
        return self.read_settings(RunSettings)


class PretrainingDirectory(Directory):
    """The directory of a pre-training."""

    command = "pretrain"

    def settings(self) -> PretrainSettings:
        """Read the pre-training's settings, or say that there is none."""
        return self.read_settings(PretrainSettings)


def shipped_names() -> list[str]:
    """Return the names of all models that ship with the package."""
    return sorted(card.parent.name for card in MODELS.glob(f"[!.]*/{CARD_NAME}"))


def shipped_folder(name: str) -> Path:
    """Return the folder of a shipped model, or say which there are."""
    if name not in shipped_names():
        raise RunError(f"model: unknown model {name!r}; known: {_known()}")
    return MODELS / name


def is_shipped(source: str | Path) -> bool:
    """Whether a shipped model is meant: there is one of that name, and nothing at that path."""
    return str(source) in shipped_names() and not Path(source).exists()


def find_run(source: str | Path) -> Path:
    """Return the folder of a run directory or of a shipped model's name; a folder goes first."""
    path = Path(source)
    if is_shipped(source):
        return MODELS / path
    if path.name == str(source) and not path.exists():
        raise RunError(
            f"{source} is not a run directory: it has no {CONFIG_NAME}; and no model of that name "
            f"ships with vsm; known: {_known()}"
        )
    return path


def read_card(folder: Path) -> Card | None:
    """Return the card in ``folder``; a plain run directory has none."""
    path = folder / CARD_NAME
    if not path.is_file():
        return None
    try:
        card = read_json(path)
    except DocumentError as error:
        raise RunError(f"{path} is damaged: {error.reason}") from error
    found: Card = card if isinstance(card, dict) else {}
    for key, kind in CARD_TYPES.items():
        if key not in found:
            raise RunError(f"{path} is not a model's card: it lacks {key}")
        if type(found[key]) is not kind:
            raise RunError(f"{path} is damaged: expected {kind.__name__} as {key}")
    return found


def shipped_card(name: str) -> Card:
    """Return the card of a shipped model, or say which there are."""
    card = read_card(shipped_folder(name))
    assert card is not None
    return card


def _known() -> str:
    return ", ".join(shipped_names()) or "none"
