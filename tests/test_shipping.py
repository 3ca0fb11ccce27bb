"""Making models that ship: storing, measuring, refusing, describing."""

import json
import math
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch

import vsm
from run_helpers import train_run
from tiny import make_settings, variant
from vsm.cli import main
from vsm.cli.main import _with_underscores
from vsm.cli.train import Pretrain, Train, parse_run
from vsm.data import ImageDataset
from vsm.data.images import Preprocessing
from vsm.encoders import EncoderIdentity
from vsm.errors import RunError
from vsm.evaluation.calibration import calibrate_on_validation
from vsm.memory import Observations
from vsm.model import FewShotModel
from vsm.runs.configuration import settings_to_yaml
from vsm.runs.directory import PretrainingDirectory, RunDirectory
from vsm.runs.loading import load
from vsm.runs.trained_model import ModelOnData, TrainedModel, save_best
from vsm.settings import Method, ModelSettings, OneCycleSettings, PretrainSettings, RunSettings
from vsm.system.files import read_json, write_text
from vsm_lab import shipping
from vsm_lab.provenance import portable, training_commands
from vsm_lab.shipping import to_half_precision

BRIEF = ["--queries", "2", "--episodes", "10"]
HALF_A_STEP = 2.0**-11  # half the distance of two neighbors in float16, relative to their size
SMALLEST_STEP = 2.0**-24


@pytest.fixture(scope="module", autouse=True)
def _tiny_data(tiny_dataset: ImageDataset) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training", "encoders.encoder"):
            patch.setattr(f"vsm.{module}.open_dataset", lambda name: tiny_dataset)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, _tiny_data: None) -> Path:
    """A trained run."""
    return train_run(make_settings(), tmp_path_factory.mktemp("runs") / "a").path


@pytest.fixture
def any_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storing change any accuracy: a few queries of a barely trained model are near ties."""
    monkeypatch.setattr(shipping, "LARGEST_CHANGE", 1.0)


def trained_model(folder: Path, settings: RunSettings, dataset: ImageDataset) -> TrainedModel:
    """An untrained model whose memory has taken in something, as far as it has one."""
    model = FewShotModel(settings, dataset.input_shape).eval()
    model.encoder.preprocessing = Preprocessing.of(dataset)
    features = torch.randn(6, model.num_features, generator=torch.Generator().manual_seed(1))
    seen = Observations(features, torch.tensor([3, 3, 5, 5, 9, 9]))
    with torch.no_grad():
        memory = model.consolidate(model.empty_memory(), seen, 1)
    run = RunDirectory(folder)
    write_text(run.config, settings_to_yaml(settings))
    save_best(run, model, memory, 7, dataset)
    return load(folder)


def stored(folder: Path, trained: TrainedModel) -> RunDirectory:
    run = RunDirectory(folder)
    write_text(run.config, settings_to_yaml(trained.settings))
    trained.store(run, to_half_precision)
    return run


def assert_rounded(found: torch.Tensor, before: torch.Tensor) -> None:
    """Both are of one kind, and no further apart than rounding to half precision allows."""
    assert found.dtype == before.dtype
    allowed = before.abs().double() * HALF_A_STEP + SMALLEST_STEP
    assert ((found.double() - before.double()).abs() <= allowed).all()


def ship(run: Path, output: Path, *more: str) -> int:
    return main([*ship_words(run, output), "--json", *more])


def ship_words(run: Path, output: Path) -> list[str]:
    words = ["models", "ship", str(run), "--name", "small", "--output", str(output), *BRIEF]
    return [*words, "--data-license", "free for research"]


def shipped(run: Path, output: Path, *more: str) -> dict[str, Any]:
    assert ship(run, output, *more) == 0
    card: dict[str, Any] = read_json(output / "small" / "card.json")
    return card


def test_only_matrices_that_fit_are_halved() -> None:
    tensors = {
        "kernel": torch.randn(2, 3, 3, 3),
        "bias": torch.randn(3),
        "scale": torch.tensor(0.3),
        "counter": torch.ones(2, 2, dtype=torch.int64),
        "exact": torch.randn(2, 2, dtype=torch.float64),
        "large": torch.full((2, 2), 1e6),
        "content": torch.randn(2, 2, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    result = to_half_precision(tensors)
    assert result.keys() == tensors.keys()
    small = {name for name, value in result.items() if value.dtype == torch.float16}
    assert small == {"kernel", "empty", "content"}
    scatter = torch.randn(2, 2, dtype=torch.float64)
    [single] = to_half_precision({"shared_scatter": scatter}).values()
    assert single.dtype == torch.float32
    assert torch.equal(single, scatter.float())
    for name in tensors.keys() - small:
        assert torch.equal(result[name], tensors[name])


@pytest.mark.parametrize("method", ["protonet", "rote", "vsm", "mann", "kanerva"])
def test_weights_and_memory_come_back_in_their_own_precision_rounded_to_half(
    method: Method, tmp_path: Path, tiny_dataset: ImageDataset, tiny_settings: RunSettings
) -> None:
    settings = variant(tiny_settings, method=method)
    before = trained_model(tmp_path / "single", settings, tiny_dataset)
    after = load(stored(tmp_path / "half", before).path)
    weights = after.model.state_dict()
    for name, value in before.model.state_dict().items():
        assert_rounded(weights[name], value)
    assert (after.memory is None) == (before.memory is None)
    if before.memory is not None and after.memory is not None:
        for name, value in before.memory.memory.tensors().items():
            assert_rounded(after.memory.memory.tensors()[name], value)
        assert after.memory.names == before.memory.names
    assert after.step == 7
    assert not after.model.training


def test_the_files_are_about_half_as_large(
    tmp_path: Path, tiny_dataset: ImageDataset, tiny_settings: RunSettings
) -> None:
    wide = variant(tiny_settings, model=replace(tiny_settings.model, channels=16, hidden_units=64))
    stored(tmp_path / "half", trained_model(tmp_path / "single", wide, tiny_dataset))
    single, half = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("single", "half")
    )
    assert half < 0.6 * single


def test_the_fingerprint_is_that_of_backbone_adapter_and_normalization(
    tiny_dataset: ImageDataset, tiny_settings: RunSettings
) -> None:
    model_settings = replace(tiny_settings.model, adapter="linear")
    settings = variant(tiny_settings, model=model_settings)
    weights = FewShotModel(settings, tiny_dataset.input_shape).state_dict()

    def identified(values: dict[str, torch.Tensor]) -> str:
        return EncoderIdentity.of(settings.model, settings.data, values).fingerprint

    same = identified(weights)
    assert len(same) == 64

    def changed(name: str) -> str:
        value = weights[name].clone(memory_format=torch.contiguous_format)
        value.view(-1)[-1] += 1e-3
        return EncoderIdentity.of(
            settings.model, settings.data, {**weights, name: value}
        ).fingerprint

    assert (
        same
        == EncoderIdentity.of(
            settings.model, settings.data, dict(reversed(weights.items()))
        ).fingerprint
    )
    encoder = {name for name, value in weights.items() if value.is_floating_point()}
    encoder = {name for name in encoder if name.startswith(("backbone.", "adapter."))}
    assert {name for name in encoder if name.endswith("running_var")}
    for name in encoder:
        assert changed(name) != same, name
    assert changed("inference.head.output.weight") == same
    for other in (
        replace(model_settings, normalize_features=True),
        replace(model_settings, mirror=True),
        replace(model_settings, shift=1),
    ):
        assert EncoderIdentity.of(other, settings.data, weights).fingerprint != same


def test_what_belongs_to_another_encoder_is_named(
    tmp_path: Path, tiny_dataset: ImageDataset, tiny_settings: RunSettings
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    trained_model(one, tiny_settings, tiny_dataset)
    trained_model(two, variant(tiny_settings, seed=1), tiny_dataset)
    shutil.copy(two / "memory.safetensors", one / "memory.safetensors")
    with pytest.raises(RunError, match=r"memory\.safetensors belongs to the encoder .* exchanged"):
        load(one)


def test_the_card_tells_what_was_measured_and_how_it_was_made(
    run: Path, tmp_path: Path, any_change: None, capsys: pytest.CaptureFixture[str]
) -> None:
    card = shipped(run, tmp_path, "--shots", "1,5", "--seed", "3")
    assert json.loads(capsys.readouterr().out) == card
    assert (card["name"], card["method"], card["data"]) == ("small", "vsm", "tiny")
    assert (card["way"], card["shot"], card["step"]) == (3, 1, card["step"])
    assert (card["input_shape"], card["backbone"]) == ([1, 28, 28], "conv4")
    assert card["preprocessing"].keys() >= {"mean", "std", "side", "channels"}
    assert card["storage"] == "float16"
    assert card["temperatures"] is None
    assert card["licenses"] == {"code": "MIT", "data": "free for research"}
    assert {"vsm", "python", "torch", "safetensors"} <= card["versions"].keys()
    files = [file for file in (tmp_path / "small").iterdir() if file.name != "card.json"]
    assert card["bytes"] == sum(file.stat().st_size for file in files)
    assert [one["shot"] for one in card["measurements"]] == [1, 5]
    for one in card["measurements"]:
        asked = ["--shot", str(one["shot"]), "--seed", "3", *BRIEF, "--json"]
        for path, told in ((run, one["run"]), (tmp_path / "small", one)):
            assert main(["evaluate", str(path), *asked]) == 0
            measured = json.loads(capsys.readouterr().out)
            for key in ("accuracy", "ci95", "nll", "ece"):
                assert told[key] == pytest.approx(measured[key]), key
        gap = one["accuracy"] - one["run"]["accuracy"]
        assert one["difference"]["accuracy"] == pytest.approx(gap)
    assert card["memory_slots"] == measured["memory_slots"]


def test_a_model_that_storing_damaged_is_refused_and_nothing_is_left(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ruined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros_like(value) if value.is_floating_point() else value
            for name, value in tensors.items()
        }

    before = shipped(run, tmp_path, "--storage", "float32")
    monkeypatch.setattr(shipping, "to_half_precision", ruined)
    capsys.readouterr()
    assert ship(run, tmp_path, "--overwrite") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vsm models: storage: float16 changed the 3-way 1-shot accuracy by -")
    assert "at most 0.1 are allowed; nothing was written" in line
    assert "--storage float32" in line
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert read_json(tmp_path / "small" / "card.json") == before
    assert ship(run, tmp_path / "new") == 2
    assert list((tmp_path / "new").iterdir()) == []


def test_a_change_of_exactly_the_allowed_size_passes_and_more_does_not(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LARGEST_CHANGE", 0.0)
    assert ship(run, tmp_path, "--storage", "float32") == 0
    monkeypatch.setattr(shipping, "LARGEST_CHANGE", -1e-9)
    assert ship(run, tmp_path, "--storage", "float32", "--overwrite") == 2


def test_a_model_is_replaced_only_on_request_and_nothing_else_ever(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ["--storage", "float32"]
    first = shipped(run, tmp_path, *exact, "--seed", "1")
    assert ship(run, tmp_path, *exact) == 2
    assert "small is there already; replace it with --overwrite" in capsys.readouterr().err
    second = shipped(run, tmp_path, *exact, "--seed", "2", "--overwrite")
    assert first["measurements"] != second["measurements"]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    (tmp_path / "small" / "card.json").unlink()
    assert ship(run, tmp_path, *exact, "--overwrite") == 2
    assert "small holds no model" in capsys.readouterr().err
    assert (tmp_path / "small" / "model.safetensors").exists()


def test_the_stored_model_loads_without_the_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = shipped(run, tmp_path, "--storage", "float32")
    monkeypatch.setattr("vsm.data.catalog.open_images", lambda *_: pytest.fail("opened data"))
    trained = vsm.load(tmp_path / "small")
    assert trained.card == card
    assert trained.memory is not None
    assert len(trained.memory.memory) == len(trained.memory.names) == card["memory_slots"]
    assert trained.model.embed(torch.zeros(2, 1, 28, 28)).shape == (2, card["num_features"])
    original = vsm.load(run)
    assert original.memory is not None
    assert trained.memory.names == original.memory.names
    for name, value in original.model.state_dict().items():
        assert torch.equal(trained.model.state_dict()[name], value)
    with pytest.raises(RunError, match="the model small has no last state"):
        load(tmp_path / "small", checkpoint="last")


def test_a_card_of_another_model_or_a_damaged_one_is_named(run: Path, tmp_path: Path) -> None:
    card = shipped(run, tmp_path, "--storage", "float32")
    path = tmp_path / "small" / "card.json"
    other = {"name": "resnet12 of birds", "fingerprint": "0" * 64}
    path.write_text(json.dumps({**card, "encoder": other}))
    with pytest.raises(
        RunError, match=r"card\.json belongs to the encoder resnet12 of birds \[0{12}"
    ):
        load(tmp_path / "small")
    path.write_text("{")
    with pytest.raises(RunError, match=r"card\.json is damaged"):
        load(tmp_path / "small")
    path.write_text('{"name": "small", "way": 5, "shot": 1}')
    with pytest.raises(RunError, match="not a model's card: it lacks encoder"):
        load(tmp_path / "small")


def test_a_fitted_temperature_is_on_the_card_and_evaluations_can_use_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ["--storage", "float32"]
    card = shipped(run, tmp_path, *exact, "--calibrate", "--shots", "1,5")
    assert card["temperatures"].keys() == {"1", "5"}
    capsys.readouterr()
    for one in card["measurements"]:
        assert one["calibrated"]["accuracy"] == one["accuracy"]
        assert one["calibrated"]["nll"] != one["nll"]
        asked = ["--shot", str(one["shot"]), *BRIEF, "--calibrated"]
        assert main(["evaluate", str(tmp_path / "small"), *asked, "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)
        assert measured["temperature"] == card["temperatures"][str(one["shot"])]
        assert measured["nll"] == pytest.approx(one["calibrated"]["nll"])
        assert measured["ece"] == pytest.approx(one["calibrated"]["ece"])
    assert main(["evaluate", str(tmp_path / "small"), *BRIEF, "--calibrated"]) == 0
    assert "temperature" in capsys.readouterr().out
    assert main(["evaluate", str(run), *BRIEF, "--calibrated"]) == 2
    assert "a has no fitted temperature" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--classifier", "cosine", "--calibrated"]) == 2
    assert "calibrated: the card's temperature is the model's" in capsys.readouterr().err


def test_the_classifier_of_a_shipped_model_is_calibrated_by_its_card(
    run: Path, tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    card = shipped(run, tmp_path, "--storage", "float32", "--calibrate", "--shots", "1,5")
    chosen = tiny_dataset.classes("test")[:3].tolist()
    images = [list(tiny_dataset.images[tiny_dataset.image_ids(c)]) for c in chosen]
    asked = [image for of_class in images for image in of_class[5:]]

    def probabilities(shot: int, temperature: float | None) -> torch.Tensor:
        classifier = vsm.FewShotClassifier.from_pretrained(
            tmp_path / "small", temperature=temperature
        )
        examples = [image for of_class in images for image in of_class[:shot]]
        classifier.fit(examples, [c for c in chosen for _ in range(shot)])
        return torch.from_numpy(classifier.predict_proba(asked)).double()

    for shot in (1, 5):
        plain = probabilities(shot, 1.0)
        for given, used in ((None, card["temperatures"][str(shot)]), (3.0, 3.0)):
            powers = plain ** (1 / used)
            expected = powers / powers.sum(1, keepdim=True)
            found = probabilities(shot, given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            assert torch.equal(found.argmax(1), plain.argmax(1))


def test_when_to_answer_none_is_shipped_and_can_be_measured_again_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_dataset: ImageDataset
) -> None:
    card = shipped(run, tmp_path, "--storage", "float32", "--calibrate")
    folder = tmp_path / "small"
    first = read_json(folder / "calibration.json")
    trained = load(run)
    found = calibrate_on_validation(trained.model, trained.state, tiny_dataset).thresholds
    assert found is not None
    measured = found.by_shot
    known = load(folder).thresholds()
    assert known.by_shot.keys() == measured.keys() == {1, 2, 5, 10}
    for shot, ways in measured.items():
        for way, values in ways.items():
            assert known.by_shot[shot][way] == pytest.approx(values, rel=1e-4)

    spoiled = {**first, "thresholds": None}
    (folder / "calibration.json").write_text(json.dumps(spoiled))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    capsys.readouterr()
    assert main(["models", "calibrate", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"model": str(folder), "shots": [1, 2, 5, 10]}
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert read_json(folder / "calibration.json") == first
    assert read_json(folder / "card.json") == card
    for name in before.keys() - {"calibration.json"}:
        assert after[name] == before[name], name
    assert main(["models", "calibrate", str(run)]) == 0
    assert "rejection thresholds for 1, 2, 5, 10 shots" in capsys.readouterr().out
    assert main(["models", "calibrate", str(tmp_path / "absent")]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"encoder": "0" * 64},
            "was measured with the encoder 000000000000, but model.safetensors",
        ),
        ({"thresholds": {"1": {"5": [1.0]}}}, r"calibration.json is damaged: .*199 th"),
        ({"thresholds": 3}, r"calibration.json is damaged"),
        ({"thresholds": {"1": {"5": [math.nan] * 199}}}, "expected numbers as thresholds"),
        ({"thresholds": {"1": {"5": ["1"] * 199}}}, "expected numbers as thresholds"),
        ({"thresholds": {"0": {"5": [1.0] * 199}}}, "at least 1 image"),
        ({"temperatures": {"1": -1.0}}, "expected temperatures above 0"),
        ({"temperatures": {"1": 0.0}}, "expected temperatures above 0"),
        ({"temperatures": {"1": math.nan}}, "expected temperatures above 0"),
        ({"temperatures": {"1": "1"}}, "expected temperatures above 0"),
        ({"temperatures": {"x": 1.0}}, "invalid literal"),
        ({"temperatures": [1.0]}, "calibration.json is damaged"),
        ({"memory_digest": [1]}, "expected a text as memory_digest"),
        ({"digest": "0" * 64}, "its digest belongs to other contents"),
    ],
)
def test_thresholds_of_another_model_or_damaged_ones_are_named(
    change: dict[str, Any], named: str, run: Path, tmp_path: Path
) -> None:
    shipped(run, tmp_path, "--storage", "float32")
    path = tmp_path / "small" / "calibration.json"
    path.write_text(json.dumps(read_json(path) | change))
    with pytest.raises(RunError, match=named):
        vsm.FewShotClassifier.from_pretrained(tmp_path / "small")


def test_the_table_is_for_people(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ship_words(run, tmp_path), "--storage", "float32", "--calibrate"]) == 0
    printed = capsys.readouterr().out
    for words in ("3-way 1-shot, run", "stored", "calibrated", "+0.000 ± 0.000", "load it with"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--name", "Not Good"], "name: expected lowercase letters and digits"),
        (["--name", "../up"], "name: expected lowercase letters and digits"),
        (["--name", "x", "--shots", "one"], "shots: expected numbers by comma, got 'one'"),
        (["--name", "x", "--episodes", "1"], "episodes: an interval needs at least 2"),
        (["--name", "x", "--way", "900"], "way: 900 classes asked for"),
        (["--name", "x", "--queries", "2", "--shots", "1,99"], "shot + queries: 99 + 2 = 101"),
    ],
)
def test_mistakes_are_named_with_exit_code_2(
    arguments: list[str],
    named: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "models",
        "ship",
        str(run),
        "--output",
        str(tmp_path / "new"),
        "--data-license",
        "free",
    ]
    assert main([*words, *arguments, "--json"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
    assert not (tmp_path / "new" / "x").exists()


def test_what_cannot_be_measured_is_said_before_anything_is_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelOnData, "measure", lambda *_: pytest.fail("it was measured first"))
    assert ship(run, tmp_path, "--shots", "1,5,99") == 2
    assert "shot + queries: 99 + 2 = 101 samples" in capsys.readouterr().err


def test_the_license_of_data_must_be_known(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ship_words(run, tmp_path)[:-2], "--storage", "float32", "--json"]
    assert main(words) == 2
    assert "data_license: the card must say under which terms tiny" in capsys.readouterr().err
    monkeypatch.setitem(shipping.OWN_DATA_LICENSES, "tiny", "drawn by a test")
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["licenses"]["data"] == "drawn by a test"


def test_models_with_code_of_their_own_do_not_ship(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = RunSettings(model=ModelSettings(backbone="mine:network"))
    RunDirectory(tmp_path / "own").create(settings)
    assert ship(tmp_path / "own", tmp_path) == 2
    assert "only models of built-in backbones ship" in capsys.readouterr().err


def train_settings(command: str) -> RunSettings:
    parser = jsonargparse.ArgumentParser()
    Train.add_arguments(parser)
    return parse_run(parser, words_of(command), RunSettings)[1]


def words_of(command: str) -> list[str]:
    program, _, *words = shlex.split(command)
    assert program == "vsm"
    return [_with_underscores(word) for word in words]


def test_the_commands_of_a_card_make_the_same_settings(
    run: Path, tmp_path: Path, any_change: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = shipped(run, tmp_path, "--shots", "1,5", "--calibrate")
    training, shipping_command = card["commands"]
    monkeypatch.chdir(tmp_path)
    assert train_settings(training) == RunDirectory(run).settings()
    assert shipping_command == (
        "vsm models ship runs/small --name small --shots 1,5 --queries 2 --episodes 10 "
        "--data-license 'free for research' --calibrate"
    )


def test_a_run_on_a_pre_trained_backbone_tells_both_commands_and_no_path_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = PretrainSettings(epochs=3, channels=8, optimizer=OneCycleSettings(learning_rate=0.05))
    PretrainingDirectory(tmp_path / "backbone").create(before)
    settings = RunSettings(
        init=str(tmp_path / "backbone"), freeze_backbone=True, model=ModelSettings(channels=8)
    )
    first, second = training_commands(settings, "runs/small")
    assert str(tmp_path) not in first + second
    monkeypatch.chdir(tmp_path)
    parser = jsonargparse.ArgumentParser()
    Pretrain.add_arguments(parser)
    parsed, read = parse_run(parser, words_of(first), PretrainSettings)
    assert read == before
    assert parsed.output == Path("runs/small-backbone")
    stays = portable(settings, "runs/small")
    assert stays == replace(settings, init="runs/small-backbone")
    absolute = str((tmp_path / "runs" / "small-backbone").resolve())
    assert train_settings(second) == replace(settings, init=absolute)
    shutil.rmtree(tmp_path / "backbone")
    with pytest.raises(
        RunError, match=r"init: the run began with the backbone of .* which is gone"
    ):
        training_commands(settings, "runs/small")
