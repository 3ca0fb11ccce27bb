"""Run directories: what a training run leaves behind, loadable without pickle.

A model that ships with the package is a run directory too, with a card and without a log.

``config.yaml`` (settings), ``metrics.jsonl`` (one line a measurement), ``model.safetensors`` and
``memory.safetensors`` (the best by validation), ``resume.safetensors`` (the last state). Every
file is replaced atomically. The best pair is written before the resume state, so a run killed
between the two repeats that validation when it resumes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vsm.runs.tensor_files import (
    strip_prefix,
    load_weights,
    learning_tensors,
    load_backbone,
    load_tensors,
    restore_learning,
    save_tensors,
)
from vsm.runs.configuration import stored_settings
from vsm.data import Dataset, ImageDataset, open_dataset
from vsm.system.devices import ON_CPU, Placement
from vsm.runs.directory import Directory
from vsm.errors import RunError
from vsm.memory import Memory, Observations
from vsm.runs.memory_files import MEMORY_NAME, MODEL_NAME, EncoderIdentity, trained_memory
from vsm.model import FewShotModel
from vsm.settings import RunSettings
from vsm.runs.shipped import CARD_NAME, Card, find_run, is_shipped, read_card

Checkpoint = Literal["best", "last"]


@dataclass
class TrainingState:
    """All that changes while training, apart from the model's parameters and buffers.

    Attributes:
        step: steps done.
        memory: the stored memory, or nothing for methods without one.
        pending: the last step's observations, which the next step consolidates.
        best_step: step of the best validation so far; 0 before the first.
        best_accuracy: its accuracy.
    """

    step: int
    memory: Memory | None
    pending: Observations | None
    best_step: int = 0
    best_accuracy: float = -1.0


class RunDirectory(Directory):
    """The files of one training run, by name."""

    command = "train"
    results = (MODEL_NAME, MEMORY_NAME)

    @staticmethod
    def find(source: str | Path) -> "RunDirectory":
        """Return a run directory by its path, or a shipped model by its name."""
        return RunDirectory(find_run(source))

    @property
    def model(self) -> Path:
        """Weights of the best model by validation."""
        return self.path / MODEL_NAME

    @property
    def memory(self) -> Path:
        """Memory of the best model by validation."""
        return self.path / MEMORY_NAME

    def settings(self) -> RunSettings:
        """Read the run's settings, or say that there is no run."""
        self.require()
        return stored_settings(self.config)


def save_best(
    run: RunDirectory, model: FewShotModel, memory: Memory | None, step: int, names: tuple[str, ...]
) -> None:
    """Write the model for use, and its memory with the class names of its slots."""
    slots = () if memory is None else tuple(names[class_id] for class_id in memory.slot_classes)
    save_trained(run, TrainedModel(model.settings, model, memory, slots, step))


def save_trained(
    run: RunDirectory,
    trained: "TrainedModel",
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Write a model for use, and its memory, which belongs to this encoder and says so.

    Args:
        run: where.
        trained: what.
        stored: turns tensors into those that are written, by the same names.
    """
    weights = stored(dict(trained.model.state_dict()))
    settings, memory = trained.settings, trained.memory
    if memory is not None:
        named = trained_memory(settings, weights, memory, trained.slot_names, trained.step)
        save_tensors(run.memory, stored(memory.tensors()), named.stamp())
    save_tensors(run.model, weights, {"step": trained.step, "method": settings.method})


def save_resume(
    run: RunDirectory, model: FewShotModel, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write all that is needed to go on bit for bit."""
    tensors = learning_tensors(model, optimizer)
    if state.memory is not None:
        tensors |= {f"memory.{k}": v for k, v in state.memory.tensors().items()}
    if state.pending is not None:
        tensors |= {"pending.features": state.pending.features}
        tensors |= {"pending.class_ids": state.pending.class_ids}
    progress = {
        "step": state.step,
        "best_step": state.best_step,
        "best_accuracy": state.best_accuracy,
    }
    save_tensors(run.resume, tensors, progress)


def load_resume(
    run: RunDirectory, model: FewShotModel, optimizer: torch.optim.Optimizer | None
) -> TrainingState:
    """Put the last state into ``model`` and ``optimizer`` and return the rest of it."""
    tensors, progress = load_tensors(run.resume)
    restore_learning(model, optimizer, tensors, run.resume)
    memory, pending = strip_prefix(tensors, "memory"), strip_prefix(tensors, "pending")
    return TrainingState(
        memory=_remade(model, memory, run.resume) if memory else None,
        pending=Observations(**pending).to(model.device) if pending else None,
        **progress,
    )


def begin_with_backbone(model: FewShotModel, path: Path) -> None:
    """Put the backbone of a run, a pre-training or a shipped model into ``model``."""
    path = find_run(path) if is_shipped(path) else path
    run = RunDirectory(path)
    if run.model.is_file():
        weights = strip_prefix(load_tensors(run.model)[0], "backbone")
        trained = run.settings().model
        facts = {"backbone": trained.backbone, "channels": trained.channels}
    else:
        weights, facts = load_backbone(path)
    wanted = model.settings.model
    for name in ("backbone", "channels"):
        if facts[name] != getattr(wanted, name):
            raise RunError(
                f"init: {path} was trained with model.{name} {facts[name]}, but this run has "
                f"{getattr(wanted, name)}; give it --model.{name} {facts[name]}"
            )
    try:
        model.require_backbone().load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(
            f"init: the backbone of {path} does not fit this run's data ({reason}); was it trained "
            "on images of another size?"
        ) from error


@dataclass(frozen=True)
class TrainedModel:
    """A model and its memory, ready for use.

    Attributes:
        settings: of the run that trained it.
        model: in evaluation mode.
        memory: read-only; nothing for methods without one.
        slot_names: the class name of each slot.
        step: the training step it was saved at.
        card: of a shipped model; nothing for a run.
    """

    settings: RunSettings
    model: FewShotModel
    memory: Memory | None
    slot_names: tuple[str, ...]
    step: int
    card: Card | None = None

    @property
    def encoder(self) -> EncoderIdentity:
        """Fingerprint of backbone and adapter."""
        return EncoderIdentity.of(self.settings, self.model.state_dict())

    def with_slots(self, count: int) -> "TrainedModel":
        """Return the same model with the first ``count`` slots of its memory; 0 empties it."""
        if self.memory is None:
            return self
        kept = self.memory.first(count)
        return replace(self, memory=kept, slot_names=self.slot_names[:count])


def load_run(
    path: str | Path,
    dataset: Dataset | None = None,
    checkpoint: Checkpoint = "best",
    backbone: str | None = None,
    placement: Placement = ON_CPU,
) -> TrainedModel:
    """Load the best model of a run, or its last state with pending observations applied.

    Args:
        path: the run directory, or the name of a shipped model.
        dataset: what the run was trained on; gives the input shape and class names. Opened if not
            given, but for a shipped model, whose card says what is needed.
        checkpoint: which of the two.
        backbone: the run's backbone, named again. Must be given if it is the user's own code
            ``module:attribute``: a run directory does not make anyone import anything.
        placement: where the model and its memory go.
    """
    run = RunDirectory.find(path)
    settings, card = run.settings(), read_card(run.path)
    require_consent(run.path, settings, backbone)
    model = FewShotModel(settings, _input_shape(settings, card, dataset)).place(placement)
    if checkpoint == "last":
        if card is not None:
            raise RunError(f"checkpoint: the model {card['name']} has no last state; leave it out")
        return _load_last(run, model, dataset)
    weights, stamp = load_tensors(run.model)
    load_weights(model, weights, run.model)
    model.eval()
    trained = TrainedModel(settings, model, None, (), stamp["step"], card)
    if card is not None:
        _require_encoder(trained, EncoderIdentity(**card["encoder"]), run.path / CARD_NAME)
    return _with_memory(run, trained) if settings.uses_memory else trained


def _input_shape(
    settings: RunSettings, card: Card | None, dataset: Dataset | None
) -> tuple[int, ...]:
    if dataset is not None:
        return dataset.input_shape
    if card is not None:
        return tuple(card["input_shape"])
    return open_dataset(settings.data).input_shape


def _load_last(run: RunDirectory, model: FewShotModel, dataset: Dataset | None) -> TrainedModel:
    settings = model.settings
    state = load_resume(run, model, None)
    model.eval()
    memory = apply_pending(model, state)
    class_names = (open_dataset(settings.data) if dataset is None else dataset).class_names
    slots = [] if memory is None else memory.slot_classes
    names = tuple(class_names[class_id] for class_id in slots)
    return TrainedModel(settings, model, memory, names, state.step)


def _with_memory(run: RunDirectory, trained: TrainedModel) -> TrainedModel:
    """Add the stored memory, which must be of the same step and of the same encoder."""
    parts, stamp = load_tensors(run.memory)
    memory = _remade(trained.model, parts, run.memory)
    if stamp["step"] != trained.step:
        raise RunError(
            f"{run.path}: model.safetensors is of step {trained.step} but memory.safetensors of "
            f"step {stamp['step']}; the run was cut off between the two: resume it with --resume"
        )
    if "encoder" in stamp:  # runs of version 0.1.0 did not say
        _require_encoder(trained, EncoderIdentity(**stamp["encoder"]), run.memory)
    return replace(trained, memory=memory, slot_names=tuple(stamp["class_names"]))


def _require_encoder(trained: TrainedModel, expected: EncoderIdentity, source: Path) -> None:
    """Refuse what belongs to another encoder's features."""
    if trained.encoder.fingerprint != expected.fingerprint:
        raise RunError(
            f"{source} belongs to the encoder {expected}, but model.safetensors beside it holds "
            f"{trained.encoder}; was one of the two exchanged?"
        )


class LoadedModel(NamedTuple):
    """What :func:`load_model` returns.

    Attributes:
        model: in evaluation mode.
        memory: read-only; nothing for methods without one.
        facts: a shipped model's card, or what is known of a run; ``slot_names`` in either.
    """

    model: FewShotModel
    memory: Memory | None
    facts: dict[str, Any]


def load_model(
    source: str | Path,
    dataset: Dataset | None = None,
    backbone: str | None = None,
    placement: Placement = ON_CPU,
) -> LoadedModel:
    """Load a shipped model by its name, or the best model of a run directory.

    Args:
        source: a name that ``vsm models`` lists, or a path.
        dataset: what the model was trained on; only a run needs it, and opens it if not given.
        backbone: as in :func:`load_run`.
        placement: where the model and its memory go.
    """
    path = find_run(source)
    card = read_card(path)
    if card is None and dataset is None:
        dataset = open_dataset(RunDirectory(path).settings().data)
    trained = load_run(path, dataset, "best", backbone, placement)
    if card is None:
        assert dataset is not None
        card = model_facts(trained, dataset)
    facts = {**card, "slot_names": list(trained.slot_names)}
    return LoadedModel(trained.model, trained.memory, facts)


def model_facts(trained: TrainedModel, dataset: Dataset) -> dict[str, Any]:
    """Return what must be known to use a model: the part of its card that nobody measured."""
    settings, memory = trained.settings, trained.memory
    pixels = dataset.normalization if isinstance(dataset, ImageDataset) else None
    return {
        "method": settings.method,
        "data": settings.data,
        "way": settings.way,
        "shot": settings.shot,
        "step": trained.step,
        "backbone": None if trained.model.backbone is None else settings.model.backbone,
        "input_shape": list(dataset.input_shape),
        "normalization": None if pixels is None else asdict(pixels),
        "num_features": trained.model.num_features,
        "num_parameters": sum(value.numel() for value in trained.model.parameters()),
        "memory_slots": None if memory is None else len(memory),
        "encoder": trained.encoder._asdict(),
        "temperatures": None,
    }


def require_consent(path: Path, settings: RunSettings, backbone: str | None) -> None:
    """Refuse to import code that a file names, unless the caller named it as well."""
    stored = settings.model.backbone
    if backbone is not None and backbone != stored:
        raise RunError(f"backbone: {path} was trained with {stored}, got {backbone}")
    if settings.model.own_backbone is not None and backbone is None:
        raise RunError(
            f"{path} was trained with code that is not part of vsm, and loading it would run that "
            f"code; if you trust it, add --backbone {stored} (in Python, backbone={stored!r})"
        )


@torch.no_grad()
def apply_pending(model: FewShotModel, state: TrainingState) -> Memory | None:
    """Return the memory with pending observations applied; the state keeps them pending."""
    return model.consolidate(state.memory, state.pending, state.step)


def _remade(model: FewShotModel, parts: dict[str, Tensor], source: Path) -> Memory:
    """Make a memory of the method's kind from its stored parts, or say that they are another's."""
    empty = model.empty_memory()
    if empty is None or parts.keys() != empty.tensors().keys():
        raise RunError(
            f"{source} does not hold a memory of the method {model.settings.method}; was it "
            "exchanged?"
        )
    precise = {name: parts[name].to(value.dtype) for name, value in empty.tensors().items()}
    return type(empty)(**precise).to(model.device)
