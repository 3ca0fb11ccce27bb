"""Runs, and baselines on their features, on identical episodes, with paired differences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from vsm.baselines import BASELINES, BaseFeatures
from vsm.data import Dataset, EpisodeSampler, Split
from vsm.errors import DataError, EpisodeError
from vsm.evaluation.evaluator import (
    Embedder,
    Evaluation,
    cached_embedder,
    evaluate,
    evaluate_classifier,
)
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import Estimate, estimate
from vsm.runs.embedding import open_data
from vsm.runs.learning import class_features, learn_from_features, named_memory
from vsm.runs.trained_model import Checkpoint, TrainedModel, load
from vsm.settings import BaselineName, BaselineSettings
from vsm.system.devices import Placement, choose_placement
from vsm.system.progress import NULL_PROGRESS, Progress

PENALTIES, TUNING_EPISODES = (0.1, 1.0, 10.0, 100.0, 1000.0), 200


@dataclass(frozen=True)
class MeasuredRun:
    """A run and how it did, or how a baseline did on its features.

    Attributes:
        baseline: what classified the model's features; None for the model itself.
        temperature: by which the model's probabilities were calibrated; 1: they were not.
    """

    trained: TrainedModel
    protocol: EpisodeProtocol
    evaluation: Evaluation
    baseline: BaselineName | None = None
    baseline_settings: BaselineSettings | None = None
    temperature: float = 1.0

    @property
    def label(self) -> str:
        """The run's name, or the baseline's: what a comparison calls it."""
        return self.baseline or self.trained.name

    def describe(self) -> str:
        """Return what classified, on whose features."""
        model = f"{self.trained.name} ({self.trained.settings.method})"
        return model if self.baseline is None else f"{self.baseline} on the features of {model}"

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints; accuracies are fractions."""
        accuracy = self.evaluation.accuracy
        memory = self.trained.state if self.baseline is None else None
        result = {
            "method": self.baseline or self.trained.settings.method,
            "inference": None if self.baseline else self.trained.inference,
            **asdict(self.protocol),
            "memory_slots": None if memory is None else len(memory),
            "accuracy": accuracy.mean,
            "ci95": accuracy.ci95,
            "nll": self.evaluation.nll,
            "ece": self.evaluation.reliability.expected_calibration_error,
        }
        if self.temperature != 1.0:
            result["temperature"] = self.temperature
        if self.baseline_settings is not None:
            result["features_of"] = self.trained.name
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
        mean, ci95 = self.estimate.mean, self.estimate.ci95
        return {"a": self.a, "b": self.b, "difference": mean, "ci95": ci95}


@dataclass(frozen=True)
class ModelOnData:
    """A trained model and the data it is measured on; features of a split are computed once.

    Attributes:
        is_other: whether these are other data than the model's, or its own as one whole.
    """

    trained: TrainedModel
    dataset: Dataset
    is_other: bool = False
    _embedders: dict[Split, Embedder] = field(default_factory=dict, repr=False, compare=False)

    def embedder(self, sampler: EpisodeSampler) -> Embedder:
        """Return the look-up of the features of the sampler's split."""
        if sampler.split not in self._embedders:
            self._embedders[sampler.split] = cached_embedder(self.trained.model, sampler)
        return self._embedders[sampler.split]

    @cached_property
    def base_features(self) -> BaseFeatures:
        """Features of the run's own training images, as in evaluation: not augmented."""
        dataset, trained = self.dataset, self.trained
        if self.is_other:
            own = trained.settings.data
            try:
                dataset = open_data(trained.model, trained.preprocessing, own, own)
            except DataError as error:
                raise DataError(
                    f"baselines: this one needs the training images of {trained.name}, {own}, that "
                    f"cannot be opened ({error}); use cosine, knn or logistic, which do not"
                ) from error
        found = class_features(trained.model, dataset, "train")
        return BaseFeatures(found.features.to(self.trained.model.device), found.sizes)

    def with_slots(self, slots: Sequence[int]) -> "ModelOnData":
        """Return the same with these slots of the memory alone, in this order.

        Class statistics are learned again from the training images of the classes that stay.
        """
        trained = self.trained
        memory = trained.memory
        assert memory is not None
        kept = list(slots)
        if not kept or memory.memory.statistics is None:
            chosen = torch.tensor(kept, dtype=torch.int64, device=memory.slots.class_ids.device)
            state = memory.slots.keep(chosen) if kept else memory.memory.first(0)
            names = tuple(memory.names[slot] for slot in kept)
            fewer = replace(memory, memory=state, names=names)
            return replace(self, trained=replace(trained, memory=fewer))
        wanted = [memory.memory.slot_classes[slot] for slot in kept]
        place = {one: n for n, one in enumerate(self.dataset.classes("train").tolist())}
        base = ClassFeatures(self.base_features.features.cpu(), self.base_features.class_sizes)
        validation = None
        if "validation" in memory.provenance[0].get("choice", {}).get("episodes_of", ""):
            validation = self._validation_features
        known = base.only([place[one] for one in wanted])
        ids = torch.tensor(wanted)
        model = trained.model
        learned = learn_from_features(model, known, ids, validation, with_thresholds=False)
        names = tuple(self.dataset.class_names[one] for one in learned.memory.slot_classes)
        named = named_memory(model, learned, names, sum(known.sizes))
        return replace(self, trained=replace(trained, memory=named))

    def first_slots(self, count: int) -> "ModelOnData":
        """Return the same with the first slots of the memory alone."""
        state = self.trained.state
        if state is None or state.statistics is None:
            return replace(self, trained=self.trained.with_slots(count))
        if count > len(state):
            raise EpisodeError(
                f"memory_slots: the memory of {self.trained.name} holds {len(state)} classes, got "
                f"{count}"
            )
        return self if count == len(state) else self.with_slots(range(count))

    @cached_property
    def _validation_features(self) -> ClassFeatures:
        return class_features(self.trained.model, self.dataset, "validation")


def load_for(
    source: str | Path,
    protocol: EpisodeProtocol,
    checkpoint: Checkpoint = "best",
    backbone: str | None = None,
    placement: Placement | None = None,
) -> ModelOnData:
    """Load a model as :func:`vsm.load` does, and the data that ``protocol`` measures it on."""
    placement = placement or choose_placement()
    trained = load(source, checkpoint=checkpoint, backbone=backbone, placement=placement)
    return on_data(trained, protocol)


def on_data(
    trained: TrainedModel, protocol: EpisodeProtocol, progress: Progress = NULL_PROGRESS
) -> ModelOnData:
    """Open the data that ``protocol`` measures ``trained`` on, its memory cut as that says.

    Pictures of other data than the model's are prepared as the model wants them, and embedded.
    """
    count, own = protocol.memory_slots, trained.settings.data
    if count is not None and trained.memory is not None and own != protocol.data:
        trained = trained.with_slots(count)
    dataset = open_data(
        trained.model,
        trained.preprocessing,
        own,
        protocol.data,
        as_a_whole=protocol.split == "all",
        progress=progress,
    )
    subject = ModelOnData(trained, dataset, own != protocol.data or protocol.split == "all")
    if count is None or trained.memory is None or own != protocol.data:
        return subject
    return subject.first_slots(count)


def evaluate_run(
    source: str | Path,
    protocol: EpisodeProtocol,
    checkpoint: Checkpoint = "best",
    progress: Progress = NULL_PROGRESS,
    placement: Placement | None = None,
) -> MeasuredRun:
    """Load a model as :func:`load_for` does, and measure it under ``protocol``."""
    return measure(load_for(source, protocol, checkpoint, None, placement), protocol, progress)


def measure(
    subject: ModelOnData,
    protocol: EpisodeProtocol,
    progress: Progress = NULL_PROGRESS,
    temperature: float = 1.0,
) -> MeasuredRun:
    """Measure a model, its probabilities calibrated by ``temperature``."""
    sampler = protocol.sampler(subject.dataset)
    evaluation = evaluate(
        subject.trained.model,
        subject.trained.state,
        sampler,
        protocol.episodes,
        protocol.seed,
        protocol.batch_norm,
        progress,
        subject.embedder(sampler) if protocol.batch_norm == "inductive" else None,
        temperature,
    )
    return MeasuredRun(subject.trained, protocol, evaluation, temperature=temperature)


def measure_baseline(
    subject: ModelOnData,
    name: BaselineName,
    protocol: EpisodeProtocol,
    settings: BaselineSettings,
    progress: Progress = NULL_PROGRESS,
) -> MeasuredRun:
    """Measure a baseline on the features of a model, on the episodes that the model sees."""
    if protocol.batch_norm != "inductive":
        raise EpisodeError(
            f"batch_norm: the baseline {name} needs features that do not depend on the episode; "
            "leave transductive batch norm out"
        )
    if name == "logistic-tuned":
        settings = _with_best_penalty(subject, protocol, settings)
    evaluation = _evaluate_baseline(subject, name, protocol, settings, progress)
    return MeasuredRun(subject.trained, protocol, evaluation, name, settings)


def _with_best_penalty(
    subject: ModelOnData, protocol: EpisodeProtocol, settings: BaselineSettings
) -> BaselineSettings:
    """Choose C of logistic regression by its accuracy on episodes of validation classes."""
    if "validation" not in subject.dataset.splits:
        raise EpisodeError(
            "baselines: logistic-tuned chooses C on validation classes, which these data do not "
            "have; use logistic, or leave out --split all"
        )
    way = min(protocol.way, len(subject.dataset.classes("validation")))
    tried = replace(protocol, split="validation", way=way, episodes=TUNING_EPISODES, seed=0)
    candidates = [replace(settings, inverse_penalty=penalty) for penalty in PENALTIES]
    scores = [
        _evaluate_baseline(subject, "logistic", tried, one).accuracy.mean for one in candidates
    ]
    return candidates[scores.index(max(scores))]


def _evaluate_baseline(
    subject: ModelOnData,
    name: BaselineName,
    protocol: EpisodeProtocol,
    settings: BaselineSettings,
    progress: Progress = NULL_PROGRESS,
) -> Evaluation:
    sampler = protocol.sampler(subject.dataset)
    baseline = BASELINES[name](settings, lambda: subject.base_features)
    shape = (protocol.way, protocol.shot, protocol.queries, subject.trained.model.num_features)
    return evaluate_classifier(
        baseline.fit_predict,
        subject.embedder(sampler),
        sampler,
        protocol.episodes,
        protocol.seed,
        baseline.elements_per_task(*shape),
        progress,
    )


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
