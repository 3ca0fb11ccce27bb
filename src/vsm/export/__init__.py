"""Trained models for programs without Python: ONNX graphs, checked before they are written."""

from vsm.export.onnx_files import Exported, export_onnx

__all__ = ["Exported", "export_onnx"]
