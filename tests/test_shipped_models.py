"""Models that ship with the package, by name: from Python, and on the command line."""

import importlib.resources
import json
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vsm
from vsm.cli import main
from vsm.cli.train import _findable
from vsm.data import open_dataset
from vsm.errors import RunError
from vsm.evaluation.calibration import Calibration
from vsm.model import FewShotModel
from vsm.runs.checkpoints import begin_with_backbone
from vsm.runs.directory import find_run, shipped_card, shipped_names
from vsm.settings import ModelSettings, RunSettings

NAME = "glyphs-5w1s"
KNOWN = ", ".join(shipped_names())
FILES = {"config.yaml", "model.safetensors", "memory.safetensors", "card.json", "calibration.json"}


@pytest.mark.parametrize("name", shipped_names())
def test_the_package_holds_the_files_of_every_model(name: str) -> None:
    folder = importlib.resources.files("vsm") / "models" / name
    held = {file.name for file in folder.iterdir()}
    has_memory = shipped_card(name)["memory_slots"] is not None
    assert held == (FILES if has_memory else FILES - {"memory.safetensors"})
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert card["name"] == name
    sizes = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert card["bytes"] == sum(sizes.values()) - sizes["card.json"]


def test_the_wheel_is_told_to_hold_models_whatever_git_ignores() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "src/vsm/models/**" in wheel["artifacts"]
    assert wheel["packages"] == ["src/vsm"]


@pytest.mark.parametrize("name", shipped_names())
def test_every_model_loads_by_name_without_data_and_is_what_its_card_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.data.catalog.open_images", no_data)
    trained = vsm.load(name)
    card, model = trained.card, trained.model
    assert card == shipped_card(name)
    assert card is not None
    assert card["name"] == trained.name == name
    assert (0 if trained.state is None else len(trained.state)) == (card["memory_slots"] or 0)
    names = () if trained.memory is None else trained.memory.names
    assert len(names) == (card["memory_slots"] or 0)
    assert all(value.dtype == torch.float32 for value in model.parameters())
    assert sum(value.numel() for value in model.parameters()) == card["num_parameters"]
    assert model.embed(torch.zeros(1, *card["input_shape"])).shape == (1, card["num_features"])
    for key, value in json.loads(json.dumps(trained.metadata())).items():
        assert card[key] == value or key in ("way", "shot"), key
    fitted = {str(shot): value for shot, value in trained.calibration.temperatures.items()}
    assert (card["temperatures"] or {}) == fitted
    for one in card["measurements"]:
        assert one["episodes"] >= 2000
        assert 0 < one["ci95"] < 0.01
        assert abs(one["difference"]["accuracy"]) <= 0.001
    assert card["licenses"].keys() == {"code", "data"}
    assert card["commands"][-1].startswith(f"vsm models ship runs/{name} ")


def no_data(*_: object) -> None:
    pytest.fail("a dataset was opened")


@pytest.mark.usefixtures("all_glyphs")
def test_a_short_measurement_agrees_with_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--model", NAME, "--episodes", "100", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    first = shipped_card(NAME)["measurements"][0]
    assert (measured["way"], measured["shot"]) == (first["way"], first["shot"]) == (5, 1)
    assert measured["accuracy"] == pytest.approx(first["accuracy"], abs=2 * measured["ci95"])
    assert measured["memory_slots"] == shipped_card(NAME)["memory_slots"]


def listing(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["models", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_lists_all_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert [card["name"] for card in listing(capsys)["models"]] == shipped_names()
    assert listing(capsys, NAME) == shipped_card(NAME)
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    assert NAME in table
    assert "±" in table
    assert main(["models", NAME]) == 0
    table = capsys.readouterr().out
    for words in ("encoder", "5-way 1-shot, run", "stored", "vsm train", "licenses", "float16"):
        assert words in table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["models", "cat"], f"model: unknown model 'cat'; known: {KNOWN}"),
        (["evaluate", "--model", "cat"], f"model: unknown model 'cat'; known: {KNOWN}"),
        (["evaluate", "cat"], "no model of that name ships with vsm; known: "),
        (["compare", NAME, "cat", "--json"], "cat is not a run directory: it has no config.yaml"),
        (["evaluate"], "run: give a run directory, or a shipped model with --model NAME"),
        (["evaluate", "here", "--model", NAME], "run: give a run directory, or a shipped model"),
        (["evaluate", NAME, "--checkpoint", "last"], f"the model {NAME} has no last state"),
        (["evaluate", "runs/cat"], "runs/cat is not a run directory: it has no config.yaml"),
    ],
)
def test_unknown_names_are_answered_in_one_line_with_exit_code_2(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "vsm.runs.trained_model.evaluate", lambda *_: pytest.fail("it was measured first")
    )
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


def test_names_stand_where_run_directories_stand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", NAME, "--episodes", "20", "--json"]) == 0
    by_name = json.loads(capsys.readouterr().out)
    arguments = ["compare", NAME, "--baselines", "cosine", "--episodes", "20", "--json"]
    assert main(arguments) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["runs"] == [{"run": NAME, **by_name}]
    assert compared["baselines"][0]["features_of"] == NAME


def test_a_directory_that_exists_is_meant_before_a_model_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_run(NAME).name == NAME
    assert find_run(NAME).is_absolute()
    (tmp_path / NAME).mkdir()
    assert find_run(NAME) == Path(NAME)
    with pytest.raises(RunError, match=f"{NAME} is not a run directory: it has no config.yaml"):
        vsm.load(NAME)


def test_a_shipped_backbone_can_begin_a_run() -> None:
    channels = vsm.load(NAME).settings.model.channels
    settings = RunSettings(init=NAME, model=ModelSettings(channels=channels, hidden_units=8))
    assert _findable(settings) == settings
    model = FewShotModel(settings, open_dataset("glyphs").input_shape)
    begin_with_backbone(model, Path(NAME))
    expected = vsm.load(NAME).model.require_backbone().state_dict()
    for name, value in model.require_backbone().state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("shot", "expected"),
    [(0.5, 1.6), (1, 1.6), (2, 0.8), (2 * 2**0.5, 0.8 / 2**0.5), (4, 0.4), (9, 0.4)],
)
def test_a_temperature_between_two_shots_is_in_proportion(shot: float, expected: float) -> None:
    assert Calibration({4: 0.4, 1: 1.6}).temperature(shot) == pytest.approx(expected, rel=1e-12)
    assert Calibration({1: 0.9}).temperature(shot) == 0.9


@pytest.mark.parametrize("name", shipped_names())
def test_every_model_says_none_of_these_without_its_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.data.catalog.open_images", no_data)
    classifier = vsm.FewShotClassifier.from_pretrained(name)
    pixels = torch.rand(7, *shipped_card(name)["input_shape"], generator=torch.manual_seed(0))
    classifier.fit(pixels[:2], ["one", "two"])
    assert set(classifier.predict(pixels, reject=0.9)) <= {"one", "two", "none of these"}
    assert classifier.encoder is not None
    known = classifier.encoder.thresholds()
    assert list(known.by_shot) == [1, 2, 5, 10]
    for ways in known.by_shot.values():
        assert list(ways)[:3] == [1, 2, 5]
        for fewer, more in pairwise(ways.values()):
            assert list(fewer) == sorted(fewer)
            nearer = np.mean(more) - np.mean(fewer)
            assert nearer < 1e-3, "of more classes the nearest is nearer, but for ties"


def test_without_a_fit_there_is_no_temperature() -> None:
    assert Calibration().temperature(1) is None


def test_listing_models_needs_no_torch() -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        "for words in ('models --help', 'models ship --help', 'evaluate --help'):\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "assert main(['models']) == 0\n"
        f"assert main(['models', '{NAME}']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"--calibrate" in done.stdout


@pytest.mark.parametrize("words", [["glyphs-5w1s", "--json"], ["--json", "glyphs-5w1s"]])
def test_the_card_of_a_model_is_shown_wherever_the_option_stands(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", *words]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "glyphs-5w1s"
