"""Graphs in ONNX that are converted once for all tests of a process, as it takes seconds."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from vsm.export import onnx_files

_KEPT: dict[str, bytes] = {}


def keep_conversions(patch: pytest.MonkeyPatch) -> None:
    """Let exports take what was converted before; they compare it with PyTorch all the same."""
    convert = onnx_files._converted

    def converted(graph: Any, metadata: Mapping[str, Any]) -> bytes:
        key = f"{type(graph).__name__} {json.dumps(metadata)}"
        if key not in _KEPT:
            _KEPT[key] = convert(graph, metadata)
        return _KEPT[key]

    patch.setattr(onnx_files, "_converted", converted)
