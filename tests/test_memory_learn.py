"""``vsm memory learn``: a run directory from one pass, used like any other, and what it refuses."""

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vsm
from vsm.cli import main
from vsm.data.features import write
from vsm.errors import EpisodeError, SettingsError
from vsm.evaluation.evaluator import EpisodeProtocol
from vsm.learning import LearnedMemory, learn_memory
from vsm.memory import GaussianMemory
from vsm.runs.directory import RunDirectory
from vsm.runs.trained_model import save_best
from vsm.settings import ModelSettings, RunSettings
from vsm.training import learn_closing_memory, train
from vsm_lab.provenance import learn_command

WIDTH, CLASSES, EACH = 12, 24, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Features whose classes differ in other directions than their members."""
    random = np.random.default_rng(0)
    between, within = np.linspace(2, 0.2, WIDTH), np.linspace(0.3, 3, WIDTH)
    means = between * random.normal(size=(CLASSES, WIDTH))
    rows = means.repeat(EACH, 0) + within * random.normal(size=(CLASSES * EACH, WIDTH))
    path = tmp_path_factory.mktemp("features") / "made.safetensors"
    names = [f"class{number:02}" for number in range(CLASSES)]
    splits: dict[str, Any] = {name: "test" if n >= 16 else "train" for n, name in enumerate(names)}
    write(
        path,
        rows.astype(np.float32),
        np.arange(CLASSES).repeat(EACH),
        class_names=names,
        splits=splits,
    )
    return f"features:{path}"


@pytest.fixture(scope="module")
def run(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "g"
    assert main(["memory", "learn", "--data", data, "--output", str(path), "--json"]) == 0
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_was_learned_is_a_run_directory_that_tells_how_it_is_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "memory.safetensors"):
        assert (run / name).is_file()
    trained = vsm.load(run)
    assert isinstance(trained.state, GaussianMemory)
    assert trained.memory is not None
    assert trained.memory.names == tuple(f"class{number:02}" for number in range(16))
    assert trained.state.read_settings.uses_memory
    assert main(["memory", "show", str(run), "--json"]) == 0
    shown = printed(capsys)
    assert shown["reading"]["epsilon"] == trained.state.read_settings.epsilon
    assert "left out" in shown["choice"]["episodes_of"]
    assert any(row["epsilon"] == row["beta"] == "inf" for row in shown["choice"]["table"])
    assert main(["memory", "show", str(run)]) == 0
    assert "nats per query against no memory" in " ".join(capsys.readouterr().out.split())


def test_it_is_evaluated_with_fewer_classes_and_beside_baselines(
    run: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--way", "5", "--shot", "1", "--queries", "6", "--episodes", "300", "--json"]
    accuracies = {}
    for count in ("0", "4", "16"):
        assert main(["evaluate", str(run), "--memory-classes", count, *few]) == 0
        found = printed(capsys)
        assert found["memory_slots"] == int(count)
        assert found["inference"] == "gaussian"
        accuracies[count] = found["accuracy"]
    assert accuracies["16"] > accuracies["0"] + 0.05, "the memory knows which directions are noise"
    words = ["compare", str(run), "--baselines", "cosine,simpleshot,protonet-adapter", *few]
    assert main(words) == 0
    compared = printed(capsys)
    assert [one["method"] for one in compared["baselines"]][-1] == "protonet-adapter"
    assert len(compared["differences"]) == 6
    protocol = EpisodeProtocol(data, "test", 5, 1, 6, 2, 0, memory_slots=17)
    with pytest.raises(EpisodeError, match="remembers 16 classes, got 17"):
        vsm.load(run).on(protocol)


def test_part_of_the_classes_is_what_they_give_alone(run: Path, data: str, tmp_path: Path) -> None:
    part = tmp_path / "part"
    words = ["memory", "learn", "--data", data, "--output", str(part), "--classes", "5", "--json"]
    assert main(words) == 0
    protocol = EpisodeProtocol(data, "test", 5, 1, 6, 2, 0, memory_slots=5)
    cut, alone = vsm.load(run).on(protocol).trained.state, vsm.load(part).state
    assert isinstance(cut, GaussianMemory)
    assert isinstance(alone, GaussianMemory)
    torch.testing.assert_close(cut.tensors(), alone.tensors())


def test_a_memory_like_another_merges_with_it(
    run: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    words = ["memory", "learn", "--data", data, "--output", str(other), "--classes", "3", "--json"]
    assert main([*words, "--seed", "1"]) == 0
    merged = ["memory", "merge", str(run), str(other), "--output", str(tmp_path / "m.safetensors")]
    capsys.readouterr()
    assert main(merged) == 2
    assert "learn one like the other with vsm memory learn --like" in capsys.readouterr().err
    assert not (tmp_path / "m.safetensors").exists()
    assert main([*words, "--overwrite", "--like", str(run)]) == 0
    capsys.readouterr()
    assert main(merged) == 2, "the same images are in both, and their scatter is not kept apart"
    assert "learned from the same images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--classes", "17"], "classes: expected 1 to 16"),
        (["--classes", "0"], "classes: expected 1 to 16"),
        (["--gaussian.epsilon", "-1"], "epsilon: must be greater than 0"),
        (["--gaussian.rho", "1.5"], "rho: must lie in"),
        (["--encoder", "nowhere"], "nowhere is not a run directory"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_one_line(
    words: list[str],
    told: str,
    data: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "x"
    assert main(["memory", "learn", "--data", data, "--output", str(output), *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert not output.exists()


def test_images_need_an_encoder_and_runs_are_not_overwritten(
    run: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "learn", "--data", "glyphs", "--output", str(tmp_path / "x")]) == 2
    assert "encoder: glyphs holds images" in capsys.readouterr().err
    before = (run / "memory.safetensors").read_bytes()
    assert main(["memory", "learn", "--data", data, "--output", str(run)]) == 2
    assert "already holds a run; replace it with --overwrite" in capsys.readouterr().err
    assert (run / "memory.safetensors").read_bytes() == before


def test_a_memory_of_one_class_is_read_as_none(data: str, tmp_path: Path) -> None:
    output = tmp_path / "one"
    words = ["memory", "learn", "--data", data, "--output", str(output), "--classes", "1", "--json"]
    assert main(words) == 0
    state = vsm.load(output).state
    assert isinstance(state, GaussianMemory)
    assert not state.read_settings.uses_memory


def test_gaussian_inference_trains_no_backbone_from_scratch(data: str, tmp_path: Path) -> None:
    settings = RunSettings(data=data, model=ModelSettings(inference="gaussian"))
    with pytest.raises(SettingsError, match=r"gaussian trains a backbone that is .* memory learn"):
        train(settings, tmp_path / "x")
    assert not (tmp_path / "x").exists()


SHORT_TRAINING = [
    *("--way", "3", "--queries", "4", "--tasks", "1", "--steps", "4", "--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "20"),
    *("--validation.every", "4", "--validation.episodes", "200", "--json"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of ``vsm train`` on features that the Gaussian memory serves well, and its report."""
    random, folder = np.random.default_rng(1), tmp_path_factory.mktemp("trained")
    between, within = np.linspace(2, 0.2, WIDTH), np.linspace(0.3, 3, WIDTH)
    means = between * random.normal(size=(CLASSES, WIDTH))
    rows = means.repeat(EACH, 0) + within * random.normal(size=(CLASSES * EACH, WIDTH))
    names = [f"class{number:02}" for number in range(CLASSES)]
    splits: dict[str, Any] = {
        name: "train" if n < 12 else "validation" if n < 18 else "test"
        for n, name in enumerate(names)
    }
    ids = np.arange(CLASSES).repeat(EACH)
    write(folder / "f.safetensors", rows.astype(np.float32), ids, class_names=names, splits=splits)
    words = ["--data", f"features:{folder}/f.safetensors", "--output", str(folder / "run")]
    with redirect_stdout(io.StringIO()) as output:
        assert main(["train", *words, *SHORT_TRAINING]) == 0
    return folder / "run", json.loads(output.getvalue())["gaussian"]


def test_training_ends_with_a_memory_that_validation_prefers_and_the_run_is_read_by_it(
    trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, learned = trained
    assert learned["used"]
    assert learned["difference"]["mean"] > learned["difference"]["ci95"] > 0
    assert vsm.load(run).inference == vsm.load(run, inference="gaussian").inference == "gaussian"
    assert vsm.load(run).settings.way == 3
    assert vsm.load(run, inference="conjugate").inference == "conjugate"
    assert vsm.load(run, checkpoint="last").inference == "conjugate"
    for words, name in (([], "gaussian"), (["--inference", "conjugate"], "conjugate")):
        command = ["evaluate", str(run), "--queries", "4", "--episodes", "5", "--json", *words]
        assert main(command) == 0
        assert printed(capsys)["inference"] == name
    assert main(["memory", "show", str(run), "--json"]) == 0
    assert printed(capsys)["reading"] is not None
    assert main(["evaluate", str(run), "--inference", "network"]) == 2
    assert "inference: " in capsys.readouterr().err


def test_the_memory_of_features_that_are_no_more_is_removed_and_a_worse_one_is_not_kept(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    run = RunDirectory(copy)
    best = vsm.load(copy, inference="conjugate")
    dataset = vsm.open_dataset(best.settings.data)
    save_best(run, best.model, best.state, best.step, dataset)
    assert vsm.load(copy).inference == "conjugate"

    def useless(*arguments: Any, **named: Any) -> LearnedMemory:
        found = learn_memory(*arguments, **named)
        assert isinstance(found.memory.memory, GaussianMemory)
        reading = found.memory.memory.read_settings._replace(rho=1.0, epsilon=1e9, beta=0.0)
        wrong = replace(found.memory, memory=replace(found.memory.memory, reading=reading.tensor()))
        return found._replace(memory=wrong)

    monkeypatch.setattr("vsm.training.learn_memory", useless)
    kept = learn_closing_memory(run, best, dataset)
    assert kept is best
    assert not run.read_metrics()[-1]["gaussian"]["used"]
    assert vsm.load(copy).inference == "conjugate"
    assert not run.gaussian.exists()


def test_a_memory_of_all_classes_ships_with_what_others_measured_on_part_of_them(
    run: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    words = ["--data", data, "--output", str(whole), "--split", "all", "--json"]
    assert main(["memory", "learn", *words]) == 0
    assert printed(capsys)["num_slots"] == CLASSES
    ship = ["models", "ship", str(whole), "--name", "all", "--output", str(tmp_path / "models")]
    ship += ["--way", "3", "--queries", "4", "--episodes", "50", "--measured", str(run)]
    assert main([*ship, "--data-license", "none", "--json"]) == 0
    card = printed(capsys)
    [measured] = card["measurements"]
    [part] = measured["parts"]
    protocol = EpisodeProtocol(data, "test", 3, 1, 4, 50, 0)
    expected = vsm.load(run).on(protocol).measure(protocol).evaluation.accuracy.mean
    assert measured["split"] == "test"
    assert measured["accuracy"] == part["accuracy"] == pytest.approx(expected)
    assert card["memory_slots"] == CLASSES
    assert card["commands"][0].endswith("--split all")
    assert "--measured runs/g" in card["commands"][-1]
    loaded = vsm.load(tmp_path / "models" / "all")
    assert loaded.thresholds() is not None


@pytest.mark.parametrize("words", [["--gaussian.epsilon", "inf"], ["--gaussian.epsilon=inf"]])
def test_infinity_is_written_as_our_own_commands_write_it(
    words: list[str], data: str, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    others = ["--gaussian.beta", "inf", "--gaussian.rho", "0"]
    assert main(["memory", "learn", "--data", data, "--output", str(output), *words, *others]) == 0
    learned = vsm.load(output)
    assert isinstance(learned.state, GaussianMemory)
    assert not learned.state.read_settings.uses_memory
    printed = learn_command(learned.settings)
    assert "--gaussian.epsilon inf --gaussian.beta inf" in printed
