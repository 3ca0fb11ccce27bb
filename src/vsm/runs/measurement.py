"""Trained models, and baselines on their features, on identical episodes, with differences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vsm.baselines import BASELINES, BaseFeatures
from vsm.data import Dataset
from vsm.encoders.embedding import open_data
from vsm.errors import DataError, EpisodeError
from vsm.evaluation.evaluator import (
    EpisodeProtocol,
    Evaluation,
    evaluate,
    evaluate_classifier,
    split_embedder,
)
from vsm.evaluation.intervals import Estimate, estimate
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.learning import class_features, learn_statistics, name_memory
from vsm.settings import BaselineName, BaselineSettings
from vsm.system.progress import NULL_PROGRESS, Progress

if TYPE_CHECKING:
    from vsm.runs.trained_model import TrainedModel

PENALTIES, TUNING_EPISODES = (0.1, 1.0, 10.0, 100.0, 1000.0), 200


@dataclass(frozen=True)
class Measurement:
    """How a model did, or a baseline on its features.

    Attributes:
        baseline: what classified the model's features; None for the model itself.
        temperature: by which the model's probabilities were calibrated; 1: they were not.
    """

    trained: "TrainedModel"
    protocol: EpisodeProtocol
    evaluation: Evaluation
    baseline: BaselineName | None = None
    baseline_settings: BaselineSettings | None = None
    temperature: float = 1.0

    @property
    def accuracy(self) -> Estimate:
        """Mean accuracy with its interval over episodes."""
        return self.evaluation.accuracy

    @property
    def label(self) -> str:
        """The model's name, or the baseline's: what a comparison calls it."""
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


class Difference(NamedTuple):
    """How much more accurate ``a`` is than ``b``, over episodes that both saw."""

    a: str
    b: str
    estimate: Estimate


@dataclass(frozen=True)
class Comparison:
    """Measurements on the same episodes."""

    measured: Sequence[Measurement]

    @property
    def differences(self) -> list[Difference]:
        """Every pair's difference, later one minus earlier one, episode by episode."""
        accuracies = [(one.label, one.evaluation.episode_accuracies) for one in self.measured]
        return [
            Difference(later, earlier, estimate(of_later - of_earlier))
            for (earlier, of_earlier), (later, of_later) in combinations(accuracies, 2)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints: every run, every baseline, and every difference."""
        measured = self.measured
        return {
            "runs": [{"run": one.label, **one.as_dict()} for one in measured if not one.baseline],
            "baselines": [one.as_dict() for one in measured if one.baseline],
            "differences": [
                {"a": a, "b": b, "difference": found.mean, "ci95": found.ci95}
                for a, b, found in self.differences
            ],
        }


@dataclass(frozen=True)
class ModelOnData:
    """A trained model and the data it is measured on.

    Attributes:
        is_other: whether these are other data than the model's, or its own with merged splits.
    """

    trained: "TrainedModel"
    dataset: Dataset
    is_other: bool = False

    def measure(
        self,
        protocol: EpisodeProtocol,
        progress: Progress = NULL_PROGRESS,
        temperature: float = 1.0,
    ) -> Measurement:
        """Measure the model, its probabilities calibrated by ``temperature``."""
        trained = self.trained
        evaluation = evaluate(
            trained.model,
            trained.state,
            protocol.sampler(self.dataset),
            protocol.episodes,
            protocol.seed,
            protocol.batch_norm,
            progress,
            temperature,
        )
        return Measurement(trained, protocol, evaluation, temperature=temperature)

    def measure_baseline(
        self,
        name: BaselineName,
        protocol: EpisodeProtocol,
        settings: BaselineSettings,
        progress: Progress = NULL_PROGRESS,
    ) -> Measurement:
        """Measure a baseline on the model's features, on the episodes that the model sees."""
        if protocol.batch_norm != "inductive":
            raise EpisodeError(
                f"batch_norm: the baseline {name} needs features that do not depend on the "
                "episode; leave transductive batch norm out"
            )
        if name == "logistic-tuned":
            settings = self._with_best_penalty(protocol, settings)
        evaluation = self._evaluate_baseline(name, protocol, settings, progress)
        return Measurement(self.trained, protocol, evaluation, name, settings)

    def _with_best_penalty(
        self, protocol: EpisodeProtocol, settings: BaselineSettings
    ) -> BaselineSettings:
        """Choose C of logistic regression by its accuracy on episodes of validation classes."""
        if "validation" not in self.dataset.splits:
            raise EpisodeError(
                "baselines: logistic-tuned chooses C on validation classes, which these data do "
                "not have; use logistic, or leave out --split all"
            )
        way = min(protocol.way, len(self.dataset.classes("validation")))
        tried = replace(protocol, split="validation", way=way, episodes=TUNING_EPISODES, seed=0)
        candidates = [replace(settings, inverse_penalty=penalty) for penalty in PENALTIES]
        scores = [
            self._evaluate_baseline("logistic", tried, one).accuracy.mean for one in candidates
        ]
        return candidates[scores.index(max(scores))]

    def _evaluate_baseline(
        self,
        name: BaselineName,
        protocol: EpisodeProtocol,
        settings: BaselineSettings,
        progress: Progress = NULL_PROGRESS,
    ) -> Evaluation:
        sampler = protocol.sampler(self.dataset)
        baseline = BASELINES[name](settings, lambda: self.base_features)
        shape = (protocol.way, protocol.shot, protocol.queries, self.trained.model.num_features)
        return evaluate_classifier(
            baseline.fit_predict,
            split_embedder(self.trained.encoder, sampler),
            sampler,
            protocol.episodes,
            protocol.seed,
            baseline.elements_per_task(*shape),
            progress,
        )

    @cached_property
    def base_features(self) -> BaseFeatures:
        """Features of the model's own training images, as in evaluation: not augmented."""
        dataset, trained = self.dataset, self.trained
        if self.is_other:
            own = trained.settings.data
            try:
                dataset = open_data(trained.encoder, own)
            except DataError as error:
                raise DataError(
                    f"baselines: this one needs the training images of {trained.name}, {own}, that "
                    f"cannot be opened ({error}); use cosine, knn or logistic, which do not"
                ) from error
        found = class_features(trained.encoder, dataset, "train")
        return BaseFeatures(found.features.to(trained.model.device), found.sizes)

    def with_slots(self, slots: Sequence[int]) -> "ModelOnData":
        """Return the same model with only these slots of its memory, in this order.

        Class statistics are learned again from the training images of the classes that stay.
        """
        trained = self.trained
        memory, kept = trained.memory, list(slots)
        assert memory is not None
        if not kept or memory.memory.statistics is None:
            chosen = torch.tensor(kept, dtype=torch.int64, device=memory.slots.class_ids.device)
            state = memory.slots.keep(chosen) if kept else memory.memory.first(0)
            names = tuple(memory.names[slot] for slot in kept)
            fewer = replace(memory, memory=state, names=names)
            return replace(self, trained=replace(trained, memory=fewer))
        wanted = [memory.memory.slot_classes[slot] for slot in kept]
        place = {one: n for n, one in enumerate(self.dataset.classes("train").tolist())}
        base = ClassFeatures(self.base_features.features.cpu(), self.base_features.class_sizes)
        known, validation = base.only([place[one] for one in wanted]), None
        if "validation" in memory.provenance[0].get("choice", {}).get("episodes_of", ""):
            validation = class_features(trained.encoder, self.dataset, "validation")
        learned = learn_statistics(
            trained.model, known, torch.tensor(wanted), validation, with_thresholds=False
        )
        names = tuple(self.dataset.class_names[one] for one in learned.memory.slot_classes)
        named = name_memory(trained.model, learned, names, sum(known.sizes))
        return replace(self, trained=replace(trained, memory=named))

    def first_slots(self, count: int) -> "ModelOnData":
        """Return the same model with only the first slots of its memory."""
        state = self.trained.state
        if state is None or state.statistics is None:
            return replace(self, trained=self.trained.with_slots(count))
        if count > len(state):
            raise EpisodeError(
                f"memory_slots: the memory of {self.trained.name} holds {len(state)} classes, got "
                f"{count}"
            )
        return self if count == len(state) else self.with_slots(range(count))
