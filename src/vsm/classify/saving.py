"""A fitted classifier as one safetensors file: model, memories and examples."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm.classify.fitted import Examples
from vsm.errors import RunError
from vsm.memory.named import NamedMemory, restored_memory
from vsm.runs.calibration import Calibration
from vsm.runs.configuration import check_settings
from vsm.runs.trained_model import TrainedModel, restored_model, trusted_settings
from vsm.settings import RunSettings
from vsm.system.devices import Placement
from vsm.system.tensor_files import load_tensors, save_tensors, strip_prefix

KIND, FORMAT = "classifier", 3
MODEL_KEYS = ("step", "input_shape", "preprocessing", "encoder")


@dataclass(frozen=True)
class Saved:
    """All that a classifier is made of."""

    trained: TrainedModel  # its memory is not stored twice
    has_encoder: bool  # whether it is the classifier's encoder, or was made from the features given
    memory: NamedMemory | None  # what later fits recall
    recalled: NamedMemory | None  # what the fitted classes recall
    examples: Examples
    temperature: float | None
    seed: int


def write_classifier(path: Path, saved: Saved) -> None:
    """Write the file atomically."""
    trained, examples = saved.trained, saved.examples
    tensors = {f"model.{name}": value for name, value in trained.model.state_dict().items()}
    tensors |= {
        "support.features": torch.cat(examples.support),
        "support.sizes": torch.tensor([len(rows) for rows in examples.support]),
        "support.remembered": torch.tensor(examples.remembered),
    }
    memories = {}
    for part, memory in (("memory", saved.memory), ("recalled", saved.recalled)):
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
        "has_encoder": saved.has_encoder,
        "labels": list(examples.labels),
        "seed": saved.seed,
        "temperature": saved.temperature,
        "memories": memories,
    }
    save_tensors(path, tensors, metadata)


def read_classifier(path: Path, backbone: str | None, placement: Placement) -> Saved:
    """Read what :func:`write_classifier` wrote, or say what is wrong with it."""
    tensors, metadata = load_tensors(path)
    if not isinstance(metadata, dict) or metadata.get("kind") != KIND:
        raise RunError(f"{path} does not hold a classifier; write one with save")
    if metadata["format"] != FORMAT:
        raise RunError(
            f"{path} has format {metadata['format']}, but this version reads {FORMAT}; use the "
            "version of vsm that wrote it"
        )
    try:
        return _restored(tensors, metadata, path, backbone, placement)
    except (KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{path} is damaged: its parts do not fit ({error!r})") from error


def _restored(
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
        part: restored_memory(strip_prefix(tensors, part), known, source).to(placement.device)
        for part, known in metadata["memories"].items()
    }
    calibration = Calibration.from_dict(metadata)
    trained = replace(trained, memory=memories.get("memory"), calibration=calibration)
    features = tensors["support.features"].to(placement.device)
    examples = Examples(
        tuple(metadata["labels"]),
        features.split(tensors["support.sizes"].tolist()),
        tuple(tensors["support.remembered"].tolist()),
    )
    return Saved(
        trained,
        metadata["has_encoder"],
        memories.get("memory"),
        memories.get("recalled"),
        examples,
        metadata["temperature"],
        metadata["seed"],
    )
