"""Trained models as ONNX files, checked against PyTorch before they are written.

Needs the extra ``export``. The graphs compute what :class:`vsm.FewShotClassifier` does, by the same
code. A graph is converted with small example inputs, run by ONNX Runtime on inputs of other sizes,
and compared with what the same model answers in PyTorch.
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
from torch import Tensor, nn
from torch.nn import functional as F

from vsm import __version__
from vsm.errors import ExportError
from vsm.memory import SupportSet
from vsm.nn.layers import mean_distance, predictive
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator
from vsm.system.files import atomic_path

NEEDED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # largest difference between ONNX and PyTorch, see _difference
TASKS = ((5, (1,), 7), (2, (1, 3), 1), (20, (5, 2, 1), 3))  # classes, examples in turn, queries
Tensors = dict[str, Tensor]  # inputs or outputs of a graph, by name
Check = tuple[Tensors, Tensors]  # inputs, and the outputs that are expected


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
        checks = [(encoding, encoder.checks()), (classifying, classifier.checks(encoder))]
        for converted, cases in checks:
            run = _session(converted)
            for inputs, expected in cases:
                answers = run(inputs)
                for name, value in expected.items():
                    difference = _difference(name, answers[name], value)
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


class EncoderGraph(nn.Module):
    """Images ``[n, C, H, W]`` from 0 to 1, or features ``[n, D]``, to features ``[n, D]``."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model, self.preprocessing = trained.model, trained.preprocessing
        self.input_name = "raw_features" if self.preprocessing is None else "images"
        self.defaults: Tensors = {}

    def forward(self, inputs: Tensor) -> Tensors:
        """Embed images or features."""
        if self.preprocessing is not None:
            constants = (self.preprocessing.mean, self.preprocessing.std)
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in constants)
            inputs = (inputs - mean) / std
        return {"features": self.model.embed(inputs)}

    def sample(self, count: int) -> Tensor:
        """Draw ``count`` inputs to check with: images between empty and full, or features."""
        random = generator(0, "export", "inputs", count)
        if self.preprocessing is None:
            return torch.randn(count, self.model.num_features, generator=random)
        density = torch.rand(count, 1, 1, 1, generator=random)
        return torch.rand(count, *self.preprocessing.input_shape, generator=random) * density

    def example(self) -> tuple[Tensors, list[dict[int, str]]]:
        """Return inputs to convert the graph with, and the axes of each whose size may vary."""
        return {self.input_name: self.sample(3)}, [{0: "batch"}]

    def checks(self) -> Iterator[Check]:
        """Yield inputs, and their features as the model embeds them."""
        for count in (1, 6):
            inputs = prepared = self.sample(count)
            if self.preprocessing is not None:
                prepared = self.preprocessing.normalize(255 * inputs)
            yield {self.input_name: inputs}, {"features": self.model.embed(prepared)}


class ClassifierGraph(nn.Module):
    """Support and queries to probabilities, with the memory inside."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.trained, self.model = trained, trained.model
        fitted = sorted(trained.calibration.temperatures.items()) or [(1, 1.0)]
        self.log_shots, self.log_temperatures = torch.tensor(fitted).log().unbind(1)
        self.defaults = {"temperature": torch.zeros(())}  # of inputs that are not given
        if trained.state is not None:
            self.defaults["slot_mask"] = torch.zeros(1, len(trained.state), dtype=torch.bool)
            trained.state.project(torch.zeros(1, self.model.num_features))  # decompose it now

    def forward(
        self,
        support_features: Tensor,  # [S, D], of all classes in any order
        support_labels: Tensor,  # [S, N], 1 where an example is of a class; zeros do not count
        query_features: Tensor,  # [Q, D]
        temperature: Tensor,  # T of p^(1/T) / Z []; 0: the model's own
        slot_mask: Tensor | None = None,  # slots that a class may not recall [N, A] or [1, A]
    ) -> Tensors:
        """Infer the classes, and classify; only methods without memory have no ``slot_mask``.

        Returns probabilities ``[Q, N]``, distances to the prototypes ``[Q, N]``, and with a memory
        the weights λ of its slots ``[N, A]``.
        """
        shots = support_labels.sum(0).unsqueeze(-1)  # [N, 1]
        support_features, query_features = (
            self.model.project(part, self.trained.state)
            for part in (support_features, query_features)
        )
        mean = (support_labels.mT @ support_features / shots).unsqueeze(0)
        support = SupportSet(mean.unsqueeze(2), mean, shots.unsqueeze(0))
        if slot_mask is not None:
            rows = torch.arange(mean.shape[1]) % torch.full((1,), slot_mask.shape[0])
            slot_mask = slot_mask[rows].unsqueeze(0)  # [1, N, A]
        nothing_drawn = torch.Generator()
        posterior = self.model.infer(support, self.trained.state, nothing_drawn, slot_mask)
        queries = query_features.unsqueeze(0)
        log_probabilities = predictive(posterior.log_probabilities(queries))
        chosen = torch.where(temperature > 0, temperature, self.temperature(shots))
        distances = mean_distance(queries, posterior.prototypes, self.model.classifier.distance)
        answers = {
            "probabilities": F.softmax(log_probabilities / chosen, dim=-1)[0],
            "distances": distances[0],
        }
        if posterior.weights is not None:
            answers["recalled_weights"] = posterior.weights[0]
        return answers

    def temperature(self, shots: Tensor) -> Tensor:
        """``Calibration.temperature`` of shots ``[N, 1]``, as tensor operations: ``[]``."""
        starts, steps = self.log_shots[:-1], self.log_shots.diff()
        passed = (shots.log().mean() - starts).clamp_min(0).minimum(steps)
        slopes = self.log_temperatures.diff() / steps
        return (self.log_temperatures[0] + (slopes * passed).sum()).exp()

    def example(self) -> tuple[Tensors, list[dict[int, str]]]:
        """See ``EncoderGraph``; sizes differ, so that no axis is taken for another."""
        support, way, queries, width = 7, 3, 4, self.model.num_features
        inputs = {
            "support_features": torch.randn(support, width, generator=generator(0, "export")),
            "support_labels": F.one_hot(torch.arange(support) % way).float(),
            "query_features": torch.randn(queries, width, generator=generator(0, "export")),
            "temperature": torch.ones(()),
        }
        axes = [{0: "support"}, {0: "support", 1: "way"}, {0: "queries"}, {}]
        if "slot_mask" in self.defaults:
            inputs["slot_mask"] = self.defaults["slot_mask"].repeat(2, 1)
            axes.append({0: "hidden_classes"})
        return inputs, axes

    def checks(self, encoder: EncoderGraph) -> Iterator[Check]:
        """Yield tasks of other sizes, with defaults and with all inputs, and their answers."""
        for way, shots, queries in TASKS:
            sizes = torch.tensor([shots[n % len(shots)] for n in range(way)])
            labels = F.one_hot(torch.arange(way).repeat_interleave(sizes)).float()
            features = encoder(encoder.sample(len(labels) + queries))["features"]
            task = {
                "support_features": features[:-queries],
                "support_labels": labels,
                "query_features": features[-queries:],
            }
            given = {**self.defaults, "temperature": torch.tensor(2.0)}
            if "slot_mask" in given:
                random = generator(0, "export", "hidden", way)
                given["slot_mask"] = (
                    torch.rand(way, given["slot_mask"].shape[1], generator=random) < 0.5
                )
            for optional in ({}, given):
                yield task | optional, self(**{**self.defaults, **task, **optional})


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
    model, memory, prepared = trained.model, trained.memory, trained.preprocessing
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
    if prepared is not None:
        metadata |= {
            "input_shape": prepared.input_shape,
            "input_range": (0, 1),
            "input_resizing": prepared.resampling or ("bicubic" if prepared.crop else "lanczos"),
            "input_ink": "high" if prepared.ink else "as it is",
        }
        if prepared.crop is not None:
            metadata["input_crop"] = prepared.crop
    return metadata


def _converted(graph: EncoderGraph | ClassifierGraph, metadata: Mapping[str, Any]) -> bytes:
    import onnx  # noqa: PLC0415 - an extra

    own = graph.model.settings.model.own_backbone
    whose = "this model" if own is None else f"the backbone {own}"
    with _wrap_errors(f"torch cannot export {whose}"), _quiet():
        inputs, axes = graph.example()
        program = torch.onnx.export(
            graph,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=list(graph(*inputs.values())),
            dynamic_shapes=tuple(axes),
            dynamo=True,
            verbose=False,
        )
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
    before, sink = logging.root.manager.disable, StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(sink), redirect_stdout(sink):
            yield
    finally:
        logging.disable(before)


def _session(converted: bytes) -> Callable[[Tensors], Tensors]:
    """Return a function that runs a graph with ONNX Runtime: inputs by name to outputs by name."""
    import onnxruntime  # noqa: PLC0415 - an extra

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    with _wrap_errors("ONNX Runtime cannot load the graph"):
        session = onnxruntime.InferenceSession(converted, options, ["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]

    def run(inputs: Tensors) -> Tensors:
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
