"""Few-shot learning with a long-term memory.

The system of "Learning to Learn Variational Semantic Memory" (NeurIPS 2020). Names are imported
when first used, so that ``import vsm`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vsm.checkpoints import load_backbone
    from vsm.data import Dataset, EpisodeSampler, FeatureDataset, ImageDataset, open_dataset
    from vsm.errors import VsmError
    from vsm.evaluation import Evaluation, evaluate
    from vsm.exporting import export_onnx
    from vsm.memory import Memory
    from vsm.model import FewShotModel
    from vsm.pretraining import pretrain
    from vsm.runs import LoadedModel, TrainedModel, load_model, load_run
    from vsm.serving import FewShotClassifier
    from vsm.settings import PretrainSettings, RunSettings
    from vsm.training import train

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "vsm.data",
    "EpisodeSampler": "vsm.data",
    "Evaluation": "vsm.evaluation",
    "FeatureDataset": "vsm.data",
    "FewShotClassifier": "vsm.serving",
    "FewShotModel": "vsm.model",
    "ImageDataset": "vsm.data",
    "LoadedModel": "vsm.runs",
    "Memory": "vsm.memory",
    "PretrainSettings": "vsm.settings",
    "RunSettings": "vsm.settings",
    "TrainedModel": "vsm.runs",
    "VsmError": "vsm.errors",
    "evaluate": "vsm.evaluation",
    "export_onnx": "vsm.exporting",
    "load_backbone": "vsm.checkpoints",
    "load_model": "vsm.runs",
    "load_run": "vsm.runs",
    "open_dataset": "vsm.data",
    "pretrain": "vsm.pretraining",
    "train": "vsm.training",
}

__all__ = [
    "Dataset",
    "EpisodeSampler",
    "Evaluation",
    "FeatureDataset",
    "FewShotClassifier",
    "FewShotModel",
    "ImageDataset",
    "LoadedModel",
    "Memory",
    "PretrainSettings",
    "RunSettings",
    "TrainedModel",
    "VsmError",
    "evaluate",
    "export_onnx",
    "load_backbone",
    "load_model",
    "load_run",
    "open_dataset",
    "pretrain",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vsm' has no attribute {name!r}")
