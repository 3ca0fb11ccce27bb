"""Few-shot learning with a long-term memory.

The system of "Learning to Learn Variational Semantic Memory" (NeurIPS 2020). Names are imported
when first used, so that ``import vsm`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier as FewShotClassifier
    from vsm.data import Dataset as Dataset
    from vsm.data import EpisodeSampler as EpisodeSampler
    from vsm.data import FeatureDataset as FeatureDataset
    from vsm.data import ImageDataset as ImageDataset
    from vsm.data import open_dataset as open_dataset
    from vsm.encoders import Encoder as Encoder
    from vsm.errors import VsmError as VsmError
    from vsm.evaluation.evaluator import Evaluation as Evaluation
    from vsm.export import export_onnx as export_onnx
    from vsm.memory import Memory as Memory
    from vsm.memory.named import NamedMemory as NamedMemory
    from vsm.model import FewShotModel as FewShotModel
    from vsm.pretraining import pretrain as pretrain
    from vsm.runs.checkpoints import load_backbone as load_backbone
    from vsm.runs.loading import load as load
    from vsm.runs.trained_model import TrainedModel as TrainedModel
    from vsm.settings import PretrainSettings as PretrainSettings
    from vsm.settings import RunSettings as RunSettings
    from vsm.training import train as train

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

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vsm' has no attribute {name!r}")
