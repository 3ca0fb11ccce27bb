"""Making a model that ships: stored small, measured before and after, described by a card."""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsm.data import Dataset, open_dataset
from vsm.errors import RunError, SettingsError
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.experiments.comparison import (
    Difference,
    MeasuredRun,
    ModelOnData,
    load_for,
    measure,
    paired_differences,
)
from vsm.experiments.provenance import portable, training_commands, versions
from vsm.runs.calibration import Calibration
from vsm.runs.configuration import settings_to_yaml
from vsm.runs.directory import RunDirectory
from vsm.runs.shipped import CARD_NAME, Card, find_run, read_card
from vsm.runs.trained_model import calibrate_rejection, load, store
from vsm.settings import RunSettings
from vsm.system.devices import ON_CPU, Placement
from vsm.system.files import atomic_directory, write_text
from vsm.system.progress import NULL_PROGRESS, Progress

LARGEST_CHANGE = 0.001  # of the accuracy, by storing
LARGEST_HALF = torch.finfo(torch.float16).max
CODE_LICENSE = "MIT"
OWN_DATA_LICENSES = {"glyphs": "MIT: drawn by this package"}
SCORES = ("accuracy", "ci95", "nll", "ece")
PROTOCOL = ("split", "way", "shot", "queries", "episodes", "seed")

Storage = Literal["float16", "float32"]


@dataclass(frozen=True)
class Shipment:
    """What is to be made out of a run, and how it is measured.

    Attributes:
        name: by which the model is loaded.
        output: the folder in which a folder of that name is made.
        shots: support images per class, one measurement each; empty: the run's own.
        way: classes of an episode; None: the run's own.
        queries: query images per class.
        episodes: of each measurement.
        seed: of the list of episodes.
        storage: of kernels, matrices and memory contents.
        calibrate: whether to fit a temperature for each of the shots on validation classes.
        data_license: of the data the model was trained on; known for built-in data.
        overwrite: whether to replace a model of the same name.
    """

    name: str
    output: Path
    shots: tuple[int, ...] = ()
    way: int | None = None
    queries: int = 15
    episodes: int = 2000
    seed: int = 0
    storage: Storage = "float16"
    calibrate: bool = False
    data_license: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", self.name):
            raise SettingsError(
                "name: expected lowercase letters and digits with single dashes or dots between "
                f"them, got {self.name!r}"
            )
        if self.folder.exists() and not self.overwrite:
            raise RunError(
                f"output: {self.folder} is there already; replace it with --overwrite, or choose "
                "another --name or --output"
            )
        if self.folder.exists() and not (self.folder / CARD_NAME).is_file():
            raise RunError(f"output: {self.folder} holds no model; choose another --output")

    @property
    def folder(self) -> Path:
        """Where the model goes."""
        return self.output / self.name

    @property
    def source(self) -> str:
        """What the card calls the run directory, which had another name on another machine."""
        return f"runs/{self.name}"

    def protocols(self, settings: RunSettings) -> list[EpisodeProtocol]:
        """Return the measurements, one for each number of support images."""
        shots = self.shots or (settings.shot,)
        way = settings.way if self.way is None else self.way
        return [
            EpisodeProtocol(
                settings.data, "test", way, shot, self.queries, self.episodes, self.seed
            )
            for shot in shots
        ]

    def num_episodes(self) -> int:
        """Episodes that are classified in all, for a progress bar."""
        return self.episodes * max(1, len(self.shots)) * (4 if self.calibrate else 2)

    def command(self, settings: RunSettings) -> str:
        """Return the command that made the model out of the run, for a shell."""
        shots = ",".join(str(protocol.shot) for protocol in self.protocols(settings))
        words = ["vsm", "models", "ship", self.source, "--name", self.name, "--shots", shots]
        for option in ("way", "queries", "episodes", "seed", "storage", "data_license"):
            value = getattr(self, option)
            if value != getattr(Shipment, option):
                words += [f"--{option.replace('_', '-')}", str(value)]
        return shlex.join([*words, *(["--calibrate"] if self.calibrate else [])])


def ship(
    run: Path,
    shipment: Shipment,
    placement: Placement | None = None,
    progress: Progress = NULL_PROGRESS,
) -> Card:
    """Make a model that ships out of a run, and return its card.

    The run and the stored model are measured on the same episodes. The folder appears complete, or,
    if storing changed the accuracy, not at all.

    Args:
        run: a run directory.
        shipment: what is to be made.
        placement: where the measuring is done; chosen if not given.
        progress: told of every batch of episodes.

    Raises:
        RunError: if storing changed an accuracy by more than 0.1 points, or what the card must say
            cannot be found out.
    """
    settings = RunDirectory(find_run(run)).settings()
    origin = _origin(run, settings, shipment)
    protocols = shipment.protocols(settings)
    original = load_for(run, protocols[0], placement=placement)
    validations = _validations(protocols, original.dataset) if shipment.calibrate else []
    for one in (*protocols, *validations):
        one.sampler(original.dataset)  # says it before anything is measured if images are too few
    progress.start(f"measure {run}", shipment.num_episodes())
    with _folder(shipment) as folder:
        stored = _stored(original, folder, shipment, placement)
        pairs = [_measure_both(original, stored, one, shipment, progress) for one in protocols]
        temperatures = _temperatures(stored, validations, progress)
        _write_calibration(folder, stored, temperatures)
        card = {
            "name": shipment.name,
            **stored.trained.metadata,
            "way": protocols[0].way,
            "shot": protocols[0].shot,
            "temperatures": {str(shot): value for shot, value in temperatures.items()} or None,
            "storage": shipment.storage,
            "bytes": _size(folder),
            "measurements": [_measurement(pair, stored, temperatures, progress) for pair in pairs],
            **origin,
        }
        _write_card(folder, card)
        load(folder)  # as whoever gets it will
    return card


def calibrate(source: str | Path, placement: Placement = ON_CPU) -> Calibration:
    """Measure again when a model answers "none of these", and store that beside it.

    Weights, memory, temperatures and measurements stay as they are.

    Args:
        source: the name of a shipped model, or a run directory.
        placement: where the measuring is done.
    """
    folder = find_run(source)
    trained = load(source, placement=placement)
    found = calibrate_rejection(trained, open_dataset(trained.settings.data))
    found.write(RunDirectory(folder).calibration, trained.encoder.fingerprint)
    card = read_card(folder)
    if card is not None:
        _write_card(folder, {**card, "bytes": _size(folder)})
    return found


def _write_calibration(
    folder: Path, stored: ModelOnData, temperatures: Mapping[int, float]
) -> None:
    found = replace(calibrate_rejection(stored.trained, stored.dataset), temperatures=temperatures)
    found.write(RunDirectory(folder).calibration, stored.trained.encoder.fingerprint)


def _write_card(folder: Path, card: Card) -> None:
    write_text(folder / CARD_NAME, json.dumps(card, indent=2, ensure_ascii=False) + "\n")


def _size(folder: Path) -> int:
    """Return the bytes of all files of a model but its card."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != CARD_NAME)


def _origin(run: Path, settings: RunSettings, shipment: Shipment) -> dict[str, Any]:
    """Return what the card says of how the model was made and under which terms."""
    if settings.model.own_backbone is not None:
        raise RunError(
            f"{run} was trained with code that is not part of vsm, {settings.model.own_backbone}, "
            "which nobody else would have; only models of built-in backbones ship"
        )
    license = shipment.data_license or OWN_DATA_LICENSES.get(settings.data)
    if license is None:
        raise SettingsError(
            f"data_license: the card must say under which terms {settings.data} may be used; give "
            "--data-license TEXT"
        )
    return {
        "licenses": {"code": CODE_LICENSE, "data": license},
        "commands": [*training_commands(settings, shipment.source), shipment.command(settings)],
        "versions": versions(),
    }


def _stored(
    original: ModelOnData, folder: Path, shipment: Shipment, placement: Placement | None
) -> ModelOnData:
    """Write the files of a model, and load them as whoever gets them will."""
    settings, run = original.trained.settings, RunDirectory(folder)
    write_text(run.config, settings_to_yaml(portable(settings, shipment.source)))
    store(run, original.trained, halved if shipment.storage == "float16" else dict)
    return load_for(folder, shipment.protocols(settings)[0], placement=placement)


def halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as they are stored: kernels and matrices in half precision where they fit it.

    Vectors and scalars are few, and batch norm's variances want the range, so they stay as they
    are; so does what is not in single precision to begin with.
    """
    return {name: value.half() if _may_halve(value) else value for name, value in tensors.items()}


def _may_halve(value: Tensor) -> bool:
    wide = value.dtype == torch.float32 and value.ndim >= 2
    return wide and bool((value.abs() <= LARGEST_HALF).all())


@contextmanager
def _folder(shipment: Shipment) -> Iterator[Path]:
    """Yield a temporary folder; put it in place of what is there if the block succeeds."""
    with (
        tempfile.TemporaryDirectory(dir=_made(shipment.output), prefix=".replaced.") as aside,
        atomic_directory(shipment.folder) as temporary,
    ):
        yield temporary
        if shipment.folder.exists():
            shipment.folder.rename(Path(aside) / shipment.name)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


Pair = tuple[MeasuredRun, MeasuredRun, Difference]


def _measure_both(
    original: ModelOnData,
    stored: ModelOnData,
    protocol: EpisodeProtocol,
    shipment: Shipment,
    progress: Progress,
) -> Pair:
    """Measure the run and the stored model, and refuse the latter if it is another one."""
    before, after = (measure(one, protocol, progress) for one in (original, stored))
    [difference] = paired_differences([before, after])
    change = difference.estimate.mean
    if abs(change) > LARGEST_CHANGE:
        was_halved = shipment.storage == "float16"
        fix = "store it with --storage float32" if was_halved else "report this as a bug"
        raise RunError(
            f"storage: {shipment.storage} changed the {protocol.way}-way {protocol.shot}-shot "
            f"accuracy by {100 * change:+.2f} points, and at most {100 * LARGEST_CHANGE} are "
            f"allowed; nothing was written; {fix}"
        )
    return before, after, difference


def _measurement(
    pair: Pair, stored: ModelOnData, temperatures: Mapping[int, float], progress: Progress
) -> dict[str, Any]:
    """Return what the card says of one protocol."""
    before, after, difference = pair
    measured = after.as_dict()
    result = {key: measured[key] for key in (*PROTOCOL, *SCORES)}
    if temperatures:
        temperature = temperatures[after.protocol.shot]
        calibrated = measure(stored, after.protocol, progress, temperature).as_dict()
        result["calibrated"] = {key: calibrated[key] for key in SCORES}
    result["run"] = {key: before.as_dict()[key] for key in SCORES}
    result["difference"] = {
        "accuracy": difference.estimate.mean,
        "ci95": difference.estimate.ci95,
    }
    return result


def _validations(protocols: Sequence[EpisodeProtocol], dataset: Dataset) -> list[EpisodeProtocol]:
    """Return the same of validation classes; of fewer at a time where there are fewer."""
    most = len(dataset.classes("validation"))
    return [replace(one, split="validation", way=min(one.way, most)) for one in protocols]


def _temperatures(
    stored: ModelOnData, protocols: Sequence[EpisodeProtocol], progress: Progress
) -> dict[int, float]:
    """Fit a temperature for each number of support images."""
    return {
        protocol.shot: measure(stored, protocol, progress).evaluation.best_temperature()
        for protocol in protocols
    }
