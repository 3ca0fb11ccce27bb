"""Trained models as ONNX files, checked against PyTorch before they are written.

Needs the extra ``export``. A graph is converted with small example inputs, run by ONNX Runtime on
inputs of other sizes, and compared with what the same model answers in PyTorch.
"""

import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm import __version__
from vsm.errors import ExportError
from vsm.export.graphs import TASK_NAMES, ClassifierGraph, EncoderGraph
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator
from vsm.system.files import atomic_path

NEEDED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # largest difference between ONNX and PyTorch, see _difference
TASKS = ((5, (1,), 7), (2, (1, 3), 1), (20, (5, 2, 1), 3))  # classes, examples in turn, queries


@dataclass(frozen=True)
class Exported:
    """What :func:`vsm.export_onnx` wrote."""

    encoder: Path  # images to features
    classifier: Path  # features to probabilities
    differences: dict[str, float]  # of each output, the largest from PyTorch, see _difference


def export_onnx(
    source: str | Path,
    output: str | Path,
    *,
    memory: str | Path | None = None,
    backbone: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write encoder and classifier of a trained model as ``encoder.onnx`` and ``classifier.onnx``.

    Args:
        source: a run directory, or the name of a shipped model.
        output: the folder that they go into.
        memory: a memory file in place of the model's own.
        backbone: the run's own code ``module:attribute``, named again to allow its import.
        overwrite: whether to replace files that are there.

    Raises:
        ExportError: if something is missing, cannot be converted, or gives other answers than
            PyTorch; nothing is written then.
    """
    paths = Path(output, "encoder.onnx"), Path(output, "classifier.onnx")
    _require_possible(*paths, overwrite)
    trained = load(source, memory=memory, backbone=backbone)
    _require_exportable(trained)
    encoder, classifier = EncoderGraph(trained).eval(), ClassifierGraph(trained).eval()
    differences: dict[str, float] = {}
    with torch.no_grad():
        encoding = _converted(encoder, _metadata(trained, "vsm encoder"))
        classifying = _converted(classifier, _metadata(trained, "vsm classifier"))
        for name, ours, expected in _answers(encoding, classifying, encoder, classifier):
            difference = _difference(name, ours, expected)
            differences[name] = max(differences.get(name, 0.0), difference)
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise ExportError(
                f"onnx: {name} of {trained.name} differ from PyTorch's by {difference:.2g}, more "
                f"than {TOLERANCE:g}; nothing was written"
            )
    with atomic_path(paths[0]) as first, atomic_path(paths[1]) as second:  # both or none
        first.write_bytes(encoding)
        second.write_bytes(classifying)
    return Exported(*paths, differences)


def _require_possible(encoder: Path, classifier: Path, overwrite: bool) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ExportError(
            f'onnx: needs {", ".join(missing)}: pip install "variational-semantic-memory[export]"'
        )
    folder = encoder.parent
    if folder.suffix == ".onnx" or (folder.exists() and not folder.is_dir()):
        raise ExportError(
            f"onnx: expected a folder for {encoder.name} and {classifier.name}, got {folder}"
        )
    if (there := [path for path in (encoder, classifier) if path.exists()]) and not overwrite:
        raise ExportError(
            f"onnx: {there[0]} is there already; replace it with --overwrite, or choose another "
            "folder"
        )


def _require_exportable(trained: TrainedModel) -> None:
    """Refuse models that draw samples, which a graph cannot repeat, and empty memories."""
    state = trained.state
    if trained.model.inference is not None and (state is None or state.statistics is None):
        raise ExportError(
            f"onnx: {trained.name} samples its prototypes, which a graph cannot; learn a Gaussian "
            "memory of its features with vsm memory learn --encoder, and export that"
        )
    if state is not None and len(state) == 0:
        raise ExportError(
            f"onnx: the memory of {trained.name} is empty, and a graph needs at least one slot; "
            "give one with --memory"
        )


def _metadata(trained: TrainedModel, kind: str) -> dict[str, Any]:
    """Return what a program needs to use a graph."""
    model, memory = trained.model, trained.memory
    metadata = {
        "kind": kind,
        "format": "1",
        "vsm_version": __version__,
        "model": trained.name,
        "data": model.settings.data,
        "encoder_name": trained.encoder.identity.name,
        "encoder_fingerprint": trained.encoder.fingerprint,
        "num_features": model.num_features,
    }
    if kind == "vsm classifier":
        return metadata | {
            "method": model.settings.method,
            "distance": model.classifier.distance,
            "model_temperature": model.classifier.log_temperature.exp().item(),
            "temperatures": dict(trained.calibration.temperatures),
            "class_names": [] if memory is None else memory.names,
            "class_counts": memory.slots.counts.tolist() if memory and memory.names else [],
        }
    prepared = trained.preprocessing
    if prepared is None:
        return metadata
    return metadata | {
        "input_shape": prepared.input_shape,
        "input_range": (0, 1),
        "input_resizing": prepared.resampling or ("bicubic" if prepared.crop else "lanczos"),
        "input_ink": "high" if prepared.ink else "as it is",
        **({} if prepared.crop is None else {"input_crop": prepared.crop}),
    }


def _converted(graph: EncoderGraph | ClassifierGraph, metadata: Mapping[str, Any]) -> bytes:
    """Convert a module to ONNX, with its defaults and metadata."""
    import onnx  # noqa: PLC0415 - an extra

    own = graph.model.settings.model.own_backbone
    whose = "this model" if own is None else f"the backbone {own}"
    with _wrap_errors(f"torch cannot export {whose}"), _quiet():
        program = torch.onnx.export(graph, **graph.signature(), dynamo=True, verbose=False)
    assert program is not None
    proto: Any = program.model_proto
    for name, value in graph.defaults.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    values = {name: v if isinstance(v, str) else json.dumps(v) for name, v in metadata.items()}
    onnx.helper.set_model_props(proto, values)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


@contextmanager
def _wrap_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of a user's own backbone, torch's exporter or ONNX Runtime
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = str(cause).strip().partition("\n")[0]
        raise ExportError(f"onnx: {problem} ({type(cause).__name__}: {first})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's messages for its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        sink = StringIO()
        with warnings.catch_warnings(action="ignore"), redirect_stderr(sink), redirect_stdout(sink):
            yield
    finally:
        logging.disable(before)


def _answers(
    encoding: bytes, classifying: bytes, encoder: EncoderGraph, classifier: ClassifierGraph
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names of outputs, the answers of ONNX Runtime, and those of PyTorch.

    Classifiers are compared on tasks of other sizes than the traced one, with defaults and with
    all inputs.
    """
    run, preprocessing = _session(encoding), encoder.preprocessing
    for count in (1, 6):
        inputs = encoder.sample(count)
        prepared = inputs if preprocessing is None else preprocessing.normalize(255 * inputs)
        answers = run({encoder.input_name: inputs})
        yield "features", answers["features"], encoder.model.embed(prepared)
    run, defaults = _session(classifying), classifier.defaults
    for way, shots, queries in TASKS:
        sizes = torch.tensor([shots[n % len(shots)] for n in range(way)])
        labels = F.one_hot(torch.arange(way).repeat_interleave(sizes)).float()
        features = encoder(encoder.sample(len(labels) + queries))
        parts = (features[:-queries], labels, features[-queries:])
        task = dict(zip(TASK_NAMES, parts, strict=True))
        given = {**defaults, "temperature": torch.tensor(2.0)}
        if "slot_mask" in given:
            random = generator(0, "export", "hidden", way)
            chances = torch.rand(way, given["slot_mask"].shape[1], generator=random)
            given["slot_mask"] = chances < 0.5
        for optional in ({}, given):
            answers = run(task | optional)
            for name, expected in classifier.by_name({**task, **defaults, **optional}).items():
                yield name, answers[name], expected


def _session(converted: bytes) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return a function that runs a graph with ONNX Runtime: inputs by name to outputs by name."""
    import onnxruntime  # noqa: PLC0415 - an extra

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    with _wrap_errors("ONNX Runtime cannot load the graph"):
        session = onnxruntime.InferenceSession(converted, options, ["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with _wrap_errors("ONNX Runtime cannot run the graph"):
            values = session.run(outputs, {name: value.numpy() for name, value in inputs.items()})
        return dict(zip(outputs, map(torch.from_numpy, values), strict=True))

    return run


def _difference(name: str, ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference; of features and distances as a share of the largest."""
    largest = (ours - expected).abs().amax().item()
    if name in ("features", "distances"):
        largest /= expected.abs().amax().clamp_min(1e-12).item()
    return largest if math.isfinite(largest) else math.inf
