"""ONNX files answer as the classifier does, for other sizes than they were traced with."""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from torch import Tensor

from classify_helpers import CLASSES, examples, write_run, write_run_of
from conversions import keep_conversions
from tiny import make_dataset, make_settings, variant
from vsm import FewShotClassifier, export_onnx
from vsm.cli import main
from vsm.data import ImageDataset, open_images
from vsm.errors import DataError, ExportError
from vsm.export import onnx_files
from vsm.export.onnx_files import ClassifierGraph
from vsm.memory import GaussianMemory
from vsm.model import FewShotModel
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel

Arrays = dict[str, npt.NDArray[Any]]
UNEVEN = dict(zip(CLASSES, (1, 4, 2, 1, 3), strict=True))


class Graph:
    """A file of the kind that programs without Python open."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options)
        self.metadata: dict[str, str] = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, **inputs: npt.NDArray[Any]) -> Arrays:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


def pixels(trained: TrainedModel, photographs: list[Any]) -> npt.NDArray[np.float32]:
    """Return photographs as the encoder's graph takes them."""
    assert trained.preprocessing is not None
    return (trained.preprocessing.pixels(photographs).float() / 255).contiguous().numpy()


def one_hot(labels: list[str]) -> npt.NDArray[np.float32]:
    classes = sorted(set(labels))
    return np.asarray([[label == name for name in classes] for label in labels], np.float32)


def answers_of(
    folder: Path, trained: TrainedModel, support: list[Any], labels: list[str], queries: list[Any]
) -> Arrays:
    """Do all that a program without this package must do."""
    encoder, classifier = Graph(folder / "encoder.onnx"), Graph(folder / "classifier.onnx")
    return classifier(
        support_features=encoder(images=pixels(trained, support))["features"],
        support_labels=one_hot(labels),
        query_features=encoder(images=pixels(trained, queries))["features"],
    )


BACKBONES = """
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, image_shape):
        super().__init__()
        self.layer = nn.Conv2d(image_shape[0], 6, 5, stride=3)

    def forward(self, images):
        return self.layer(images).amax((-1, -2))


class Deciding(Plain):
    def forward(self, images):
        return super().forward(images if images.sum() > 0 else -images)
"""


def write_own_run(path: Path, name: str) -> Path:
    """Write a run of a backbone from the current folder, with all that an encoder can have."""
    settings = variant(make_settings(), method="protonet")
    model = replace(
        settings.model,
        backbone=name,
        mirror=True,
        shift=1,
        adapter="linear",
        normalize_features=True,
    )
    trained = FewShotModel(variant(settings, model=model), (1, 28, 28)).eval()
    assert trained.adapter is not None
    with torch.no_grad():
        trained.adapter.weight.add_(0.1)  # so that it is missed if it is left out
    return write_run_of(trained, path)


@pytest.fixture(scope="module")
def own_backbone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with backbones of somebody's own, which is the current one meanwhile."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "own_backbones.py").write_text(BACKBONES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    sys.modules.pop("own_backbones", None)


@pytest.fixture(scope="module")
def glyphs_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glyphs") / "graphs"
    with pytest.MonkeyPatch.context() as patch:
        keep_conversions(patch)
        assert main(["export", "glyphs-5w1s", "--onnx", str(folder)]) == 0
    return folder


def glyph_task(way: int, shot: int, queries: int) -> tuple[list[Any], list[str], list[Any]]:
    glyphs = open_images("glyphs")
    chosen = glyphs.classes("test")[:way].tolist()
    support, labels = examples(glyphs, dict.fromkeys(chosen, shot))
    asked, _ = examples(glyphs, dict.fromkeys(chosen, queries), first=shot)
    return support, labels, asked


@pytest.mark.parametrize(("way", "shot", "queries"), [(7, 3, 2), (2, 1, 1), (1, 1, 1)])
def test_a_shipped_models_graphs_answer_as_its_classifier_does(
    glyphs_export: Path, way: int, shot: int, queries: int
) -> None:
    support, labels, asked = glyph_task(way, shot, queries)
    classifier = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(support, labels)
    assert classifier.encoder is not None
    answers = answers_of(glyphs_export, classifier.encoder, support, labels, asked)
    expected = classifier.predict_proba(asked)
    np.testing.assert_allclose(answers["probabilities"], expected, atol=1e-4)
    told = classifier.explain(asked[0], num_recalled=1)
    assert answers["recalled_weights"].shape == (way, 642)
    for label, weights, distance in zip(
        sorted(set(labels)), answers["recalled_weights"], answers["distances"][0], strict=True
    ):
        assert told.recalled[label][0].weight == pytest.approx(weights.max(), rel=1e-3)
        assert told.distances[label] == pytest.approx(distance, rel=1e-4)


def test_a_graph_takes_a_temperature_in_place_of_the_models_own(
    glyphs_export: Path,
) -> None:
    support, labels, asked = glyph_task(5, 1, 3)
    classifier = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(support, labels)
    assert classifier.encoder is not None
    encoder, graph = Graph(glyphs_export / "encoder.onnx"), Graph(glyphs_export / "classifier.onnx")
    task = {
        "support_features": encoder(images=pixels(classifier.encoder, support))["features"],
        "support_labels": one_hot(labels),
        "query_features": encoder(images=pixels(classifier.encoder, asked))["features"],
    }
    expected = classifier.predict_proba(asked)
    np.testing.assert_allclose(graph(**task)["probabilities"], expected, atol=1e-4)
    cooler = classifier.set_params(temperature=3.0).predict_proba(asked)
    given = np.float32(3.0)
    scaled = graph(**task, temperature=np.asarray(given))["probabilities"]
    np.testing.assert_allclose(scaled, cooler, atol=1e-4)


def test_graphs_say_what_they_are(glyphs_export: Path) -> None:
    trained = load("glyphs-5w1s")
    assert trained.memory is not None
    encoder, classifier = (Graph(glyphs_export / f"{n}.onnx") for n in ("encoder", "classifier"))
    for stored in (encoder.metadata, classifier.metadata):
        assert stored["encoder_fingerprint"] == trained.encoder.fingerprint
    assert json.loads(encoder.metadata["input_shape"]) == [1, 28, 28]
    assert encoder.metadata["input_ink"] == "high"
    assert json.loads(classifier.metadata["class_names"]) == list(trained.memory.names)
    assert json.loads(classifier.metadata["class_counts"]) == trained.memory.slots.counts.tolist()
    temperatures = json.loads(classifier.metadata["temperatures"])
    assert {int(shot): value for shot, value in temperatures.items()} == dict(
        trained.calibration.temperatures
    )


def test_an_encoder_of_somebodys_own_is_exported_with_adapter_and_mirror(
    own_backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "own_backbones:Plain"
    run = write_own_run(own_backbone / "plain", name)
    with pytest.raises(DataError, match="unknown dataset"):  # which an export does without
        open_images(make_settings().data)
    assert main(["export", str(run), "--onnx", "graphs"]) == 2
    assert f"add --backbone {name}" in capsys.readouterr().err
    assert main(["export", str(run), "--onnx", "graphs", "--backbone", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(difference < 1e-4 for difference in told["differences"].values())

    trained = load(run, backbone=name)
    photographs, labels = examples(make_dataset(), UNEVEN)
    features = Graph(Path("graphs/encoder.onnx"))(images=pixels(trained, photographs))["features"]
    np.testing.assert_allclose(features, trained.embed(photographs), atol=1e-5)
    answers = answers_of(Path("graphs"), trained, photographs, labels, photographs[:2])
    np.testing.assert_allclose(answers["probabilities"].sum(1), 1, atol=1e-5)

    assert main(["export", str(run), "--onnx", "graphs", "--backbone", name]) == 2
    assert "encoder.onnx is there already; replace it with --overwrite" in capsys.readouterr().err


def test_a_backbone_that_torch_cannot_export_is_named_in_one_line(
    own_backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "own_backbones:Deciding"
    run = write_own_run(own_backbone / "deciding", name)
    assert main(["export", str(run), "--onnx", "other", "--backbone", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vsm export: onnx: torch cannot export the backbone {name} (")
    assert told.count("\n") == 1
    assert not Path("other").exists()


def graph_answers(
    trained: TrainedModel,
    photographs: list[Any],
    labels: list[str],
    queries: list[Any],
    **more: Tensor,
) -> dict[str, Tensor]:
    """Answer as a graph would, before it is converted."""
    inputs = {
        "support_features": trained.embed(photographs),
        "support_labels": torch.from_numpy(one_hot(labels)),
        "query_features": trained.embed(queries),
        "temperature": torch.ones(()),
    }
    with torch.no_grad():
        return ClassifierGraph(trained).forward(**inputs, **more)


def test_the_graph_of_a_model_without_memory_computes_what_its_classifier_does(
    tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    trained = load(write_run(tmp_path / "run", "protonet"))
    photographs, labels = examples(tiny_dataset, UNEVEN)
    queries, _ = examples(tiny_dataset, dict.fromkeys(CLASSES, 3), first=8)
    classifier = FewShotClassifier(trained).fit(photographs, labels)
    answers = graph_answers(trained, photographs, labels, queries)
    expected = torch.from_numpy(classifier.predict_proba(queries))
    torch.testing.assert_close(answers["probabilities"], expected, rtol=1e-4, atol=1e-5)
    assert "recalled_weights" not in answers


def test_a_graph_chooses_the_temperature_of_the_model_by_the_examples() -> None:
    trained = load("glyphs-5w1s")
    graph = ClassifierGraph(trained)
    for shots in ([1, 1], [3, 3, 3], [1, 4], [5], [20, 30]):
        expected = trained.temperature(statistics.geometric_mean(shots))
        ours = graph.temperature(torch.tensor(shots).float().unsqueeze(-1))
        assert ours.item() == pytest.approx(expected, rel=1e-5)


def test_slots_can_be_hidden_as_the_classifier_hides_those_of_other_classes() -> None:
    trained = load("glyphs-5w1s")
    assert trained.memory is not None
    glyphs, slots = open_images("glyphs"), (0, 3, 7)
    names = [trained.memory.names[slot] for slot in slots]
    ids = [glyphs.class_names.index(name) for name in names]
    photographs, _ = examples(glyphs, dict.fromkeys(ids, 2))
    labels = [name for name in names for _ in range(2)]
    order = sorted(range(3), key=names.__getitem__)
    hidden = torch.zeros(3, len(trained.memory.names), dtype=torch.bool)
    for n, own in enumerate(order):
        hidden[n, [slot for slot in slots if slot != slots[own]]] = True
    classifier = FewShotClassifier(trained, temperature=1.0).fit(photographs, labels)
    expected = torch.from_numpy(classifier.predict_proba(photographs))
    ours = graph_answers(trained, photographs, labels, photographs, slot_mask=hidden)
    torch.testing.assert_close(ours["probabilities"], expected, rtol=1e-4, atol=1e-5)
    assert not ours["recalled_weights"][hidden].any()
    everywhere = hidden.any(0, keepdim=True)
    ours = graph_answers(trained, photographs, labels, photographs, slot_mask=everywhere)
    assert not ours["recalled_weights"][:, everywhere[0]].any()


def test_a_graph_that_answers_otherwise_is_not_written(
    glyphs_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = {"EncoderGraph": "encoder.onnx", "ClassifierGraph": "classifier.onnx"}
    monkeypatch.setattr(
        onnx_files,
        "_converted",
        lambda graph, *_: (glyphs_export / graphs[type(graph).__name__]).read_bytes(),
    )
    other = load("glyphs-5w1s")
    assert other.memory is not None
    assert isinstance(other.state, GaussianMemory)
    reading = other.state.read_settings._replace(noise_scale=9.0).tensor()
    read_otherwise = replace(other.state, reading=reading)
    other = replace(other, memory=replace(other.memory, memory=read_otherwise))
    monkeypatch.setattr(onnx_files, "load", lambda *_, **__: other)
    with pytest.raises(ExportError, match=r"probabilities of glyphs-5w1s differ .*nothing was"):
        export_onnx("glyphs-5w1s", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_graph_that_does_not_run_is_one_line(glyphs_export: Path) -> None:
    run = onnx_files._session((glyphs_export / "encoder.onnx").read_bytes())
    with pytest.raises(ExportError, match="ONNX Runtime cannot run the graph") as told:
        run({"images": torch.zeros(1, 3, 28, 28)})
    assert "\n" not in str(told.value)
    with pytest.raises(ExportError, match="ONNX Runtime cannot load the graph"):
        onnx_files._session(b"no graph")


def test_an_answer_that_is_no_number_is_infinitely_wrong() -> None:
    wrong = torch.tensor([0.0, torch.nan])
    assert onnx_files._difference("probabilities", wrong, torch.zeros(2)) == float("inf")


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*words: str | Path) -> str:
        assert main(["export", *map(str, words)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return told

    out = tmp_path / "out"
    assert "no model of that name" in refused("glyphs-99w1s", "--onnx", out)
    assert "expected a folder" in refused("glyphs-5w1s", "--onnx", tmp_path / "model.onnx")
    for method in ("vpn", "vsm", "kanerva"):
        run = write_run(tmp_path / method, method)
        assert "samples its prototypes, which a graph cannot" in refused(run, "--onnx", out)
    trained = load("glyphs-5w1s")
    assert trained.memory is not None
    nothing = replace(trained.memory, memory=trained.memory.memory.first(0), names=())
    with pytest.raises(ExportError, match="is empty, and a graph needs at least one slot"):
        onnx_files._require_exportable(replace(trained, memory=nothing))
    monkeypatch.setattr(onnx_files, "NEEDED", ("onnx", "absent_package"))
    told = refused("glyphs-5w1s", "--onnx", out)
    assert 'needs absent_package: pip install "variational-semantic-memory[export]"' in told
    assert not out.exists()
