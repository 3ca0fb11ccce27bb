"""Trained models for programs without Python: ONNX graphs, checked before they are written."""

from vsm.exporting.graphs import classifier_noise
from vsm.exporting.onnx_files import Exported, export_onnx

__all__ = ["Exported", "classifier_noise", "export_onnx"]
