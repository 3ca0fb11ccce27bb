"""Runs, and baselines on their features, on identical episodes, with paired differences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from vsm.baselines import BASELINES, BaseFeatures
from vsm.data import Dataset, EpisodeSampler, Split, open_dataset
from vsm.errors import EpisodeError, RunError
from vsm.evaluation.evaluator import (
    Advance,
    BatchNormMode,
    Embedder,
    Evaluation,
    cached_embedder,
    embed_images,
    evaluate,
    evaluate_classifier,
    unwatched,
)
from vsm.evaluation.statistics import Estimate, estimate
from vsm.runs.shipped import read_card
from vsm.runs.trained_model import Checkpoint, RunDirectory, TrainedModel, load_run
from vsm.settings import BaselineName, BaselineSettings
from vsm.system.devices import Placement, choose_placement


@dataclass(frozen=True)
class EpisodeProtocol:
    """Which episodes a model is measured on, and how."""

    data: str
    split: Split
    way: int
    shot: int
    queries: int
    episodes: int
    seed: int
    batch_norm: BatchNormMode = "inductive"
    memory_slots: int | None = None

    def __post_init__(self) -> None:
        if self.episodes < 2:
            raise EpisodeError(f"episodes: an interval needs at least 2, got {self.episodes}")
        if self.memory_slots is not None and self.memory_slots < 0:
            raise EpisodeError(f"memory_slots: must not be negative, got {self.memory_slots}")

    def describe(self) -> str:
        """Return the protocol in one line for people."""
        unusual = ", transductive batch norm" if self.batch_norm == "transductive" else ""
        if self.memory_slots is not None:
            unusual += f", memory cut to its first {self.memory_slots} slots"
        return (
            f"{self.data}, {self.split} classes, {self.way}-way {self.shot}-shot, {self.queries} "
            f"queries a class, {self.episodes} episodes, seed {self.seed}{unusual}"
        )

    def sampler(self, dataset: Dataset) -> EpisodeSampler:
        """Return the sampler of these episodes."""
        return EpisodeSampler(dataset, self.split, self.way, self.shot, self.queries)

    @staticmethod
    def of(run: Path, options: Any) -> "EpisodeProtocol":
        """Take the episodes from the command line's options; what is unset comes from ``run``.

        For a shipped model that is what its card measured first, not what it was trained on.
        """
        directory = RunDirectory.find(run)
        settings, card = directory.settings(), read_card(directory.path)
        usual = (settings.way, settings.shot) if card is None else (card["way"], card["shot"])
        return EpisodeProtocol(
            data=settings.data,
            split=options.split,
            way=usual[0] if options.way is None else options.way,
            shot=usual[1] if options.shot is None else options.shot,
            queries=options.queries,
            episodes=options.episodes,
            seed=options.seed,
            batch_norm=options.batch_norm,
            memory_slots=options.memory_slots,
        )


@dataclass(frozen=True)
class MeasuredRun:
    """A run and how it did, or how a baseline did on its features.

    Attributes:
        path: the run directory, or the name of a shipped model.
        trained: its model.
        protocol: which episodes.
        evaluation: the outcomes.
        baseline: what classified the model's features; nothing for the model itself.
        baseline_settings: its hyper-parameters.
        temperature: of the model's probabilities, by which they were calibrated; 1: they were not.
    """

    path: Path
    trained: TrainedModel
    protocol: EpisodeProtocol
    evaluation: Evaluation
    baseline: BaselineName | None = None
    baseline_settings: BaselineSettings | None = None
    temperature: float = 1.0

    @property
    def label(self) -> str:
        """The run's path, or the baseline's name: what a comparison calls it."""
        return self.baseline or str(self.path)

    def describe(self) -> str:
        """Return what classified, on whose features."""
        if self.baseline is None:
            return f"{self.path} ({self.trained.settings.method})"
        return f"{self.baseline} on the features of {self.path} ({self.trained.settings.method})"

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints; accuracies are fractions."""
        accuracy = self.evaluation.accuracy
        memory = self.trained.memory if self.baseline is None else None
        result = {
            "method": self.baseline or self.trained.settings.method,
            "data": self.protocol.data,
            "split": self.protocol.split,
            "way": self.protocol.way,
            "shot": self.protocol.shot,
            "queries": self.protocol.queries,
            "episodes": self.protocol.episodes,
            "seed": self.protocol.seed,
            "batch_norm": self.protocol.batch_norm,
            "memory_slots": None if memory is None else len(memory),
            "accuracy": accuracy.mean,
            "ci95": accuracy.ci95,
            "nll": self.evaluation.nll,
            "ece": self.evaluation.reliability.expected_calibration_error,
        }
        if self.temperature != 1.0:
            result["temperature"] = self.temperature
        if self.baseline_settings is not None:
            result["features_of"] = str(self.path)
            result["baseline_settings"] = asdict(self.baseline_settings)
        return result


@dataclass(frozen=True)
class Difference:
    """How much more accurate ``a`` is than ``b``, over episodes that both saw."""

    a: str
    b: str
    estimate: Estimate

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "a": self.a,
            "b": self.b,
            "difference": self.estimate.mean,
            "ci95": self.estimate.ci95,
        }


@dataclass(frozen=True)
class LoadedRun:
    """A run with its data; the features of a split are computed once."""

    path: Path
    trained: TrainedModel
    dataset: Dataset
    _embedders: dict[Split, Embedder] = field(default_factory=dict, repr=False, compare=False)

    def embedder(self, sampler: EpisodeSampler) -> Embedder:
        """Return the look-up of the features of the sampler's split."""
        if sampler.split not in self._embedders:
            self._embedders[sampler.split] = cached_embedder(self.trained.model, sampler)
        return self._embedders[sampler.split]

    @cached_property
    def base_features(self) -> BaseFeatures:
        """Features of the training images, as they are in evaluation: not augmented."""
        image_ids = torch.from_numpy(self.dataset.split_ids("train"))
        features = embed_images(self.trained.model, self.dataset, image_ids)
        sizes = self.dataset.class_sizes[self.dataset.classes("train")]
        return BaseFeatures(features, sizes.tolist())


def load_for(
    path: Path,
    protocol: EpisodeProtocol,
    checkpoint: Checkpoint = "best",
    backbone: str | None = None,
    placement: Placement | None = None,
) -> LoadedRun:
    """Load a run that is to be measured under ``protocol``; the rest is as in ``load_run``.

    Where it computes is chosen if no placement is given.
    """
    trained_on = RunDirectory.find(path).settings().data
    if trained_on != protocol.data:
        raise RunError(
            f"{path} was trained on {trained_on}, but the episodes are of {protocol.data}; "
            "compare runs of one dataset"
        )
    dataset = open_dataset(protocol.data)
    trained = load_run(path, dataset, checkpoint, backbone, placement or choose_placement())
    if protocol.memory_slots is not None:
        trained = trained.with_slots(protocol.memory_slots)
    return LoadedRun(path, trained, dataset)


def evaluate_run(
    path: Path,
    protocol: EpisodeProtocol,
    checkpoint: Checkpoint = "best",
    advance: Advance = unwatched,
    backbone: str | None = None,
    placement: Placement | None = None,
) -> MeasuredRun:
    """Load one run as :func:`load_for` does, and measure it under ``protocol``."""
    loaded = load_for(path, protocol, checkpoint, backbone, placement)
    return measure(loaded, protocol, advance)


def measure(
    run: LoadedRun,
    protocol: EpisodeProtocol,
    advance: Advance = unwatched,
    temperature: float = 1.0,
) -> MeasuredRun:
    """Measure the model of a loaded run, its probabilities calibrated by ``temperature``."""
    sampler = protocol.sampler(run.dataset)
    evaluation = evaluate(
        run.trained.model,
        run.trained.memory,
        sampler,
        protocol.episodes,
        protocol.seed,
        protocol.batch_norm,
        advance,
        run.embedder(sampler) if protocol.batch_norm == "inductive" else None,
        temperature,
    )
    return MeasuredRun(run.path, run.trained, protocol, evaluation, temperature=temperature)


def measure_baseline(
    run: LoadedRun,
    name: BaselineName,
    protocol: EpisodeProtocol,
    settings: BaselineSettings,
    advance: Advance = unwatched,
) -> MeasuredRun:
    """Measure a baseline on the features of a loaded run, on the episodes that its model sees."""
    if protocol.batch_norm != "inductive":
        raise EpisodeError(
            f"batch_norm: the baseline {name} needs features that do not depend on the episode; "
            "leave transductive batch norm out"
        )
    sampler = protocol.sampler(run.dataset)
    baseline = BASELINES[name](settings, lambda: run.base_features)
    evaluation = evaluate_classifier(
        baseline.fit_predict,
        run.embedder(sampler),
        sampler,
        protocol.episodes,
        protocol.seed,
        baseline.elements_per_task(
            protocol.way, protocol.shot, protocol.queries, run.trained.model.num_features
        ),
        advance,
    )
    return MeasuredRun(run.path, run.trained, protocol, evaluation, name, settings)


def paired_differences(measured: Sequence[MeasuredRun]) -> list[Difference]:
    """Return every pair's difference, later one minus earlier one, episode by episode."""
    return [
        Difference(
            later.label,
            earlier.label,
            estimate(later.evaluation.episode_accuracies - earlier.evaluation.episode_accuracies),
        )
        for earlier, later in combinations(measured, 2)
    ]
