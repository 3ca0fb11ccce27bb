"""Run directories: what a training run leaves behind, loadable without pickle.

``config.yaml`` (settings), ``metrics.jsonl`` (one line a measurement), ``model.safetensors`` and
``memory.safetensors`` (the best by validation), ``resume.safetensors`` (the last state). Every
file is replaced atomically. The best pair is written before the resume state, so a run killed
between the two repeats that validation when it resumes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vsm.checkpoints import (
    below,
    fit_weights,
    learning_tensors,
    load_backbone,
    load_tensors,
    restore_learning,
    save_tensors,
)
from vsm.configuration import settings_from_files
from vsm.data import Dataset
from vsm.devices import ON_CPU, Placement
from vsm.directories import Directory
from vsm.errors import RunError
from vsm.memory import Memory, Observations
from vsm.memory_files import MEMORY_NAME, MODEL_NAME, EncoderIdentity, trained_memory
from vsm.model import FewShotModel
from vsm.settings import RunSettings

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
        return settings_from_files(self.config)


def save_best(
    run: RunDirectory, model: FewShotModel, memory: Memory | None, step: int, names: tuple[str, ...]
) -> None:
    """Write the model for use, and its memory with the class names of its slots."""
    weights = dict(model.state_dict())
    if memory is not None:
        slots = tuple(names[class_id] for class_id in memory.slot_classes)
        trained_memory(model.settings, weights, memory, slots, step).write(run.memory)
    save_tensors(run.model, weights, {"step": step, "method": model.settings.method})


def save_resume(
    run: RunDirectory, model: FewShotModel, optimiser: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write all that is needed to go on bit for bit."""
    tensors = learning_tensors(model, optimiser)
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
    run: RunDirectory, model: FewShotModel, optimiser: torch.optim.Optimizer | None
) -> TrainingState:
    """Put the last state into ``model`` and ``optimiser`` and return the rest of it."""
    tensors, progress = load_tensors(run.resume)
    restore_learning(model, optimiser, tensors, run.resume)
    memory, pending = below(tensors, "memory"), below(tensors, "pending")
    return TrainingState(
        memory=_remade(model, memory, run.resume) if memory else None,
        pending=Observations(**pending).to(model.device) if pending else None,
        **progress,
    )


def begin_with_backbone(model: FewShotModel, path: Path) -> None:
    """Put the backbone of a directory of ``vsm pretrain`` or ``vsm train`` into ``model``."""
    run = RunDirectory(path)
    if run.model.is_file():
        weights = below(load_tensors(run.model)[0], "backbone")
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
    """

    settings: RunSettings
    model: FewShotModel
    memory: Memory | None
    slot_names: tuple[str, ...]
    step: int

    def with_slots(self, count: int) -> "TrainedModel":
        """Return the same model with the first ``count`` slots of its memory; 0 empties it."""
        if self.memory is None:
            return self
        kept = self.memory.first(count)
        return replace(self, memory=kept, slot_names=self.slot_names[:count])


def load_run(
    path: Path,
    dataset: Dataset,
    checkpoint: Checkpoint = "best",
    backbone: str | None = None,
    placement: Placement = ON_CPU,
) -> TrainedModel:
    """Load the best model of a run, or its last state with pending observations applied.

    Args:
        path: the run directory.
        dataset: what the run was trained on; gives the input shape and class names.
        checkpoint: which of the two.
        backbone: the run's backbone, named again. Must be given if it is the user's own code
            ``module:attribute``: a run directory does not make anyone import anything.
        placement: where the model and its memory go.
    """
    run = RunDirectory(path)
    settings = run.settings()
    require_consent(path, settings, backbone)
    model = FewShotModel(settings, dataset.input_shape).place(placement)
    if checkpoint == "last":
        state = load_resume(run, model, None)
        model.eval()
        memory = settled_memory(model, state)
        step = state.step
        slots = [] if memory is None else memory.slot_classes
        names = tuple(dataset.class_names[class_id] for class_id in slots)
        return TrainedModel(settings, model, memory, names, step)
    weights, stamp = load_tensors(run.model)
    fit_weights(model, weights, run.model)
    model.eval()
    if not settings.uses_memory:
        return TrainedModel(settings, model, None, (), stamp["step"])
    parts, memory_stamp = load_tensors(run.memory)
    memory = _remade(model, parts, run.memory)
    if memory_stamp["step"] != stamp["step"]:
        raise RunError(
            f"{path}: model.safetensors is of step {stamp['step']} but memory.safetensors of step "
            f"{memory_stamp['step']}; the run was cut off between the two: resume it with --resume"
        )
    _require_own_encoder(path, memory_stamp.get("encoder"), EncoderIdentity.of(settings, weights))
    names = tuple(memory_stamp["class_names"])
    return TrainedModel(settings, model, memory, names, stamp["step"])


def _require_own_encoder(path: Path, stored: dict[str, str] | None, own: EncoderIdentity) -> None:
    """Refuse a memory of another encoder's features; earlier versions did not say whose."""
    if stored is not None and stored["fingerprint"] != own.fingerprint:
        other = EncoderIdentity(**stored)
        raise RunError(
            f"{path}: memory.safetensors holds features of the encoder {other}, but the model's is "
            f"{own}; was the file exchanged?"
        )


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
def settled_memory(model: FewShotModel, state: TrainingState) -> Memory | None:
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
    return type(empty)(**parts).to(model.device)
