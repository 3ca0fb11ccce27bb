"""Few-shot learning with a long-term memory.

The system of "Learning to Learn Variational Semantic Memory" (NeurIPS 2020). Names are imported
when first used, so that ``import vsm`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier
    from vsm.data import Dataset, EpisodeSampler, FeatureDataset, ImageDataset, open_dataset
    from vsm.encoders import Encoder
    from vsm.errors import VsmError
    from vsm.evaluation.evaluator import Evaluation
    from vsm.export import export_onnx
    from vsm.memory import Memory
    from vsm.memory.named import NamedMemory
    from vsm.model import FewShotModel
    from vsm.pretraining import pretrain
    from vsm.runs.checkpoints import load_backbone
    from vsm.runs.loading import load
    from vsm.runs.trained_model import TrainedModel
    from vsm.settings import PretrainSettings, RunSettings
    from vsm.training import train

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "vsm.data",
    "Encoder": "vsm.encoders",
    "EpisodeSampler": "vsm.data",
    "Evaluation": "vsm.evaluation.evaluator",
    "FeatureDataset": "vsm.data",
    "FewShotClassifier": "vsm.classify",
    "FewShotModel": "vsm.model",
    "ImageDataset": "vsm.data",
    "Memory": "vsm.memory",
    "NamedMemory": "vsm.memory.named",
    "PretrainSettings": "vsm.settings",
    "RunSettings": "vsm.settings",
    "TrainedModel": "vsm.runs.trained_model",
    "VsmError": "vsm.errors",
    "export_onnx": "vsm.export",
    "load": "vsm.runs.loading",
    "load_backbone": "vsm.runs.checkpoints",
    "open_dataset": "vsm.data",
    "pretrain": "vsm.pretraining",
    "train": "vsm.training",
}

__all__ = [
    "Dataset",
    "Encoder",
    "EpisodeSampler",
    "Evaluation",
    "FeatureDataset",
    "FewShotClassifier",
    "FewShotModel",
    "ImageDataset",
    "Memory",
    "NamedMemory",
    "PretrainSettings",
    "RunSettings",
    "TrainedModel",
    "VsmError",
    "export_onnx",
    "load",
    "load_backbone",
    "open_dataset",
    "pretrain",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vsm' has no attribute {name!r}")
