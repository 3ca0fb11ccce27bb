"""A fitted classifier as one safetensors file: model, memories and examples."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm.classify.fitted import Examples, FittedClasses
from vsm.errors import RunError, VsmError
from vsm.evaluation.calibration import Calibration
from vsm.memory.named import decode_memory
from vsm.runs.configuration import check_settings
from vsm.runs.loading import restored_model, trusted_settings
from vsm.settings import RunSettings
from vsm.system.devices import Placement
from vsm.system.documents import shortened
from vsm.system.tensor_files import load_tensors, save_tensors, strip_prefix

KIND, FORMAT = "classifier", 3
MODEL_KEYS = ("step", "input_shape", "preprocessing", "encoder")


Saved = tuple[FittedClasses, bool, float | None]
"""The fitted classes, whose model has the memory that later fits recall; whether that model is the
classifier's encoder, or was made from the features given; and the temperature."""


def write_classifier(path: Path, saved: Saved) -> None:
    """Write the file atomically."""
    fitted, has_encoder, temperature = saved
    trained, examples = fitted.trained, fitted.examples
    tensors = {f"model.{name}": value for name, value in trained.model.state_dict().items()}
    tensors |= {
        "support.features": examples.features,
        "support.sizes": torch.tensor(examples.shots),
        "support.remembered": torch.tensor(examples.remembered),
    }
    memories = {}
    for part, memory in (("memory", trained.memory), ("recalled", fitted.recalled)):
        if memory is not None:
            tensors |= {f"{part}.{name}": v for name, v in memory.memory.tensors().items()}
            memories[part] = memory.metadata()
    metadata = {
        "kind": KIND,
        "format": FORMAT,
        "name": trained.name,
        "settings": asdict(trained.settings),
        **{key: trained.metadata()[key] for key in MODEL_KEYS},
        **trained.calibration.as_dict(),
        "has_encoder": has_encoder,
        "labels": list(examples.labels),
        "seed": fitted.seed,
        "temperature": temperature,
        "memories": memories,
    }
    save_tensors(path, tensors, metadata)


def read_classifier(path: Path, backbone: str | None, placement: Placement) -> Saved:
    """Read what :func:`write_classifier` wrote, or say what is wrong with it."""
    tensors, metadata = load_tensors(path)
    if metadata.get("kind") != KIND:
        raise RunError(f"{path} does not hold a classifier; write one with save")
    if metadata.get("format") != FORMAT:
        raise RunError(
            f"{path} has format {shortened(metadata.get('format'), 20)}, but this version reads "
            f"{FORMAT}; use the version of vsm that wrote it"
        )
    try:
        return _restore(tensors, metadata, path, backbone, placement)
    except VsmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = shortened(repr(error))
        raise RunError(f"{path} is damaged: its parts do not fit ({reason})") from error


def _restore(
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    source: Path,
    backbone: str | None,
    placement: Placement,
) -> Saved:
    settings = check_settings(RunSettings, metadata["settings"], source)
    settings = trusted_settings(source, settings, backbone)
    weights = strip_prefix(tensors, "model")
    trained = restored_model(metadata["name"], settings, weights, metadata, source, placement)
    memories = {
        part: decode_memory(strip_prefix(tensors, part), known, source).to(placement.device)
        for part, known in metadata["memories"].items()
    }
    for memory in memories.values():
        memory.memory.check(trained.model.num_features)
    calibration = Calibration.from_dict(metadata)
    trained = replace(trained, memory=memories.get("memory"), calibration=calibration)
    examples = Examples(
        tuple(metadata["labels"]),
        tensors["support.features"].to(placement.device),
        tuple(tensors["support.sizes"].tolist()),
        tuple(tensors["support.remembered"].tolist()),
    )
    _check_examples(examples, trained.model.num_features)
    temperature, seed = metadata["temperature"], metadata["seed"]
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    if type(metadata["has_encoder"]) is not bool or type(seed) is not int:
        raise TypeError("expected a truth value as has_encoder and a number as seed")
    fitted = FittedClasses(trained, memories.get("recalled"), examples, seed)
    return fitted, metadata["has_encoder"], temperature


def _check_examples(examples: Examples, width: int) -> None:
    """Raise a ``ValueError`` or ``TypeError`` unless labels, counts and features fit."""
    labels, shots, remembered = examples.labels, examples.shots, examples.remembered
    if not len(shots) == len(remembered) == len(set(labels)) == len(labels) > 0:
        raise ValueError("expected distinct labels, and numbers of examples for each")
    if not all(isinstance(label, str | int | float) for label in labels):
        raise TypeError("expected strings or numbers as labels")
    if not all(type(one) is int for one in (*shots, *remembered)):
        raise TypeError("expected whole numbers of examples")
    if not all(0 <= done <= shot > 0 for done, shot in zip(remembered, shots, strict=True)):
        raise ValueError("classes without examples, or with more remembered than there are")
    if examples.features.shape != (sum(shots), width) or examples.features.dtype != torch.float32:
        raise ValueError(f"expected float32 features [{sum(shots)}, {width}]")
