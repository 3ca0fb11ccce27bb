"""The examples run as they stand, with fewer steps."""

import ast
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from classify_helpers import write_folders
from vsm.cli import main
from vsm.data import ImageDataset

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = [
    *("--queries", "2", "--tasks", "1", "--steps", "2", "--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.every", "2", "--validation.episodes", "4"),
]


def test_the_commands_of_the_custom_backbone_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EXAMPLES / "custom_backbone.py"
    shutil.copy(source, tmp_path)
    monkeypatch.chdir(tmp_path)
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    train, evaluate = (shlex.split(line) for line in re.findall(r"^    vsm (.+)$", text, re.M))
    try:
        assert main([*train, *SMALL]) == 0
        assert main([*evaluate, "--queries", "2", "--episodes", "4"]) == 0
    finally:
        sys.modules.pop("custom_backbone", None)
    assert "5-way 1-shot" in capsys.readouterr().out


def test_a_memory_grows_over_a_stream_of_alphabets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLES / "omniglot_stream.py"))
    small = ["--data", "glyphs", "--model", "glyphs-5w1s", "--alphabets", "2", "--every", "1"]
    example["main"]([*small, "--plot", str(tmp_path / "stream.png")])
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert last == str(tmp_path / "stream.png")
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")
    found = [re.findall(r"[+-]?\d+(?:\.\d)?", line) for line in rows]
    assert [numbers[:2] for numbers in found] == [["1", "18"], ["2", "42"]]
    for numbers in found:
        with_memory, without, difference = (float(numbers[place]) for place in (2, 4, 6))
        assert difference == pytest.approx(with_memory - without, abs=0.11)
        assert difference > 5


def test_planted_label_errors_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_dataset: ImageDataset,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    images = write_folders(tmp_path / "images", tiny_dataset, 10)
    words = ["--data", f"folder:{images}#1", "--encoder", "cifar-fs-vsm"]
    assert main(["memory", "learn", *words, "--output", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    example = runpy.run_path(str(EXAMPLES / "planted_label_errors.py"))
    run, folder = str(tmp_path / "run"), f"{images}#1"
    example["main"]([run, folder, "--shares", "0.2", "--draws", "2"])
    _, title, *rows = capsys.readouterr().out.splitlines()
    assert title == "20% wrong, precision at their number (2 draws):"
    assert len(rows) == 3
    assert all(re.search(r": \d+\.\d% ± \d+\.\d%$", row) for row in rows)


def test_labels_are_asked_for_and_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_dataset: ImageDataset,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    data = f"folder:{write_folders(tmp_path / 'images', tiny_dataset, 10)}#1"
    words = ["--data", data, "--encoder", "cifar-fs-vsm", "--output", str(tmp_path / "run")]
    assert main(["memory", "learn", *words, "--json"]) == 0
    capsys.readouterr()
    example = runpy.run_path(str(EXAMPLES / "suggested_labels.py"))
    small = ["--split", "train", "--held-out", "3", "--number", "2", "--draws", "2"]
    example["main"]([str(tmp_path / "run"), data, *small])
    counted, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ images of \d classes unknown to the memory", counted)
    for title, *rows in (lines[:4], lines[4:]):
        assert re.fullmatch(r"one label of .*, 2 new ones, held-out .* \(2 draws\):", title)
        found = [re.findall(r"[+-]?\d+\.\d", row) for row in rows]
        random, suggested, least = (float(mean) for mean, _, _ in found)
        apart = [float(gain) for _, gain, _ in found]
        assert apart == pytest.approx([0, suggested - random, least - random], abs=0.11)
