"""Loading a trained model: from its directory alone, every file once, and nothing that is wrong."""

import builtins
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image

import vsm
from classify_helpers import CLASSES, write_folders, write_run
from run_helpers import train_run
from tiny import make_dataset, make_settings, variant
from vsm import FewShotClassifier
from vsm.cli import main
from vsm.data.folder import images_below, labeled_images
from vsm.data.images import Preprocessing
from vsm.errors import ClassifierError, RunError
from vsm.evaluation.calibration import LEVELS, Calibration, Thresholds
from vsm.runs.directory import RunDirectory
from vsm.runs.loading import Checkpoint, load, read_memory
from vsm.runs.trained_model import TrainedModel
from vsm.settings import METHODS, Method, ValidationSettings
from vsm.system.tensor_files import fingerprint, load_tensors, save_tensors

TRAINED_ON, STEPS = 20, 40  # classes; so many steps settle batch norm


def write_images(root: Path) -> Path:
    """Write the first images of the first classes of the tiny dataset, one folder per class."""
    dataset = make_dataset()
    for class_id in range(TRAINED_ON):
        folder = root / dataset.class_names[class_id]
        folder.mkdir(parents=True)
        for number, image_id in enumerate(dataset.image_ids(class_id)[:6]):
            Image.fromarray(dataset.images[image_id][..., 0]).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run, and with support and query images; what it was trained on is gone."""
    root = tmp_path_factory.mktemp("alone")
    images = write_images(root / "images")
    tiny = make_settings()
    settings = variant(
        tiny,
        data=f"folder:{images}",
        model=replace(tiny.model, inference="conjugate"),
        sampling=replace(tiny.sampling),
        way=2,
        steps=STEPS,
        validation=ValidationSettings(every=STEPS, episodes=5),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSM_DATA", str(root / "prepared"))
        train_run(settings, root / "run")
        shutil.rmtree(images)
        shutil.rmtree(root / "prepared")
        write_folders(root / "support", make_dataset(), 2)
        write_folders(root / "query", make_dataset(), 3, first=5)
        yield root


@pytest.fixture
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whatever opens a dataset fail."""

    def fail(spec: str) -> None:
        pytest.fail(f"{spec} was opened")

    for place in ("data", "data.catalog", "training", "encoders.encoder"):
        monkeypatch.setattr(f"vsm.{place}.open_dataset", fail)
    monkeypatch.setattr("vsm.data.catalog.open_images", fail)


# A directory is enough.


def test_what_a_run_was_trained_on_is_gone(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(alone / "run"), "--episodes", "2", "--queries", "2"]) == 2
    assert "images" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_data")
@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_a_run_is_loaded_with_names_and_preprocessing(checkpoint: Checkpoint, alone: Path) -> None:
    trained = vsm.load(alone / "run", checkpoint=checkpoint)
    assert trained.path == alone / "run"
    assert trained.step == STEPS
    assert trained.memory is not None
    assert trained.state is trained.memory.memory
    assert len(trained.memory.names) == len(trained.memory.memory) > 2
    known = make_dataset().class_names[:TRAINED_ON]
    assert set(trained.memory.names) <= set(known)
    # The only validation was at the last step, so that both are the same model and memory.
    best = read_memory(alone / "run")
    assert trained.memory.names == best.names
    assert trained.encoder.identity == best.encoder
    assert trained.encoder.input_shape == (1, 28, 28)
    assert trained.preprocessing is not None
    assert not trained.preprocessing.ink
    stored = json.loads(json.dumps(trained.metadata()))
    assert stored["input_shape"] == [1, 28, 28]
    assert Preprocessing.from_dict(stored["preprocessing"]) == trained.preprocessing


@pytest.mark.usefixtures("_no_data")
def test_a_run_is_classified_with_and_says_none_of_these(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, support, query = (alone / name for name in ("run", "support", "query"))
    classifier = FewShotClassifier.from_pretrained(run).fit(*labeled_images(support))
    images = images_below(query)
    assert classifier.score(images, [path.parent.name for path in images]) > 0.4  # chance: 0.2
    answers = classifier.predict(images, reject=0.9)
    assert np.mean(answers != "none of these") > 0.5
    assert classifier.predict([np.zeros((28, 28), np.uint8)], reject=0.9) == ["none of these"]
    words = ["--support", str(support), "--query", str(query), "--model", str(run)]
    assert main(["classify", *words, "--reject", "0.9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["answers"]
    assert [one["prediction"] for one in told] == answers.tolist()


@pytest.mark.usefixtures("_no_data")
def test_a_memory_of_a_run_takes_in_new_classes(alone: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.safetensors"
    images = ["--images", str(alone / "support"), "--model", str(alone / "run")]
    assert main(["memory", "add", str(kept), *images]) == 0
    own, grown = read_memory(alone / "run"), read_memory(kept)
    assert len(grown.added) == len(CLASSES)
    assert grown.names[: len(own.names)] == own.names


# Every file is read once.


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each file is opened, by its name."""
    counted: Counter[str] = Counter()

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_(file: Any, *rest: Any, **more: Any) -> Any:
            if not isinstance(file, int):
                counted[Path(file).name] += 1
            return original(file, *rest, **more)

        return open_

    for module, name in ((builtins, "open"), (io, "open"), (safetensors, "safe_open")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return counted


@pytest.fixture
def identified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprints that were computed."""
    computed: list[str] = []

    def counting(*arguments: Any) -> str:
        computed.append(fingerprint(*arguments))
        return computed[-1]

    monkeypatch.setattr("vsm.encoders.encoder.fingerprint", counting)
    return computed


def of_run(opened: Counter[str]) -> dict[str, int]:
    """How often each file of a run was opened."""
    endings = (".safetensors", ".json", ".yaml")
    return {name: count for name, count in opened.items() if name.endswith(endings)}


def test_every_file_is_opened_once_and_the_encoder_is_identified_once(
    alone: Path, opened: Counter[str], identified: list[str]
) -> None:
    files = ("config.yaml", "model.safetensors", "memory.safetensors", "calibration.json")
    trained = load(alone / "run")
    assert of_run(opened) == dict.fromkeys(files, 1)
    assert identified == [trained.encoder.fingerprint]
    opened.clear()
    classifier = FewShotClassifier.from_pretrained(alone / "run")
    images, labels = labeled_images(alone / "support")
    classifier.fit(images, labels).predict(images, reject=0.9)
    classifier.explain(images[0])
    classifier.remember()
    assert of_run(opened) == dict.fromkeys(files, 1)
    assert len(identified) == 2


def test_the_last_state_is_one_file(alone: Path, opened: Counter[str]) -> None:
    load(alone / "run", checkpoint="last")
    assert of_run(opened) == {"config.yaml": 1, "resume.safetensors": 1}


def test_another_memory_is_read_in_place_of_the_runs_own(
    alone: Path, tmp_path: Path, opened: Counter[str]
) -> None:
    other = tmp_path / "other.safetensors"
    own = read_memory(alone / "run")
    own.forget(own.names[:1]).write(other)
    opened.clear()
    trained = load(alone / "run", memory=other)
    assert opened["other.safetensors"] == 1
    assert trained.memory is not None
    assert trained.memory.names == own.names[1:]
    with pytest.raises(ClassifierError, match="measured with other remembered classes"):
        trained.thresholds()


# What does not belong together is refused by name.


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(write_run(tmp_path / "run"))


@pytest.mark.parametrize("missing", ["input_shape", "preprocessing", "step"])
def test_a_model_that_does_not_say_what_it_needs_is_named(missing: str, run: RunDirectory) -> None:
    weights, metadata = load_tensors(run.model)
    stored = {name: value for name, value in metadata.items() if name != missing}
    save_tensors(run.model, weights, stored)
    message = rf"model\.safetensors does not say .*KeyError\('{missing}'\).*train it again"
    with pytest.raises(RunError, match=message):
        load(run.path)


@pytest.mark.parametrize(
    "changed",
    [
        {"preprocessing": {"side": 28}},
        {"preprocessing": "28 pixels"},
        {"input_shape": 28},
        {"step": None},
        {"encoder": "conv4"},
    ],
)
def test_a_model_with_damaged_metadata_is_named(
    changed: dict[str, object], run: RunDirectory
) -> None:
    weights, metadata = load_tensors(run.model)
    save_tensors(run.model, weights, metadata | changed)
    with pytest.raises(RunError, match=r"model\.safetensors does not say what its model needs"):
        load(run.path)


def test_weights_of_another_encoder_than_the_file_says_are_refused(run: RunDirectory) -> None:
    weights, metadata = load_tensors(run.model)
    name = next(name for name in weights if name.startswith("backbone."))
    save_tensors(run.model, weights | {name: weights[name] + 1}, metadata)
    with pytest.raises(RunError, match=r"model\.safetensors says that its encoder is .* but it ho"):
        load(run.path)


def thresholds() -> Thresholds:
    return Thresholds({1: {1: tuple(float(level) for level in range(LEVELS - 1))}})


def test_a_calibration_is_stored_and_refused_beside_another_encoder(
    run: RunDirectory, tmp_path: Path
) -> None:
    trained = load(run.path)
    assert trained.calibration == Calibration()
    stored = Calibration({1: 1.5, 5: 0.5}, thresholds(), "a digest")
    stored.write(run.calibration, trained.encoder.fingerprint)
    assert load(run.path).calibration == stored
    other = load(write_run(tmp_path / "other", seed=1)).encoder.fingerprint
    stored.write(run.calibration, other)
    ours = trained.encoder.fingerprint
    with pytest.raises(RunError, match=rf"calibration\.json .*{other[:12]}.*holds {ours[:12]}"):
        load(run.path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"encoder": 1, "temperatures": [], "thresholds": null}']
)
def test_a_damaged_calibration_is_named_with_a_way_out(text: str, run: RunDirectory) -> None:
    run.calibration.write_text(text)
    with pytest.raises(RunError, match=r"calibration\.json is damaged: .* vsm models calibrate"):
        load(run.path)


def test_thresholds_that_were_not_measured_are_asked_for_by_name(run: RunDirectory) -> None:
    expected = f"measured for it; measure them with vsm models calibrate {run.path}"
    with pytest.raises(ClassifierError, match=expected):
        load(run.path).thresholds()


# What is the same model, and what is not.


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_whether_it_takes_in_what_people_give(
    method: Method, tmp_path: Path
) -> None:
    trained = load(write_run(tmp_path / "run", method))
    assert (trained.memory is not None) == trained.settings.uses_memory
    if trained.memory is None:
        with pytest.raises(ClassifierError, match=f"the method {method} of .* has no long-term"):
            trained.manual_consolidation()
    else:
        assert trained.manual_consolidation() is not None


def numbers_of(trained: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.model.state_dict().items()}


def test_a_model_with_fewer_slots_is_another_one(run: RunDirectory) -> None:
    trained = load(run.path)
    before = numbers_of(trained)
    fewer = trained.with_slots(5)
    assert fewer.memory is not None
    assert trained.memory is not None
    assert fewer.memory.names == trained.memory.names[:5]
    assert len(fewer.memory.memory) == 5
    assert len(trained.memory.names) == 12
    assert fewer.model is trained.model
    assert all(torch.equal(before[name], value) for name, value in numbers_of(trained).items())


def test_features_are_those_of_the_model_and_nothing_gives_no_rows(run: RunDirectory) -> None:
    trained, dataset = load(run.path), make_dataset()
    ids = np.arange(300)  # more than are embedded at a time
    found = trained.embed(list(dataset.images[ids]))
    with torch.no_grad():
        expected = trained.model.embed(dataset.normalize(dataset.load(ids)))
    torch.testing.assert_close(found, expected)
    assert trained.embed([]).shape == (0, trained.model.num_features)
