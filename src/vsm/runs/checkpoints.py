"""The state of a training run, from which it resumes bit for bit, and pre-trained backbones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vsm.encoders import Encoder
from vsm.errors import RunError
from vsm.memory import Memory, Observations
from vsm.memory.named import decode_tensors
from vsm.model import FewShotModel
from vsm.runs.directory import BACKBONE_NAME, RunDirectory, find_run, is_shipped
from vsm.system.files import shortened
from vsm.system.tensor_files import (
    learning_tensors,
    load_tensors,
    restore_learning,
    save_tensors,
    strip_prefix,
)

BACKBONE_KIND = "backbone"
BACKBONE_METADATA = {
    "backbone": (str,),
    "channels": (int,),
    "keep_probability": (int, float),
    "input_shape": (list,),
}
"""What metadata of a backbone must say, and the types of that."""
PROGRESS = {"step": int, "best_step": int, "best_accuracy": float}


@dataclass
class TrainingState:
    """All that changes while training, apart from the model's parameters and buffers.

    ``pending`` are the last step's observations, which the next step consolidates into ``memory``.
    ``best_step`` is that of the best validation so far; 0 before the first.
    """

    step: int
    memory: Memory | None
    pending: Observations | None
    best_step: int = 0
    best_accuracy: float = -1.0


def save_resume(
    run: RunDirectory,
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    class_names: Sequence[str],
) -> None:
    """Write all that is needed to go on bit for bit; ``class_names`` are those of the dataset."""
    tensors = learning_tensors(model, optimizer)
    met: set[int] = set()  # classes whose names are stored
    if state.memory is not None:
        tensors |= {f"memory.{name}": value for name, value in state.memory.tensors().items()}
        met.update(state.memory.slot_classes)
    if state.pending is not None:
        tensors |= {f"pending.{name}": value for name, value in state.pending._asdict().items()}
        met.update(state.pending.class_ids.tolist())
    metadata = {name: getattr(state, name) for name in PROGRESS} | input_metadata(model.encoder)
    metadata["class_names"] = {str(class_id): class_names[class_id] for class_id in sorted(met)}
    save_tensors(run.resume, tensors, metadata)


def input_metadata(encoder: Encoder) -> dict[str, Any]:
    """Return what is stored with weights, so that using them needs no dataset."""
    prepared = encoder.preprocessing
    if prepared is None:
        return {"input_shape": [encoder.num_features], "preprocessing": None}
    return {"input_shape": list(prepared.input_shape), "preprocessing": prepared.as_dict()}


def load_resume(
    run: RunDirectory, model: FewShotModel, optimizer: torch.optim.Optimizer
) -> TrainingState:
    """Put the last state into ``model`` and ``optimizer`` and return the rest of it."""
    tensors, metadata = load_tensors(run.resume)
    restore_learning(model, optimizer, tensors, run.resume)
    return restored_state(model, tensors, metadata, run.resume)


def restored_state(
    model: FewShotModel, tensors: dict[str, Tensor], metadata: dict[str, Any], source: Path
) -> TrainingState:
    """Return the state that :func:`save_resume` wrote, on the device of ``model``."""
    memory, pending = strip_prefix(tensors, "memory"), strip_prefix(tensors, "pending")
    empty, width = model.empty_memory(), model.num_features
    if memory and (empty is None or memory.keys() != empty.tensors().keys()):
        method = model.settings.method
        raise RunError(f"{source} does not hold a memory of the method {method}; was it exchanged?")
    progress = numbers_in(metadata, PROGRESS, source)
    try:
        remembered = decode_tensors(memory, width) if memory else None
        observed = Observations(**pending) if pending else None
        if observed is not None and observed.features.shape != (*observed.class_ids.shape, width):
            raise ValueError("pending observations have another shape")
    except (TypeError, ValueError) as error:
        raise RunError(f"{source} is damaged: {shortened(error)}") from error
    return TrainingState(
        memory=None if remembered is None else remembered.to(model.device),
        pending=None if observed is None else observed.to(model.device),
        **progress,
    )


def numbers_in(metadata: dict[str, Any], names: Mapping[str, type], source: Path) -> dict[str, Any]:
    """Return the numbers of these names in metadata, checked; an error names ``source``."""
    for name, kind in names.items():
        value: Any = metadata.get(name)
        is_number = type(value) is int or (kind is float and type(value) is float)
        if not is_number or not math.isfinite(value):
            raise RunError(
                f"{source} is damaged: expected a number as {name}, got {shortened(value, 60)}"
            )
    return {name: metadata[name] for name in names}


@torch.no_grad()
def apply_pending(model: FewShotModel, state: TrainingState) -> Memory | None:
    """Return the memory with pending observations applied; the state keeps them pending."""
    return model.consolidate(state.memory, state.pending, state.step)


def save_backbone(path: Path, backbone: nn.Module, metadata: dict[str, Any]) -> None:
    """Write the ``state_dict`` of a backbone; ``metadata`` has at least ``BACKBONE_METADATA``."""
    save_tensors(path, dict(backbone.state_dict()), {"kind": BACKBONE_KIND, **metadata})


def load_backbone(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a pre-trained backbone: a directory of ``vsm pretrain``, or a file in it.

    Returns:
        The backbone's ``state_dict``, and its metadata: ``backbone`` (name), ``channels``,
        ``keep_probability``, ``input_shape`` ``[C, H, W]``, ``data``, ``epoch`` and ``validation``.
    """
    file = path / BACKBONE_NAME if path.is_dir() else path
    if not file.is_file():
        raise RunError(
            f"{path} holds no pre-trained backbone: there is no file {file}; make one with: vsm "
            "pretrain --output DIRECTORY"
        )
    weights, metadata = load_tensors(file)
    known = all(type(metadata.get(name)) in kinds for name, kinds in BACKBONE_METADATA.items())
    if metadata.get("kind") != BACKBONE_KIND or not known:
        raise RunError(
            f"{file} does not hold a pre-trained backbone; give a directory of vsm pretrain, or "
            f"its {BACKBONE_NAME}"
        )
    return weights, metadata


def begin_with_backbone(model: FewShotModel, path: Path) -> None:
    """Put the backbone of a run, a pre-training or a shipped model into ``model``."""
    path = find_run(path) if is_shipped(path) else path
    run = RunDirectory(path)
    if run.model.is_file():
        weights = strip_prefix(load_tensors(run.model)[0], "backbone")
        trained = run.settings().model
        metadata = {"backbone": trained.backbone, "channels": trained.channels}
    else:
        weights, metadata = load_backbone(path)
    for name in ("backbone", "channels"):
        found, wanted = metadata[name], getattr(model.settings.model, name)
        if found != wanted:
            raise RunError(
                f"init: {path} was trained with model.{name} {found}, but this run has {wanted}; "
                f"give it --model.{name} {found}"
            )
    try:
        model.require_backbone().load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(
            f"init: the backbone of {path} does not fit this run's data ({reason}); was it trained "
            "on images of another size?"
        ) from error
