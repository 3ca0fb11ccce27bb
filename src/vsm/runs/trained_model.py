"""A trained model, ready for use, and the one way to load it.

Whatever uses a model (evaluating, comparing, classifying, exporting, studies, the memory commands)
goes through :func:`load`. Every file is read once. A run directory says itself how inputs are
prepared, so using it never opens the dataset that it was trained on.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from vsm.data import Dataset
from vsm.data.preprocessing import Preprocessing, as_features, as_list
from vsm.errors import ClassifierError, RunError
from vsm.evaluation.evaluator import EMBEDDING_BATCH, evaluation_mode
from vsm.evaluation.rejection import Thresholds, calibrate_on_validation
from vsm.memory import Consolidation, Memory
from vsm.memory.codec import decode_memory
from vsm.memory.named import (
    EncoderIdentity,
    NamedMemory,
    manual_consolidation,
    trained_memory,
)
from vsm.model import FewShotModel
from vsm.runs.calibration import NO_CALIBRATION, Calibration, memory_digest
from vsm.runs.checkpoints import apply_pending, restored_state
from vsm.runs.directory import RunDirectory
from vsm.runs.memory_files import read_memory
from vsm.runs.shipped import CARD_NAME, Card, find_run, read_card
from vsm.settings import Inference, RunSettings, is_frozen_encoder
from vsm.system.devices import ON_CPU, Placement
from vsm.system.documents import shortened
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import load_tensors, load_weights, save_tensors, strip_prefix

Checkpoint = Literal["best", "last"]
LARGE = 4096
"""Of a layer; models with larger ones are compared with their weights before they are made."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and all that using it needs. Nothing in it is ever changed.

    Attributes:
        name: what the user called it.
        path: its run directory; None if it was made in memory.
        settings: of the run that trained it.
        model: in evaluation mode.
        memory: with the names of its slots; None for methods without a memory.
        preprocessing: how pictures become inputs; None if the model takes features.
        encoder: identifies what makes the features.
        calibration: temperatures and rejection thresholds.
        step: the training step it was saved at.
        card: of a shipped model; None for a run.
    """

    name: str
    path: Path | None
    settings: RunSettings
    model: FewShotModel
    memory: NamedMemory | None
    preprocessing: Preprocessing | None
    encoder: EncoderIdentity
    calibration: Calibration = NO_CALIBRATION
    step: int = 0
    card: Card | None = None

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        return self  # read-only, so that copies of estimators can share it

    @property
    def state(self) -> Memory | None:
        """The bare memory, as the model reads it; None for methods without a memory."""
        return None if self.memory is None else self.memory.memory

    @property
    def inference(self) -> str | None:
        """How prototypes are inferred; None where they are means of features."""
        return None if self.settings.method == "protonet" else self.settings.inference

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: ``(C, H, W)``, or ``(D,)`` of features."""
        if self.preprocessing is None:
            return (self.model.num_features,)
        return self.preprocessing.input_shape

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
            "input_shape": list(self.input_shape),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.as_dict(),
            "num_features": self.model.num_features,
            "num_parameters": sum(value.numel() for value in self.model.parameters()),
            "memory_slots": None if self.memory is None else len(self.memory.memory),
            "encoder": self.encoder._asdict(),
        }

    def temperature(self, shot: float) -> float:
        """Return T of the calibrated probabilities p^(1/T); 1 where none was fitted."""
        fitted = self.calibration.temperature(shot)
        return 1.0 if fitted is None else fitted

    def thresholds(self) -> Thresholds:
        """Return when to answer "none of these", or say why that is not known."""
        found = self.calibration.thresholds
        if found is not None and self.calibration.memory_digest == memory_digest(self.memory):
            return found
        if found is None:
            because = "no rejection thresholds were measured for it"
        else:
            because = "its rejection thresholds were measured with other remembered classes"
        again = f"measure them with vsm models calibrate {self.path}"
        if self.path is None:
            fix = "; classify without reject"
        elif found is None:
            fix = f"; {again}"
        else:
            fix = f"; use the memory that they were measured with, or, if it is its own, {again}"
        raise ClassifierError(f"reject: {self.name} cannot answer none of these: {because}{fix}")

    def manual_consolidation(self) -> Consolidation:
        """Return how the memory takes in what people give it, or say that there is none."""
        found = manual_consolidation(self.model.consolidation, self.settings.memory)
        if found is None or self.memory is None:
            raise ClassifierError(
                f"memory: the method {self.settings.method} of {self.name} has no long-term "
                "memory; use a model with one, or learn_memory over features"
            )
        return found

    def with_memory(self, memory: NamedMemory, source: object) -> "TrainedModel":
        """Return the same model with another memory of its encoder and method."""
        if self.memory is None:
            raise ClassifierError(
                f"memory: the method {self.settings.method} of {self.name} has none; leave it out"
            )
        memory.require_encoder(self.encoder, source)
        _require_width(memory, self, source)
        if type(memory.memory) is not type(self.memory.memory):
            raise ClassifierError(
                f"memory: {source} holds a {type(memory.memory).__name__}, but {self.name} of the "
                f"method {self.settings.method} with {self.inference} inference reads a "
                f"{type(self.memory.memory).__name__}"
            )
        return replace(self, memory=memory.to(self.model.device))

    def with_slots(self, count: int) -> "TrainedModel":
        """Return the same model with the first ``count`` slots of its memory; 0 empties it."""
        if self.memory is None:
            return self
        kept, names = self.memory.memory.first(count), self.memory.names[:count]
        return replace(self, memory=replace(self.memory, memory=kept, names=names))

    @torch.no_grad()
    def embed(self, inputs: Any, progress: Progress = NULL_PROGRESS) -> Tensor:
        """Map pictures, or rows of features, to features ``[n, D]`` on the model's device."""
        if self.preprocessing is None:
            return self.embed_samples(as_features(inputs, self.model.num_features))
        listed = as_list(inputs)
        if not listed:
            return torch.zeros(0, self.model.num_features, device=self.model.device)
        return self.embed_samples(self.preprocessing.pixels(listed, progress))

    @torch.no_grad()
    def embed_samples(self, samples: Tensor) -> Tensor:
        """Do the same with what is prepared already: pixels uint8 ``[n, C, H, W]``, or features."""
        parts = []
        with evaluation_mode(self.model):
            for part in samples.split(EMBEDDING_BATCH):
                given = part.to(self.model.device)
                if self.preprocessing is not None:
                    given = self.preprocessing.normalize(given)
                parts.append(self.model.embed(given))
        return torch.cat(parts)


def load(
    source: str | Path,
    *,
    memory: str | Path | None = None,
    backbone: str | Collection[str] | None = None,
    placement: Placement = ON_CPU,
    checkpoint: Checkpoint = "best",
    inference: Inference | None = None,
) -> TrainedModel:
    """Load a shipped model by its name, or a run directory by its path.

    Args:
        source: a name that ``vsm models`` lists, or a path.
        memory: a memory file in place of the model's own.
        backbone: the run's backbone, named again, or several that may be imported. Must be given if
            it is the user's own code ``module:attribute``: a run directory does not make anyone
            import anything. For an encoder of others, where it is now.
        placement: the device of the model and its memory.
        checkpoint: the best model by validation, or the last state with pending observations
            applied.
        inference: how prototypes are inferred; None: as training did, or by the Gaussian memory
            that it left if validation classes preferred it.
    """
    path = find_run(source)
    if path.is_file():
        raise RunError(
            f"model: {source} is a file; open a saved classifier with FewShotClassifier.load, or "
            "name a run directory"
        )
    run = RunDirectory(path)
    if inference in (None, "gaussian") and checkpoint == "best":
        run = run.used
    settings, card = trusted_settings(path, run.settings(), backbone), read_card(path)
    if inference not in (None, settings.inference):
        raise RunError(
            f"inference: {source} infers prototypes by {settings.inference} inference, got "
            f"{inference}"
        )
    if checkpoint == "last":
        if card is not None:
            raise RunError(f"checkpoint: the model {card['name']} has no last state; leave it out")
        trained = _load_last(run, settings, str(source), placement)
    else:
        trained = _load_best(run, settings, str(source), placement)
    if card is not None:
        try:
            expected = EncoderIdentity.stored(card["encoder"])
        except TypeError as error:
            raise RunError(f"{path / CARD_NAME} is damaged: {shortened(error)}") from error
        _require_encoder(trained, expected, path / CARD_NAME)
        trained = replace(trained, card=card)
    return trained if memory is None else trained.with_memory(read_memory(Path(memory)), memory)


def _load_best(
    run: RunDirectory, settings: RunSettings, name: str, placement: Placement
) -> TrainedModel:
    weights, metadata = load_tensors(run.model)
    trained = restored_model(name, settings, weights, metadata, run.model, placement)
    calibration = Calibration.read(run.calibration, trained.encoder.fingerprint)
    trained = replace(trained, path=run.path, calibration=calibration)
    if not settings.uses_memory:
        return trained
    named = decode_memory(*load_tensors(run.memory), run.memory)
    if named.step != trained.step:
        raise RunError(
            f"{run.path}: model.safetensors is of step {trained.step} but memory.safetensors of "
            f"step {named.step}; the run was cut off between the two: resume it with --resume"
        )
    _require_encoder(trained, named.encoder, run.memory)
    if type(named.memory) is not type(trained.model.empty_memory()):
        raise RunError(
            f"{run.memory} does not hold a memory of the method {settings.method}; was it "
            "exchanged?"
        )
    _require_width(named, trained, run.memory)
    return replace(trained, memory=named.to(placement.device))


def _load_last(
    run: RunDirectory, settings: RunSettings, name: str, placement: Placement
) -> TrainedModel:
    tensors, metadata = load_tensors(run.resume)
    weights = strip_prefix(tensors, "model")
    trained = restored_model(name, settings, weights, metadata, run.resume, placement)
    state = restored_state(trained.model, tensors, metadata, run.resume)
    remembered = apply_pending(trained.model, state)
    if remembered is None:
        return replace(trained, path=run.path)
    try:
        class_names = metadata["class_names"]
        names = tuple(str(class_names[str(one)]) for one in remembered.slot_classes)
    except (KeyError, TypeError) as error:
        raise RunError(f"{run.resume} is damaged: it lacks the name of a class") from error
    named = trained_memory(settings, trained.encoder, remembered, names, state.step)
    return replace(trained, path=run.path, memory=named)


def restored_model(
    name: str,
    settings: RunSettings,
    weights: dict[str, Tensor],
    metadata: Any,
    source: Path,
    placement: Placement,
) -> TrainedModel:
    """Make a model again from its weights and what :func:`model_metadata` said of it."""
    try:
        shape = tuple(metadata["input_shape"])
        stored = metadata["preprocessing"]
        preprocessing = None if stored is None else Preprocessing.from_dict(stored)
        expected = EncoderIdentity.stored(metadata["encoder"]) if "encoder" in metadata else None
        step = metadata["step"]
        if not all(type(number) is int and number > 0 for number in (*shape, step + 1)):
            raise ValueError("input_shape and step are numbers")
        if len(shape) != 1 and (preprocessing is None or preprocessing.input_shape != shape):
            raise ValueError("preprocessing gives other inputs")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{source} does not say what its model needs ({shortened(repr(error))}): it was "
            "written by another version of vsm, or it is damaged; train it again"
        ) from error
    _require_size(settings, shape, weights, source)
    model = FewShotModel(settings, shape).place(placement)
    load_weights(model, weights, source)
    encoder = EncoderIdentity.of(settings, weights)
    if expected is not None and expected.fingerprint != encoder.fingerprint:
        raise RunError(
            f"{source} says that its encoder is {expected}, but it holds {encoder}; was it changed?"
        )
    return TrainedModel(name, None, settings, model.eval(), None, preprocessing, encoder, step=step)


def _require_size(
    settings: RunSettings, shape: tuple[int, ...], weights: dict[str, Tensor], source: Path
) -> None:
    """Refuse settings of a huge model that the weights are not of, before memory is asked for."""
    if max(settings.model.channels, settings.model.hidden_units, *shape) <= LARGE:
        return
    try:
        with torch.device("meta"):
            expected = FewShotModel(settings, shape).state_dict()
        fits = all(expected[name].shape == value.shape for name, value in weights.items())
    except (RuntimeError, KeyError, TypeError, OverflowError):
        fits = False
    if not fits:
        raise RunError(f"{source}: its weights do not fit its settings or data; was it exchanged?")


def model_metadata(dataset: Dataset, class_ids: list[int] | None = None) -> dict[str, Any]:
    """Return what is stored with weights, so that using them needs no dataset.

    ``class_ids`` are the classes whose names are stored as well.
    """
    preprocessing = Preprocessing.of(dataset)
    metadata: dict[str, Any] = {
        "input_shape": list(dataset.input_shape),
        "preprocessing": None if preprocessing is None else preprocessing.as_dict(),
    }
    if class_ids is not None:
        metadata["class_names"] = {str(id_): dataset.class_names[id_] for id_ in class_ids}
    return metadata


def made_in_memory(
    model: FewShotModel, memory: NamedMemory | None = None, thresholds: Thresholds | None = None
) -> TrainedModel:
    """Return a model over features, with the memory that was learned of them."""
    settings = model.settings
    encoder = EncoderIdentity.of(settings, model.state_dict())
    calibration = Calibration({}, thresholds, memory_digest(memory))
    return TrainedModel(
        settings.data, None, settings, model.eval(), memory, None, encoder, calibration
    )


def save_best(
    run: RunDirectory, model: FewShotModel, memory: Memory | None, step: int, dataset: Dataset
) -> None:
    """Write the model for use, and its memory with the class names of its slots."""
    run.calibration.unlink(missing_ok=True)  # of the model before
    run.remove_gaussian()
    names = dataset.class_names
    weights = dict(model.state_dict())
    encoder = EncoderIdentity.of(model.settings, weights)
    if memory is not None:
        slots = tuple(names[class_id] for class_id in memory.slot_classes)
        trained_memory(model.settings, encoder, memory, slots, step).write(run.memory)
    metadata = {"step": step, "method": model.settings.method, "encoder": encoder._asdict()}
    save_tensors(run.model, weights, {**metadata, **model_metadata(dataset)})


def store(
    run: RunDirectory,
    trained: TrainedModel,
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Write a model and its memory.

    ``convert`` turns tensors into those that are written, by the same names.
    """
    weights = convert(dict(trained.model.state_dict()))
    encoder = EncoderIdentity.of(trained.settings, weights)
    if trained.memory is not None:
        named = replace(trained.memory, encoder=encoder)
        save_tensors(run.memory, convert(named.memory.tensors()), named.metadata())
    known, kept = trained.metadata(), ("step", "method", "input_shape", "preprocessing")
    metadata = {key: known[key] for key in kept} | {"encoder": encoder._asdict()}
    save_tensors(run.model, weights, metadata)


def calibrate_rejection(trained: TrainedModel, dataset: Dataset) -> Calibration:
    """Measure on validation classes when a model should answer "none of these".

    What people added to the memory counts neither for nor against a picture, so it is left out.
    """
    memory = trained.memory
    if memory is not None and memory.added:
        memory = memory.forget(sorted(memory.added))
    state = None if memory is None else memory.memory
    thresholds = calibrate_on_validation(trained.model, state, dataset)
    return replace(
        trained.calibration, thresholds=thresholds, memory_digest=memory_digest(trained.memory)
    )


def trusted_settings(
    path: Path, settings: RunSettings, backbone: str | Collection[str] | None
) -> RunSettings:
    """Refuse to import code that a file names, unless the caller named it as well.

    An encoder of others may have moved: then ``backbone`` says where to, and takes its place.
    """
    stored = settings.model.backbone
    is_frozen = settings.model.is_frozen_encoder
    if is_frozen and isinstance(backbone, str) and is_frozen_encoder(backbone):
        return replace(settings, model=replace(settings.model, backbone=backbone))
    trusted = {backbone} if isinstance(backbone, str) else set(backbone or ())
    if isinstance(backbone, str) and backbone != stored:
        raise RunError(f"backbone: {path} was trained with {stored}, got {backbone}")
    if settings.model.own_backbone is not None and stored not in trusted:
        raise RunError(
            f"{path} was trained with code that is not part of vsm, and loading it would run that "
            f"code; if you trust it, add --backbone {stored} (in Python, backbone={stored!r})"
        )
    return settings


def _require_encoder(trained: TrainedModel, expected: EncoderIdentity, source: Path) -> None:
    """Refuse what belongs to another encoder's features."""
    if trained.encoder.fingerprint != expected.fingerprint:
        raise RunError(
            f"{source} belongs to the encoder {expected}, but model.safetensors beside it holds "
            f"{trained.encoder}; was one of the two exchanged?"
        )


def _require_width(memory: NamedMemory, trained: TrainedModel, source: object) -> None:
    """Refuse a memory of other features than the model's, whatever it says that it is."""
    try:
        memory.memory.check(trained.model.num_features)
    except ValueError as error:
        raise RunError(f"{source} does not fit {trained.name}: {error}") from error
