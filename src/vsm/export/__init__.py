"""Trained models for programs without Python: ONNX graphs, checked before they are written."""

from vsm.export.graphs import classifier_noise
from vsm.export.onnx_files import Exported, export_onnx

__all__ = ["Exported", "classifier_noise", "export_onnx"]
