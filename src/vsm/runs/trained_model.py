"""A trained model, ready for use: evaluate it, compare it, classify with it.

:func:`vsm.load` returns one, and so does :func:`vsm.train`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from vsm.data import Dataset
from vsm.data.images import Preprocessing
from vsm.encoders import Encoder, EncoderIdentity
from vsm.encoders.embedding import open_data
from vsm.errors import ClassifierError, RunError
from vsm.evaluation.calibration import (
    NO_CALIBRATION,
    Calibration,
    Thresholds,
    calibrate_on_validation,
    memory_digest,
)
from vsm.evaluation.evaluator import EpisodeProtocol
from vsm.memory import Consolidation, Memory
from vsm.memory.named import NamedMemory, manual_consolidation, trained_memory
from vsm.model import FewShotModel
from vsm.runs.checkpoints import input_metadata
from vsm.runs.directory import Card, RunDirectory
from vsm.runs.measurement import Comparison, Measurement, ModelOnData
from vsm.settings import BaselineName, BaselineSettings, RunSettings
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import save_tensors

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier


USUAL_EPISODES = {"split": "test", "queries": 15, "episodes": 2000, "seed": 0}


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and all that using it needs. Nothing in it is ever changed.

    Attributes:
        name: what the user called it.
        path: its run directory; None if it was made in memory.
        model: in evaluation mode.
        memory: with the names of its slots; None for methods without a memory.
        calibration: temperatures and rejection thresholds.
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

    def on(self, protocol: EpisodeProtocol, progress: Progress = NULL_PROGRESS) -> ModelOnData:
        """Open the data that ``protocol`` names, for several measurements of this model.

        Images of other data than the model's are prepared as the model wants them, and embedded.
        """
        count, merge = protocol.memory_slots, protocol.split == "all"
        is_other = merge or protocol.data != self.settings.data
        trained = self if count is None or not is_other else self.with_slots(count)
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
    ) -> Measurement:
        """Measure the model on seeded episodes.

        Args:
            data: other data than the model's: ``folder:PATH`` or a dataset by name.
            classifier: a baseline that classifies the model's features in place of the model.
            baseline: its settings.
            calibrated: whether to calibrate probabilities by the model's temperature.
            progress: counts images, then episodes.
            episodes: ``split``, ``way``, ``shot``, ``queries``, ``episodes``, ``seed``,
                ``batch_norm`` (running statistics, "inductive", or each episode's own,
                "transductive") and ``memory_slots`` (use only the first so many classes of the
                memory). What is not given is the model's own: its way and shot.
        """
        protocol = self._protocol(data, episodes)
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
        settings = baseline or BaselineSettings()
        return subject.measure_baseline(classifier, protocol, settings, progress)

    def compare(
        self,
        *others: "TrainedModel",
        data: str | None = None,
        baselines: Sequence[BaselineName] = (),
        baseline: BaselineSettings | None = None,
        progress: Progress = NULL_PROGRESS,
        **episodes: Any,
    ) -> Comparison:
        """Measure baselines on this model's features, this model, and others on the same episodes.

        Arguments are those of :meth:`evaluate`.
        """
        protocol = self._protocol(data, episodes)
        measured: list[Measurement] = []
        models = (self, *others)
        for one, earlier in combinations(reversed(models), 2):
            one.encoder.share_features(earlier.encoder)
        for one in models:
            subject = one.on(protocol, progress)
            for name in baselines if one is self else ():
                progress.start(f"evaluate {name}", protocol.episodes)
                settings = baseline or BaselineSettings()
                measured.append(subject.measure_baseline(name, protocol, settings, progress))
            progress.start(f"evaluate {one.name}", protocol.episodes)
            measured.append(subject.measure(protocol, progress))
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
            fix = f"use that memory, or, if this one is its own, {fix}"
        if self.path is None:
            fix = "classify without reject"
        raise ClassifierError(f"reject: {self.name} cannot answer none of these: {because}; {fix}")

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
        thresholds = calibrate_on_validation(self.model, state, dataset)
        return replace(
            self.calibration, thresholds=thresholds, memory_digest=memory_digest(self.memory)
        )

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
        """Write the model and its memory.

        ``convert`` turns tensors into those that are written, by the same names.
        """
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
    model: FewShotModel, memory: NamedMemory | None = None, thresholds: Thresholds | None = None
) -> TrainedModel:
    """Return a model that no file holds, such as one with a memory that was just learned."""
    calibration = Calibration({}, thresholds, memory_digest(memory))
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
