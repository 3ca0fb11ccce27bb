"""``vsm classify``: a table for people, one object for programs, one line for mistakes."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from classify_helpers import CLASSES, write_folders, write_run
from vsm import FewShotClassifier
from vsm.cli import main
from vsm.data import ImageDataset
from vsm.data.folder import images_below, labeled_images

Folders = tuple[str, str, str]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> Folders:
    """Support, query and a run."""
    support = write_folders(tmp_path / "support", tiny_dataset, 2)
    query = write_folders(tmp_path / "query", tiny_dataset, 3, first=5)
    return str(support), str(query), str(write_run(tmp_path / "run"))


def arguments(folders: Folders, *more: str) -> list[str]:
    support, query, run = folders
    return ["classify", "--support", support, "--query", query, "--model", run, *more]


def expected_of(folders: Folders) -> tuple[list[Path], FewShotClassifier]:
    support, query, run = folders
    classifier = FewShotClassifier.from_pretrained(run).fit(*labeled_images(Path(support)))
    return images_below(Path(query)), classifier


def test_programs_get_one_object_with_the_classifiers_answers(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folders, "--json")) == 0
    [line] = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    images, classifier = expected_of(folders)
    chances = classifier.predict_proba(images)
    assert told["classes"] == classifier.classes_.tolist()
    assert [answer["image"] for answer in told["answers"]] == [str(path) for path in images]
    assert [answer["prediction"] for answer in told["answers"]] == classifier.predict(
        images
    ).tolist()
    ours = [list(answer["probabilities"].values()) for answer in told["answers"]]
    np.testing.assert_allclose(ours, chances, rtol=1e-6)
    assert set(told["answers"][0]) == {"image", "prediction", "probabilities"}


def test_reasons_are_told_when_asked_for(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folders, "--json", "--explain")) == 0
    first = json.loads(capsys.readouterr().out)["answers"][0]
    images, classifier = expected_of(folders)
    told = classifier.explain(images[0])
    assert first["uncertainty"]["epistemic"] == pytest.approx(told.uncertainty.epistemic, abs=1e-5)
    assert first["distances"] == pytest.approx(told.distances, rel=1e-4)
    label = classifier.classes_[0]
    assert [one["name"] for one in first["recalled"][label]] == [
        one.name for one in told.recalled[label]
    ]


def test_people_get_a_table_and_a_file(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folders, "--explain")) == 0
    table = capsys.readouterr().out
    assert "15 images, 5 classes" in table
    assert "epistemic" in table
    assert "what the memory recalled" in table
    assert main(arguments(folders, "--csv", str(tmp_path / "answers.csv"))) == 0
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    images, classifier = expected_of(folders)
    assert [row["answer"] for row in rows] == classifier.predict(images).tolist()
    chances = [[float(row[label]) for label in classifier.classes_] for row in rows]
    np.testing.assert_allclose(chances, classifier.predict_proba(images), atol=1e-5)


def test_files_can_be_asked_for_by_name_and_a_single_class_be_fitted(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support, query, run = folders
    files = [str(path) for path in images_below(Path(query))[:2]]
    assert (
        main(["classify", "--support", support, "--query", *files, "--model", run, "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert [answer["image"] for answer in told["answers"]] == files
    twice = ["--query", files[0], "--query", files[1]]
    assert main(["classify", "--support", support, *twice, "--model", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [answer["image"] for answer in told["answers"]] == files[:2]
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    (Path(support) / f"pattern{CLASSES[0]}").rename(lonely / "only")
    assert main(["classify", "--support", str(lonely), "--query", *files, "--model", run]) == 0
    assert "100.0%" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["photos-vsm", "cifar-fs-resnet12-vsm"])
def test_without_a_model_photographs_are_expected(
    name: str,
    folders: Folders,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    support, query, _ = folders
    if name == "cifar-fs-resnet12-vsm":  # as if the extra were not installed
        monkeypatch.setattr("vsm.cli.arguments.PHOTOS_WEIGHTS", "no_such_package")
    assert main(["classify", "--support", support, "--query", query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == name


def test_names_are_shown_as_they_are(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    support, query, _ = folders
    (Path(support) / f"pattern{CLASSES[0]}").rename(Path(support) / "[red]")
    image = sorted(Path(query).glob("**/*.png"))[0]
    image.rename(image.with_name("in[bold].png"))
    monkeypatch.setenv("COLUMNS", "150")
    assert main(arguments(folders, "--explain")) == 0
    printed = capsys.readouterr().out
    assert "│ [red] " in printed
    assert "in[bold].png" in printed


def test_mistakes_are_one_line_and_exit_with_two(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support, query, run = folders
    bad = Path(query) / "bad.png"
    bad.write_text("not an image")
    (tmp_path / "empty").mkdir()
    nothing = str(tmp_path / "empty")
    for support_, query_, model, message in (
        (support, query, run, "bad.png: unreadable or truncated image"),
        (support, "absent.png", run, "absent.png: there is no such file or folder"),
        (support, nothing, run, "there are no images in"),
        (nothing, query, run, "has no class folders"),
        (support, query, nothing, "is not a run directory"),
    ):
        code = main(["classify", "--support", support_, "--query", query_, "--model", model])
        assert code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("vsm classify: ")
        assert message in line
    (Path(query) / "worse.png").write_text("nor this")
    assert main(["classify", "--support", support, "--query", query, "--model", run]) == 2
    assert "(and 1 more: " in (line := capsys.readouterr().err)
    assert "worse.png" in line
    assert "BytesIO" not in line
    (Path(query) / "worse.png").unlink()
    bad.unlink()
    (Path(support) / f"pattern{CLASSES[0]}").rename(Path(support) / "none of these")
    assert main(arguments(folders, "--reject", "0.9")) == 2
    assert "a folder has that name" in capsys.readouterr().err
    both = ["--json", "--csv", str(tmp_path / "out.csv")]
    assert main(arguments(folders, *both)) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["classify", "memory", "suggest"])
def test_help_needs_no_torch(command: str) -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
