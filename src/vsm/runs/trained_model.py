"""A trained model, ready for use: evaluate it, compare it, classify with it.

:func:`vsm.load` returns one, and so does :func:`vsm.train`. Models and baselines are measured on
identical episodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from vsm.baselines import BASELINES, BaseFeatures, Baseline, BaselineKind
from vsm.data import Dataset
from vsm.data.episodes import Proportions
from vsm.data.images import Preprocessing
from vsm.encoders import Encoder, EncoderIdentity
from vsm.encoders.encoder import open_data
from vsm.errors import ClassifierError, DataError, EpisodeError, RunError
from vsm.evaluation.calibration import (
    NO_CALIBRATION,
    Calibration,
    Thresholds,
    calibrate_on_validation,
    memory_digest,
)
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
from vsm.memory import Assigned, Consolidation, Memory, Posterior, Transduction, transduce
from vsm.memory.named import NamedMemory, manual_consolidation, trained_memory
from vsm.memory.transduction import COVERAGE
from vsm.model import FewShotModel
from vsm.runs.checkpoints import input_metadata
from vsm.runs.directory import Card, RunDirectory
from vsm.settings import BaselineName, BaselineSettings, RunSettings
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import save_tensors

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier

PENALTIES, TUNING_EPISODES = (0.1, 1.0, 10.0, 100.0, 1000.0), 200
USUAL_PROPORTIONS: tuple[Proportions, ...] = ("balanced", 2.0)
USUAL_OUTLIERS, USUAL_WAY = (0.0, 0.3), 5
USUAL_EPISODES = {"split": "test", "queries": 15, "episodes": 2000, "seed": 0}


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and all that using it needs. Nothing in it is ever changed.

    Attributes:
        name: what the user called it.
        path: its run directory; None if it was made in memory.
        model: in evaluation mode.
        memory: with the names of its slots; None for methods without a memory.
        calibration: temperatures, rejection thresholds, and how unlabeled images are used.
        step: the training step it was saved at.
        card: of a shipped model; None for a run.
    """

    name: str
    path: Path | None
    model: FewShotModel
    memory: NamedMemory | None = None
    calibration: Calibration = NO_CALIBRATION
    step: int = 0
    card: Card | None = None

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        return self  # read-only, so that copies of estimators can share it

    @property
    def settings(self) -> RunSettings:
        """Of the run that trained it."""
        return self.model.settings

    @property
    def encoder(self) -> Encoder:
        """What turns images into features."""
        return self.model.encoder

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How images become inputs; None if the model takes features."""
        return self.encoder.preprocessing

    @property
    def state(self) -> Memory | None:
        """The bare memory, as the model reads it; None for methods without a memory."""
        return None if self.memory is None else self.memory.memory

    @property
    def inference(self) -> str | None:
        """How prototypes are inferred; None where they are means of features."""
        return None if self.settings.method == "protonet" else self.settings.inference

    @property
    def can_use_unlabeled(self) -> bool:
        """Whether its inference can use unlabeled images, as far as the settings tell."""
        by_distance = self.settings.model.distance == "squared_euclidean"
        return self.inference == "gaussian" or (self.inference == "conjugate" and by_distance)

    def metadata(self) -> dict[str, Any]:
        """Return what a card says of the model besides what was measured, ready for JSON."""
        settings = self.settings
        return {
            "method": settings.method,
            "inference": self.inference,
            "data": settings.data,
            "way": settings.way,
            "shot": settings.shot,
            "step": self.step,
            "backbone": None if self.model.backbone is None else settings.model.backbone,
            **input_metadata(self.encoder),
            "num_features": self.model.num_features,
            "num_parameters": sum(value.numel() for value in self.model.parameters()),
            "memory_slots": None if self.memory is None else len(self.memory.memory),
            "encoder": self.encoder.identity._asdict(),
        }

    # Measuring

    def _protocol(self, data: str | None, episodes: dict[str, Any]) -> EpisodeProtocol:
        # A shipped model's own are those that its card measured first, not those of training.
        known = vars(self.settings) if self.card is None else self.card
        usual = {"way": known["way"], "shot": known["shot"], **USUAL_EPISODES}
        given = {name: value for name, value in episodes.items() if value is not None}
        return EpisodeProtocol(data or self.settings.data, **(usual | given))

    def on(self, protocol: EpisodeProtocol, progress: Progress = NULL_PROGRESS) -> "ModelOnData":
        """Open the data that ``protocol`` names, for several measurements of this model."""
        count, merge = protocol.memory_slots, protocol.split == "all"
        is_other = merge or protocol.data != self.settings.data
        trained = self.with_slots(count) if count is not None and is_other else self
        dataset = open_data(self.encoder, protocol.data, merge_splits=merge, progress=progress)
        subject = ModelOnData(trained, dataset, is_other)
        return subject if count is None or is_other else subject.first_slots(count)

    def evaluate(
        self,
        data: str | None = None,
        *,
        classifier: BaselineName | None = None,
        baseline: BaselineSettings | None = None,
        calibrated: bool = False,
        progress: Progress = NULL_PROGRESS,
        **episodes: Any,
    ) -> "Measurement":
        """Measure the model on seeded episodes.

        Args:
            data: other data than the model's: ``folder:PATH`` or a dataset by name.
            classifier: a baseline that classifies the model's features in place of the model.
            baseline: its settings.
            calibrated: whether to calibrate probabilities by the model's temperature.
            progress: counts images, then episodes.
            episodes: ``split``, ``way``, ``shot``, ``queries``, ``episodes``, ``seed``,
                ``batch_norm`` ("inductive" uses running statistics, "transductive" each episode's
                own), ``memory_slots`` (use only the first so many classes of the memory),
                ``transductive`` (classify the queries of an episode together), ``proportions``
                ("balanced", α of Dirichlet(α), or weights of the classes) and ``outliers`` (share
                of images of other classes among the queries).
        """
        protocol, settings = self._protocol(data, episodes), baseline or BaselineSettings()
        settings.require_effect([] if classifier is None else [classifier])
        temperature = self.calibration.temperature(protocol.shot) if calibrated else 1.0
        if temperature is None:
            raise ClassifierError(
                f"calibrated: {self.name} has no fitted temperature; make a model that has one "
                "with vsm models ship --calibrate"
            )
        subject = self.on(protocol, progress)
        progress.start(f"evaluate {self.name}", protocol.episodes)
        if classifier is None:
            return subject.measure(protocol, progress, temperature)
        return subject.measure_baseline(classifier, protocol, settings, progress)

    def compare(
        self,
        *others: "TrainedModel",
        data: str | None = None,
        baselines: Sequence[BaselineName | BaselineKind] = (),
        baseline: BaselineSettings | None = None,
        progress: Progress = NULL_PROGRESS,
        **episodes: Any,
    ) -> "Comparison":
        """Measure baselines on this model's features, this model, and others on the same episodes.

        Arguments are those of :meth:`evaluate`; ``transductive`` measures models both ways.
        """
        protocol, settings = self._protocol(data, episodes), baseline or BaselineSettings()
        settings.require_effect([one for one in baselines if isinstance(one, str)])
        measured: list[Measurement] = []
        models = (self, *others)
        for one, earlier in combinations(reversed(models), 2):
            one.encoder.share_features(earlier.encoder)
        for one in models:
            subject = one.on(protocol, progress)
            for kind in baselines if one is self else ():
                label = kind if isinstance(kind, str) else kind.label
                progress.start(f"evaluate {label}", protocol.episodes)
                together = replace(protocol, transductive=not isinstance(kind, str))
                measured.append(subject.measure_baseline(kind, together, settings, progress))
            for transductive in sorted({False, protocol.transductive}):
                progress.start(f"evaluate {one.name}", protocol.episodes)
                either = replace(protocol, transductive=transductive)
                measured.append(subject.measure(either, progress))
        return Comparison(measured)

    # Classifying

    def classifier(self, *, temperature: float | None = None, seed: int = 0) -> "FewShotClassifier":
        """Return a :class:`vsm.FewShotClassifier` with this model as its encoder."""
        from vsm.classify import FewShotClassifier  # noqa: PLC0415 - a higher layer

        return FewShotClassifier(self, temperature=temperature, seed=seed)

    def embed(self, images: Any, progress: Progress = NULL_PROGRESS) -> Tensor:
        """Map images, or rows of features, to features ``[n, D]`` on the model's device."""
        return self.encoder.embed_images(images, progress)

    def temperature(self, shot: float) -> float:
        """Return T of the calibrated probabilities p^(1/T); 1 where none was fitted."""
        fitted = self.calibration.temperature(shot)
        return 1.0 if fitted is None else fitted

    def thresholds(self) -> Thresholds:
        """Return when to answer "none of these", or say why that is not known."""
        found = self.calibration.thresholds
        if found is not None and self.calibration.memory_digest == memory_digest(self.memory):
            return found
        because = "no rejection thresholds were measured for it"
        fix = f"measure them with vsm models calibrate {self.path}"
        if found is not None:
            because = "its rejection thresholds were measured with other remembered classes"
            fix = f"use the memory that they were measured with, or, if it is its own, {fix}"
        if self.path is None:
            fix = "classify without reject"
        raise ClassifierError(f"reject: {self.name} cannot answer none of these: {because}; {fix}")

    def transduce(
        self, posterior: Posterior, unlabeled: Tensor, slots: Tensor | None, shots: Sequence[int]
    ) -> tuple[Posterior, Assigned]:
        """Use projected ``unlabeled [T, U, D]`` images too; see ``vsm.memory.transduce``.

        ``shots`` are the examples of each of the N classes.
        """
        thresholds = self.calibration.thresholds
        limits = None if thresholds is None else thresholds.at(COVERAGE, shots)
        return transduce(posterior, unlabeled, slots, limits, self.transduction)

    @property
    def transduction(self) -> Transduction:
        """How unlabeled images are used: as was chosen, or usually."""
        return self.calibration.transduction or Transduction()

    # The memory

    def manual_consolidation(self) -> Consolidation:
        """Return how the memory takes in classes after training; an error if there is none."""
        found = manual_consolidation(self.model.consolidation, self.settings.memory)
        if found is None or self.memory is None:
            raise ClassifierError(
                f"memory: the method {self.settings.method} of {self.name} has no long-term "
                "memory; use a model with one, or learn_memory over features"
            )
        return found

    def with_memory(self, memory: NamedMemory, source: object) -> "TrainedModel":
        """Return the same model with another memory of its encoder and method."""
        method, expected = self.settings.method, self.model.empty_memory()
        if expected is None:
            raise ClassifierError(
                f"memory: the method {method} of {self.name} has none; leave it out"
            )
        memory.require_encoder(self.encoder.identity, source)
        if type(memory.memory) is not type(expected):
            raise RunError(
                f"{source} does not hold a memory of the method {method} with {self.inference} "
                f"inference, but a {type(memory.memory).__name__}; was it exchanged?"
            )
        try:
            memory.memory.check(self.model.num_features)
        except ValueError as error:
            raise RunError(f"{source} does not fit {self.name}: {error}") from error
        return replace(self, memory=memory.to(self.model.device))

    def with_slots(self, count: int) -> "TrainedModel":
        """Return the same model with the first ``count`` slots of its memory; 0 empties it."""
        if self.memory is None:
            return self
        kept, names = self.memory.memory.first(count), self.memory.names[:count]
        return replace(self, memory=replace(self.memory, memory=kept, names=names))

    def calibrate_rejection(self, dataset: Dataset) -> Calibration:
        """Measure on validation classes when the model should answer "none of these".

        Classes that were added to the memory after training count neither way: they are left out.
        """
        memory = self.memory
        if memory is not None and memory.added:
            memory = memory.forget(sorted(memory.added))
        state = None if memory is None else memory.memory
        found = calibrate_on_validation(self.model, state, dataset)
        digest = memory_digest(self.memory)
        return replace(found, temperatures=self.calibration.temperatures, memory_digest=digest)

    # Files

    def write(self, output: Path) -> "TrainedModel":
        """Write a model that was made in memory as a run directory, and return the model in it."""
        run = RunDirectory(output)
        run.create(self.settings)
        self.store(run)
        self.calibration.write(run.calibration, self.encoder.fingerprint)
        with run.step_log(0) as log:
            log.write({"step": 0, **({} if self.memory is None else self.memory.provenance[-1])})
        return replace(self, name=str(output), path=output)

    def store(
        self,
        run: RunDirectory,
        convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> None:
        """Write the model and its memory; ``convert`` returns the tensors that are written."""
        weights, identity = dict(self.model.state_dict()), self.encoder.identity
        memory = {} if self.memory is None else self.memory.memory.tensors()
        if convert is not None:
            weights, memory = convert(weights), convert(memory)
            identity = EncoderIdentity.of(self.settings.model, self.settings.data, weights)
        if self.memory is not None:
            save_tensors(run.memory, memory, replace(self.memory, encoder=identity).metadata())
        known, kept = self.metadata(), ("step", "method", "input_shape", "preprocessing")
        metadata = {key: known[key] for key in kept} | {"encoder": identity._asdict()}
        save_tensors(run.model, weights, metadata)


def made_in_memory(
    model: FewShotModel,
    memory: NamedMemory | None = None,
    calibration: Calibration = NO_CALIBRATION,
) -> TrainedModel:
    """Return a model that no file holds, such as one with a memory that was just learned."""
    calibration = replace(calibration, memory_digest=memory_digest(memory))
    return TrainedModel(model.settings.data, None, model.eval(), memory, calibration)


def save_best(
    run: RunDirectory, model: FewShotModel, memory: Memory | None, step: int, dataset: Dataset
) -> None:
    """Write the model for use, and its memory with the class names of its slots."""
    run.calibration.unlink(missing_ok=True)  # of the model before
    run.remove_gaussian()
    named = None
    if memory is not None:
        slots = tuple(dataset.class_names[class_id] for class_id in memory.slot_classes)
        named = trained_memory(model.settings, model.encoder.identity, memory, slots, step)
    TrainedModel(str(run.path), run.path, model, named, step=step).store(run)


@dataclass(frozen=True)
class Measurement:
    """How a model did, or a ``baseline`` on its features; ``temperature`` 1 calibrates nothing."""

    trained: TrainedModel
    protocol: EpisodeProtocol
    evaluation: Evaluation
    baseline: str | None = None
    baseline_settings: Mapping[str, Any] | None = None
    temperature: float = 1.0

    @property
    def accuracy(self) -> Estimate:
        """Mean accuracy with its interval over episodes."""
        return self.evaluation.accuracy

    @property
    def label(self) -> str:
        """The model's name, or the baseline's: what a comparison calls it."""
        together = ", transductive" if self.protocol.transductive else ""
        return self.baseline or f"{self.trained.name}{together}"

    def describe(self) -> str:
        """Return what classified, on whose features."""
        method = self.trained.settings.method
        model = f"{self.trained.name} ({method})"
        if self.protocol.transductive and self.baseline is None:
            model = f"{self.trained.name} ({method}, transductive)"
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
            result["baseline_settings"] = dict(self.baseline_settings)
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

    ``is_other`` says that these are not the model's data, or have merged splits.
    """

    trained: TrainedModel
    dataset: Dataset
    is_other: bool = False
    chosen: dict[tuple[str | int, ...], Mapping[str, float]] = field(default_factory=dict)
    """Hyper-parameters of baselines by their label, N, K and Q."""

    def measure(
        self,
        protocol: EpisodeProtocol,
        progress: Progress = NULL_PROGRESS,
        temperature: float = 1.0,
    ) -> Measurement:
        """Measure the model, its probabilities calibrated by ``temperature``."""
        trained, joint = self.trained, None
        if protocol.transductive and protocol.batch_norm != "inductive":
            raise EpisodeError(
                "transductive: how queries are used together was chosen with inductive batch norm; "
                "leave one of the two out"
            )
        if protocol.transductive:
            slots = None if trained.state is None else trained.state.rejection_slots
            shots = [protocol.shot] * protocol.way
            if trained.transduction.weight:
                temperature = trained.transduction.temperature(protocol.shot)

            def joint(posterior: Posterior, queries: Tensor) -> Posterior:
                return trained.transduce(posterior, queries, slots, shots)[0]

        evaluation = evaluate(
            trained.model,
            trained.state,
            protocol.sampler(self.dataset),
            protocol.episodes,
            protocol.seed,
            protocol.batch_norm,
            progress,
            temperature,
            joint,
        )
        return Measurement(trained, protocol, evaluation, temperature=temperature)

    def measure_baseline(
        self,
        kind: BaselineName | BaselineKind,
        protocol: EpisodeProtocol,
        settings: BaselineSettings,
        progress: Progress = NULL_PROGRESS,
    ) -> Measurement:
        """Measure a baseline on the model's features, on the episodes that the model sees."""
        label = kind if isinstance(kind, str) else kind.label
        if protocol.batch_norm != "inductive":
            raise EpisodeError(
                f"batch_norm: the baseline {label} needs features that do not depend on the "
                "episode; leave transductive batch norm out"
            )
        values: dict[str, Any]
        if not isinstance(kind, str):
            values = dict(self._best_candidate(kind, protocol, settings))
            baseline = kind(settings, lambda: self.base_features, **values)
        else:
            if kind == "logistic-tuned":
                settings = self._with_best_penalty(protocol, settings)
            baseline, values = self._baseline(kind, settings), asdict(settings)
        evaluation = self._evaluate_baseline(baseline, protocol, progress)
        return Measurement(self.trained, protocol, evaluation, label, values)

    def _baseline(self, name: BaselineName, settings: BaselineSettings) -> Baseline:
        return BASELINES[name](settings, lambda: self.base_features)

    def _with_best_penalty(
        self, protocol: EpisodeProtocol, settings: BaselineSettings
    ) -> BaselineSettings:
        """Choose C of logistic regression by its accuracy on episodes of validation classes."""
        tried = self._tuning_protocol("logistic-tuned", "C", protocol)
        candidates = [replace(settings, inverse_penalty=penalty) for penalty in PENALTIES]
        baselines = [self._baseline("logistic", one) for one in candidates]
        scores = [self._evaluate_baseline(one, tried).accuracy.mean for one in baselines]
        return candidates[scores.index(max(scores))]

    def _best_candidate(
        self, kind: BaselineKind, protocol: EpisodeProtocol, settings: BaselineSettings
    ) -> Mapping[str, float]:
        """Choose hyper-parameters for N and K by the mean accuracy over the usual query sets."""
        key = (kind.label, protocol.way, protocol.shot, protocol.queries)
        if key not in self.chosen:
            tried = self._tuning_protocol(kind.label, "its hyper-parameters", protocol)
            way, classes = tried.way, self.dataset.classes("validation")
            free = int(self.dataset.class_sizes[classes].min()) - tried.shot
            tried = replace(tried, queries=min(tried.queries, max(1, free // 2)))
            shares = USUAL_OUTLIERS[: 1 + (way < len(classes))]
            kinds = len(USUAL_PROPORTIONS) * len(shares)
            few = max(2, TUNING_EPISODES * USUAL_WAY // (2 * max(way, USUAL_WAY) * kinds))
            protocols = [
                replace(tried, episodes=few, proportions=proportions, outliers=outliers)
                for proportions, outliers in product(USUAL_PROPORTIONS, shares)
            ]
            scores = []
            for candidate in kind.candidates:
                baseline = kind(settings, lambda: self.base_features, **candidate)
                found = [self._evaluate_baseline(baseline, one) for one in protocols]
                scores.append(sum(one.accuracy.mean for one in found))
            self.chosen[key] = kind.candidates[scores.index(max(scores))]
        return self.chosen[key]

    def _tuning_protocol(self, label: str, what: str, protocol: EpisodeProtocol) -> EpisodeProtocol:
        if "validation" not in self.dataset.splits:
            raise EpisodeError(
                f"baselines: {label} chooses {what} on validation classes, which these data do "
                "not have; leave it out, or leave out --split all"
            )
        classes = self.dataset.classes("validation")
        return replace(
            protocol,
            split="validation",
            way=min(protocol.way, len(classes)),
            queries=min(
                protocol.queries, int(self.dataset.class_sizes[classes].min()) - protocol.shot
            ),
            episodes=TUNING_EPISODES,
            seed=0,
            proportions="balanced",
            outliers=0.0,
        )

    def _evaluate_baseline(
        self, baseline: Baseline, protocol: EpisodeProtocol, progress: Progress = NULL_PROGRESS
    ) -> Evaluation:
        sampler = protocol.sampler(self.dataset)
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
            trained.model, known, torch.tensor(wanted), validation, with_calibration=False
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
            name = self.trained.name
            raise EpisodeError(f"memory_slots: {name} remembers {len(state)} classes, got {count}")
        return self if count == len(state) else self.with_slots(range(count))
