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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm import __version__
from vsm.errors import ExportError
from vsm.export.graphs import Answers, ClassifierGraph, EncoderGraph, classifier_noise
from vsm.memory import SlotMemory
from vsm.model import FewShotModel
from vsm.runs.trained_model import TrainedModel, load
from vsm.seeding import generator
from vsm.system.files import atomic_path

ENCODER_NAME, CLASSIFIER_NAME = "encoder.onnx", "classifier.onnx"
NEEDED = ("onnx", "onnxscript", "onnxruntime")
FORMAT = "1"
NOISE_CLASSES = 5  # that noise is stored for; more share it, see vsm.export.noise
TOLERANCE = 1e-4
"""Largest difference between ONNX and PyTorch: of probabilities and λ as such, of features and
distances as a share of the largest."""
TASKS = ((5, (1,), 7), (2, (1, 3), 1), (20, (5, 2, 1), 3))
"""What a classifier is checked on: classes, examples of each in turn, queries."""
BATCHES = (1, 6)
SCALED = ("features", "distances")
TASK_NAMES = ("support_features", "support_labels", "query_features")


class Example(NamedTuple):
    """Inputs to trace a graph with, and which of their axes may have another size.

    Attributes:
        inputs: as the module's ``forward`` takes them.
        axes: of every input, the variable ones and their names.
        names: of all tensors among the inputs, in order.
        outputs: names of all tensors that come out, in order.
    """

    inputs: tuple[Any, ...]
    axes: tuple[Any, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """What :func:`vsm.export_onnx` wrote.

    Attributes:
        encoder: images to features.
        classifier: features to probabilities.
        differences: for each output, the largest difference from PyTorch; of features and distances
            as a share of the largest.
    """

    encoder: Path
    classifier: Path
    differences: dict[str, float]


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
        ExportError: if something is missing, cannot be converted, or answers otherwise than
            PyTorch; nothing is written then.
    """
    folder = Path(output)
    _require_extra()
    _require_free(folder, overwrite)
    trained = load(source, memory=memory, backbone=backbone)
    _require_exportable(trained)
    encoder, classifier = EncoderGraph(trained).eval(), ClassifierGraph(trained).eval()
    noise = classifier_noise(trained, NOISE_CLASSES)
    defaults = _defaults(trained, noise)
    with torch.no_grad():
        encoding = _converted(encoder, _encoder_example(trained), {}, _encoder_metadata(trained))
        classifying = _converted(
            classifier, _classifier_example(trained, noise), defaults, _classifier_metadata(trained)
        )
        differences = _check_encoder(encoding, trained)
        differences |= _check_classifier(classifier, encoder, classifying, trained, defaults)
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise ExportError(
                f"onnx: {name} of {trained.name} differ from PyTorch's by {difference:.2g}, more "
                f"than {TOLERANCE:g}; nothing was written"
            )
    with (
        atomic_path(folder / ENCODER_NAME) as first,
        atomic_path(folder / CLASSIFIER_NAME) as second,
    ):  # both or none: they belong together
        first.write_bytes(encoding)
        second.write_bytes(classifying)
    return Exported(folder / ENCODER_NAME, folder / CLASSIFIER_NAME, differences)


def _require_extra() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f'onnx: needs {", ".join(missing)}: pip install "variational-semantic-memory[export]"'
        )


def _require_free(folder: Path, overwrite: bool) -> None:
    if folder.suffix == ".onnx" or (folder.exists() and not folder.is_dir()):
        raise ExportError(
            f"onnx: expected a folder for {ENCODER_NAME} and {CLASSIFIER_NAME}, got {folder}"
        )
    for name in (ENCODER_NAME, CLASSIFIER_NAME):
        if (folder / name).exists() and not overwrite:
            raise ExportError(
                f"onnx: {folder / name} is there already; replace it with --overwrite, or choose "
                "another folder"
            )


def _require_exportable(trained: TrainedModel) -> None:
    """Refuse methods whose computation has no ONNX counterpart."""
    settings = trained.model.settings
    if settings.method in ("mann", "kanerva"):
        reason = {"mann": "shows the support one by one", "kanerva": "inverts matrices"}
        raise ExportError(
            f"onnx: the method {settings.method} of {trained.name} {reason[settings.method]}, "
            "which a graph cannot for any number of classes; export rote, transformed, vsm, vpn or "
            "protonet"
        )
    if _num_slots(trained) == 0:
        raise ExportError(
            f"onnx: the memory of {trained.name} is empty, and a graph needs at least one slot; "
            "give one with --memory"
        )
    draws_memories = settings.method == "vsm" and settings.inference == "network"
    both = settings.memory.recall_kind == "gumbel" and settings.objective.kl == "monte_carlo"
    if draws_memories and both:
        raise ExportError(
            f"onnx: {trained.name} draws Gumbel recall and a Monte Carlo KL together, which is not "
            "supported; export a run with objective.kl bound"
        )


def _encoder_example(trained: TrainedModel) -> Example:
    axes = ({0: "batch"},)
    return Example((_check_inputs(trained, 3),), axes, (_input_name(trained),), ("features",))


def _input_name(trained: TrainedModel) -> str:
    return "raw_features" if trained.preprocessing is None else "images"


def _classifier_example(trained: TrainedModel, noise: Mapping[str, Tensor]) -> Example:
    """Make inputs whose sizes all differ, so that none is taken for another."""
    support, way, queries = 7, 3, 4
    width, slots = trained.model.num_features, _num_slots(trained)
    slot_mask = None if slots is None else torch.zeros(2, slots, dtype=torch.bool)
    tensors = (
        torch.randn(support, width, generator=generator(0, "export", "support")),
        F.one_hot(torch.arange(support) % way).float(),
        torch.randn(queries, width, generator=generator(0, "export", "queries")),
        torch.ones(()),
    )
    axes: tuple[Any, ...] = (
        {0: "support"},
        {0: "support", 1: "way"},
        {0: "queries"},
        {},
        None if slot_mask is None else {0: "hidden_classes"},
        [{0: "noise_classes"} for _ in noise],
    )
    names: tuple[str, ...] = (*TASK_NAMES, "temperature")
    outputs: tuple[str, ...] = Answers._fields
    if slot_mask is None:
        outputs = outputs[:2]
    else:
        names = (*names, "slot_mask")
    return Example((*tensors, slot_mask, list(noise.values())), axes, (*names, *noise), outputs)


def _num_slots(trained: TrainedModel) -> int | None:
    return None if trained.memory is None else len(trained.memory.memory)


def _defaults(trained: TrainedModel, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the classifier's graph uses for inputs that are not given."""
    slots = _num_slots(trained)
    slot_mask = {} if slots is None else {"slot_mask": torch.zeros(1, slots, dtype=torch.bool)}
    return {"temperature": torch.zeros(()), **slot_mask, **noise}


def _metadata(trained: TrainedModel, kind: str) -> dict[str, Any]:
    identity = trained.encoder
    return {
        "kind": kind,
        "format": FORMAT,
        "vsm_version": __version__,
        "model": trained.name,
        "data": trained.model.settings.data,
        "encoder_name": identity.name,
        "encoder_fingerprint": identity.fingerprint,
        "num_features": trained.model.num_features,
    }


def _encoder_metadata(trained: TrainedModel) -> dict[str, Any]:
    metadata = _metadata(trained, "vsm encoder")
    if trained.preprocessing is None:
        return metadata
    return metadata | {
        "input_shape": trained.preprocessing.input_shape,
        "input_range": (0, 1),
        "input_resizing": "lanczos",
        "input_ink": "high" if trained.preprocessing.ink else "as it is",
    }


def _classifier_metadata(trained: TrainedModel) -> dict[str, Any]:
    memory, sampling = trained.memory, trained.model.settings.sampling
    return _metadata(trained, "vsm classifier") | {
        "method": trained.model.settings.method,
        "distance": trained.model.classifier.distance,
        "model_temperature": trained.model.classifier.log_temperature.exp().item(),
        "temperatures": dict(trained.calibration.temperatures),
        "prototype_samples": sampling.evaluation_prototypes,
        "class_names": [] if memory is None else memory.names,
        "class_counts": memory.memory.counts.tolist()
        if memory is not None and isinstance(memory.memory, SlotMemory)
        else [],
    }


def _converted(
    module: EncoderGraph | ClassifierGraph,
    example: Example,
    defaults: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> bytes:
    """Convert a module to ONNX, with defaults for some inputs and metadata."""
    import onnx  # noqa: PLC0415 - an extra

    proto = _traced(module, example)
    for name, value in defaults.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    values = {name: v if isinstance(v, str) else json.dumps(v) for name, v in metadata.items()}
    onnx.helper.set_model_props(proto, values)
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def _traced(module: EncoderGraph | ClassifierGraph, example: Example) -> Any:
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                example.inputs,
                dynamic_shapes=example.axes,
                input_names=example.names,
                output_names=example.outputs,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # whatever a user's own backbone raises, or torch's exporter
        raise ExportError(_untraceable(module.model, error)) from error
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter says of its own work, to whoever develops it, off the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _untraceable(model: FewShotModel, error: Exception) -> str:
    """Say in one line that torch could not export, and what it met."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    first = str(cause).strip().partition("\n")[0]
    own = model.settings.model.own_backbone
    whose = "this model" if own is None else f"the backbone {own}"
    return f"onnx: torch cannot export {whose} ({type(cause).__name__}: {first})"


def _check_inputs(trained: TrainedModel, count: int) -> Tensor:
    """Return images between empty and full, or features, for ``count`` samples."""
    random = generator(0, "export", "inputs", count)
    if trained.preprocessing is None:
        return torch.randn(count, trained.model.num_features, generator=random)
    density = torch.rand(count, 1, 1, 1, generator=random)
    return torch.rand(count, *trained.preprocessing.input_shape, generator=random) * density


def _check_encoder(converted: bytes, trained: TrainedModel) -> dict[str, float]:
    """Compare with what a classifier makes of pixels from 0 to 255, or of features."""
    run, worst = _session(converted), 0.0
    for count in BATCHES:
        inputs = _check_inputs(trained, count)
        answers = run({_input_name(trained): inputs})
        preprocessing = trained.preprocessing
        prepared = inputs if preprocessing is None else preprocessing.normalize(255 * inputs)
        expected = trained.model.embed(prepared)
        worst = max(worst, _difference("features", answers["features"], expected))
    return {"features": worst}


def _check_classifier(
    classifier: ClassifierGraph,
    encoder: EncoderGraph,
    converted: bytes,
    trained: TrainedModel,
    defaults: Mapping[str, Tensor],
) -> dict[str, float]:
    """Compare on tasks of other sizes than the traced one, with defaults and with all inputs."""
    run, worst = _session(converted), dict[str, float]()
    for way, shots, queries in TASKS:
        sizes = torch.tensor([shots[n % len(shots)] for n in range(way)])
        labels = F.one_hot(torch.arange(way).repeat_interleave(sizes)).float()
        features = encoder(_check_inputs(trained, len(labels) + queries))
        task = dict(
            zip(TASK_NAMES, (features[:-queries], labels, features[-queries:]), strict=True)
        )
        given = {**defaults, **classifier_noise(trained, way), "temperature": torch.tensor(2.0)}
        if "slot_mask" in given:
            random = generator(0, "export", "hidden", way)
            slots = given["slot_mask"].shape[1]
            given["slot_mask"] = torch.rand(way, slots, generator=random) < 0.5
        for optional in ({}, given):
            answers = run(task | optional)
            expected = classifier.by_name({**task, **defaults, **optional})
            for name, value in expected.items():
                difference = _difference(name, answers[name], value)
                worst[name] = max(worst.get(name, 0.0), difference)
    return worst


def _session(converted: bytes) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return a function that runs a graph with ONNX Runtime: inputs by name to outputs by name."""
    import onnxruntime  # noqa: PLC0415 - an extra

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    providers = ["CPUExecutionProvider"]
    with _told_in_one_line("load"):
        session = onnxruntime.InferenceSession(converted, options, providers=providers)
    outputs = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {name: value.numpy() for name, value in inputs.items()}
        with _told_in_one_line("run"):
            values = session.run(outputs, given)
        return dict(zip(outputs, map(torch.from_numpy, values), strict=True))

    return run


@contextmanager
def _told_in_one_line(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # those of ONNX Runtime have no common name of their own
        first = str(error).partition("\n")[0]
        raise ExportError(f"onnx: ONNX Runtime cannot {doing} the graph ({first})") from error


def _difference(name: str, ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference; of features and distances as a share of the largest."""
    scale = expected.abs().amax().clamp_min(1e-12).item() if name in SCALED else 1.0
    largest = (ours - expected).abs().amax().item() / scale
    return largest if math.isfinite(largest) else math.inf
