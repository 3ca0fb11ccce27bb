"""Models that ship: stored small, measured before and after, described by a card."""

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsm.data import Split
from vsm.encoders.encoder import open_data
from vsm.errors import RunError, SettingsError
from vsm.evaluation.calibration import Calibration
from vsm.evaluation.evaluator import EpisodeProtocol
from vsm.evaluation.intervals import student_quantile
from vsm.runs.configuration import settings_to_yaml
from vsm.runs.directory import CARD_NAME, Card, RunDirectory, find_run
from vsm.runs.loading import load
from vsm.runs.trained_model import Comparison, Measurement, ModelOnData
from vsm.settings import RunSettings
from vsm.system.devices import ON_CPU, Placement, choose_placement
from vsm.system.files import atomic_directory, write_json, write_text
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.provenance import portable, training_commands, versions, was_learned

LARGEST_CHANGE = 0.001  # of the accuracy, by storing
LARGE = 2**20  # numbers of a matrix that is stored in half precision, if need be
LARGEST_HALF = torch.finfo(torch.float16).max
OWN_DATA_LICENSES = {"glyphs": "MIT: drawn by this package"}
SCORES = ("accuracy", "ci95", "nll", "ece")
PROTOCOL = ("split", "way", "shot", "queries", "episodes", "seed")


@dataclass(frozen=True)
class Shipment:
    """The options of ``vsm models ship``, which explains them."""

    name: str
    output: Path
    shots: tuple[int, ...] = ()
    way: int | None = None
    queries: int = 15
    episodes: int = 2000
    seed: int = 0
    storage: Literal["float16", "float32"] = "float16"
    calibrate: bool = False
    measured: tuple[Path, ...] = ()
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
        """The folder of the model."""
        return self.output / self.name

    @property
    def source(self) -> str:
        """The run directory in the card's commands; its real path means nothing elsewhere."""
        return f"runs/{self.name}"

    def protocols(self, settings: RunSettings) -> list[EpisodeProtocol]:
        """Return the measurements, one for each number of support images."""
        way = settings.way if self.way is None else self.way
        rest = (self.queries, self.episodes, self.seed)
        shots = self.shots or (settings.shot,)
        split: Split = "all" if self.measured else "test"
        return [EpisodeProtocol(settings.data, split, way, shot, *rest) for shot in shots]

    def origin(self, run: Path, settings: RunSettings) -> dict[str, Any]:
        """Return the card's licenses, commands and versions."""
        own = settings.model.own_backbone
        if own is not None:
            raise RunError(
                f"{run} was trained with code that is not part of vsm, {own}, which nobody else "
                "would have; only models of built-in backbones ship"
            )
        if settings.inference == "gaussian" and not was_learned(RunDirectory(run).used):
            raise RunError(
                f"{run} was trained through its memory; ship the memory of its features, which vsm "
                f"memory learn --encoder {run} learns"
            )
        license = self.data_license or OWN_DATA_LICENSES.get(settings.data)
        if license is None:
            raise SettingsError(
                f"data_license: the card must say under which terms {settings.data} may be used; "
                "give --data-license TEXT"
            )
        return {
            "licenses": {"code": "MIT", "data": license},
            "commands": [*self._made(settings), self._command(settings)],
            "versions": versions(),
        }

    def _made(self, settings: RunSettings) -> list[str]:
        """Return the commands that make the run, and those whose measurements stand for it."""
        commands = training_commands(settings, self.source)
        if self.measured:
            commands[-1] += " --split all"
        for path in self.measured:
            part = RunDirectory(find_run(path)).used.settings()
            commands += training_commands(part, f"runs/{path.name}")
        return commands

    def _command(self, settings: RunSettings) -> str:
        """Return the command that made the model out of the run, for a shell."""
        shots = ",".join(map(str, self.shots or (settings.shot,)))
        words = ["vsm", "models", "ship", self.source, "--name", self.name, "--shots", shots]
        for option in ("way", "queries", "episodes", "seed", "storage", "data_license"):
            value = getattr(self, option)
            if value != getattr(Shipment, option):
                words += [f"--{option.replace('_', '-')}", str(value)]
        if self.measured:
            words += ["--measured", ",".join(f"runs/{one.name}" for one in self.measured)]
        return shlex.join([*words, *(["--calibrate"] if self.calibrate else [])])


def ship(
    run: Path,
    shipment: Shipment,
    placement: Placement | None = None,
    progress: Progress = NULL_PROGRESS,
) -> Card:
    """Make a model that ships from a run, and return its card.

    The run and the stored model are measured on the same episodes. The folder appears complete, or,
    if storing changed an accuracy by more than 0.1 points, not at all.
    """
    settings = RunDirectory(find_run(run)).used.settings()
    origin, protocols = shipment.origin(run, settings), shipment.protocols(settings)
    placement = placement or choose_placement()
    original = load(run, placement=placement).on(protocols[0])
    most = len(original.dataset.classes("validation")) if shipment.calibrate else 0
    validations = [
        replace(one, split="validation", way=min(one.way, most))
        for one in (protocols if shipment.calibrate else [])
    ]
    for one in (*protocols, *validations):
        one.sampler(original.dataset)  # fails before anything is measured if images are too few
    times = (2 + len(shipment.measured)) * len(protocols) + len(validations)
    progress.start(f"measure {run}", shipment.episodes * times)
    with _folder(shipment) as folder:
        directory = RunDirectory(folder)
        write_text(directory.config, settings_to_yaml(portable(settings, shipment.source)))
        is_half = shipment.storage == "float16"
        original.trained.store(directory, to_half_precision if is_half else None)
        stored = load(folder, placement=placement).on(protocols[0])
        pairs = [_measure_both(original, stored, one, shipment, progress) for one in protocols]
        temperatures = {
            one.shot: stored.measure(one, progress).evaluation.best_temperature()
            for one in validations
        }
        found = original.trained.calibration  # measured on classes that were left out
        if not shipment.measured:
            found = stored.trained.calibrate_rejection(stored.dataset)
        found = replace(found, temperatures=temperatures)
        found.write(directory.calibration, stored.trained.encoder.fingerprint)
        card = {
            "name": shipment.name,
            **stored.trained.metadata(),
            "way": protocols[0].way,
            "shot": protocols[0].shot,
            "temperatures": {str(shot): value for shot, value in temperatures.items()} or None,
            "storage": shipment.storage,
            "bytes": _size(folder),
            "measurements": [
                _measurement(*pair, temperatures)
                | _held_out(shipment, pair[0].protocol, placement, progress)
                for pair in pairs
            ],
            **origin,
        }
        write_json(folder / CARD_NAME, card, indent=2)
        load(folder)  # as users will
    return card


def _held_out(
    shipment: Shipment, protocol: EpisodeProtocol, placement: Placement, progress: Progress
) -> dict[str, Any]:
    """Return the mean over runs that remember part of the classes, each on its test classes.

    The interval is that over the runs; their classes are other parts of the same ones.
    """
    if not shipment.measured:
        return {}
    found = []
    for path in shipment.measured:
        data = RunDirectory(find_run(path)).used.settings().data
        own = replace(protocol, split="test", data=data)
        found.append(load(path, placement=placement).on(own).measure(own, progress).as_dict())
    scores = {
        name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in SCORES
    }
    means = {name: scores[name].mean().item() for name in SCORES}
    if len(found) > 1:  # few runs: Student's interval over them
        error = scores["accuracy"].std().item() / len(found) ** 0.5
        means["ci95"] = student_quantile(len(found) - 1) * error
    parts = [{name: one[name] for name in ("data", "memory_slots", *SCORES)} for one in found]
    return {"split": "test", **means, "run": means, "parts": parts}


def calibrate(
    source: str | Path, placement: Placement = ON_CPU, backbone: str | None = None
) -> Calibration:
    """Measure the rejection thresholds of a shipped model or run again, and store them beside it.

    Weights, memory, temperatures and measurements stay as they are.
    """
    folder = RunDirectory(find_run(source)).used.path
    trained = load(source, backbone=backbone, placement=placement)
    found = trained.calibrate_rejection(open_data(trained.encoder, trained.settings.data))
    found.write(RunDirectory(folder).calibration, trained.encoder.fingerprint)
    if trained.card is not None:
        write_json(folder / CARD_NAME, {**trained.card, "bytes": _size(folder)}, indent=2)
    return found


def _size(folder: Path) -> int:
    """Return the bytes of all files of a model but its card."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != CARD_NAME)


def to_half_precision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as they are stored: kernels and matrices in half precision where they fit it.

    Vectors and scalars are few, and batch norm's variances need the range, so they stay as they
    are. So does what is not in single precision to begin with, except for the sums of a Gaussian
    memory: scatter becomes single, or half from a thousand features on, and class means half.
    """

    def stored(name: str, value: Tensor) -> Tensor:
        if value.ndim < 2 or not value.is_floating_point():
            return value
        if value.dtype == torch.float64 and name in ("shared_scatter", "factors"):
            return value.half() if value.numel() > LARGE else value.float()
        fits = value.dtype == torch.float32 or name == "content"
        return value.half() if fits and (value.abs() <= LARGEST_HALF).all() else value

    return {name: stored(name, value) for name, value in tensors.items()}


@contextmanager
def _folder(shipment: Shipment) -> Iterator[Path]:
    """Yield a temporary folder; put it in place of what is there if the block succeeds."""
    shipment.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=shipment.output, prefix=".replaced.") as aside,
        atomic_directory(shipment.folder) as temporary,
    ):
        yield temporary
        if shipment.folder.exists():
            shipment.folder.rename(Path(aside) / shipment.name)


def _measure_both(
    original: ModelOnData,
    stored: ModelOnData,
    protocol: EpisodeProtocol,
    shipment: Shipment,
    progress: Progress,
) -> tuple[Measurement, Measurement]:
    """Measure the run and the stored model, and refuse the latter if its accuracy differs."""
    before, after = (one.measure(protocol, progress) for one in (original, stored))
    change = Comparison([before, after]).differences[0].estimate.mean
    if abs(change) > LARGEST_CHANGE:
        is_half = shipment.storage == "float16"
        fix = "store it with --storage float32" if is_half else "report this as a bug"
        raise RunError(
            f"storage: {shipment.storage} changed the {protocol.way}-way {protocol.shot}-shot "
            f"accuracy by {100 * change:+.2f} points, and at most {100 * LARGEST_CHANGE} are "
            f"allowed; nothing was written; {fix}"
        )
    return before, after


def _measurement(
    before: Measurement, after: Measurement, temperatures: Mapping[int, float]
) -> dict[str, Any]:
    """Return the card's entry for one protocol."""

    def scores(measured: Measurement, *more: str) -> dict[str, Any]:
        values = measured.as_dict()
        return {key: values[key] for key in (*more, *SCORES)}

    result = scores(after, *PROTOCOL)
    if temperatures:
        scaled = after.evaluation.scale_by_temperature(temperatures[after.protocol.shot])
        result["calibrated"] = scores(replace(after, evaluation=scaled))
    [difference] = Comparison([before, after]).differences
    gap = {"accuracy": difference.estimate.mean, "ci95": difference.estimate.ci95}
    return {**result, "run": scores(before), "difference": gap}
