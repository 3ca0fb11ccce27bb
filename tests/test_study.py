"""Results studies: from tiny trained runs to a result file and a page."""

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vsm.cli import main
from vsm.comparison import EpisodeProtocol, load_for, measure
from vsm.configuration import settings_from_files
from vsm.data import open_dataset
from vsm.evaluation import Evaluation
from vsm.settings import MemorySettings, RunSettings
from vsm.statistics import estimate
from vsm.study.page import read_results
from vsm.study.plan import Condition, read_study
from vsm.study.remembered import chosen_slots
from vsm.study.temperature import fit_temperature, tempered
from vsm.study.training_record import command, training_record

ROOT = Path(__file__).parents[1]
TINY = [
    *("--way", "5", "--queries", "2", "--tasks", "1", "--steps", "3", "--shot", "1"),
    *("--model.channels", "4", "--model.hidden-units", "8", "--model.inference", "conjugate"),
    *("--memory.strength", "2"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.episodes", "2", "--json"),
]
ROWS = {"memory": ("vsm", "none"), "without": ("vpn", "none"), "permuted": ("vsm", "permuted")}
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pictures of 12/6/7 classes, 8 each, that a small network can almost tell apart."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 6), ("test", 7)):
        for number in range(count):
            (folder / split / f"{split}{number}").mkdir(parents=True)
            pattern = rng.integers(0, 120, (16, 16))
            for image in range(8):
                pixels = (pattern + rng.integers(0, 135, (16, 16))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / f"{split}{number}" / f"{image}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for every row and seed."""
    folder = tmp_path_factory.mktemp("study-runs")
    for (label, (method, control)), seed in product(ROWS.items(), SEEDS):
        choices = ["--method", method, "--memory.control", control, "--seed", str(seed)]
        output = ["--output", str(folder / f"{label}-{seed}")]
        assert main(["train", "--data", data, *choices, *output, *TINY]) == 0
    return folder


def asked_of(data: str, runs: Path, **changes: Any) -> dict[str, Any]:
    return {
        "title": "A study",
        "data": data,
        "rows": {label: str(runs / f"{label}-{{seed}}") for label in ROWS},
        "reference": "memory",
        "without_memory": "without",
        "seeds": list(SEEDS),
        "shots": [1],
        "queries": 3,
        "episodes": 40,
        "temperature_episodes": 20,
        "baselines": ["cosine"],
        "memory_sizes": [0, 2],
        "memory_subsets": 2,
        **changes,
    }


def written(path: Path, asked: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(asked, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def measured(data: str, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study that was measured."""
    path = written(tmp_path_factory.mktemp("study") / "tiny.yaml", asked_of(data, runs))
    assert main(["study", str(path), "--json"]) == 0
    return path


@pytest.fixture(scope="module")
def results(measured: Path) -> dict[str, Any]:
    return read_results(read_study(measured))


@pytest.fixture(scope="module")
def evaluations(data: str, runs: Path) -> dict[tuple[str, int], Evaluation]:
    """What the study measured, measured again without it."""
    protocol = EpisodeProtocol(data, "test", 5, 1, 3, 40, 0)
    return {
        (label, seed): measure(load_for(runs / f"{label}-{seed}", protocol), protocol).evaluation
        for label, seed in product(ROWS, SEEDS)
    }


def test_scores_are_those_of_the_runs(
    results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    [condition] = results["conditions"]
    for (label, seed), evaluation in evaluations.items():
        one = condition["rows"][label]["seeds"][seed]
        assert one["mean"] == pytest.approx(evaluation.accuracy.mean)
        assert one["ci95"] == pytest.approx(evaluation.accuracy.ci95)
        assert one["nll"] == pytest.approx(evaluation.nll)
        error = evaluation.reliability.expected_calibration_error
        assert one["ece"] == pytest.approx(error)
    means = [evaluations["memory", seed].accuracy.mean for seed in SEEDS]
    assert condition["rows"]["memory"]["mean"] == pytest.approx(sum(means) / 2)


def t_p(measured, results):
    print((measured.parent / "tiny/page.md").read_text())
    import subprocess

    subprocess.run(f"rm -rf /tmp/sp; cp -r {measured.parent} /tmp/sp", shell=True)
