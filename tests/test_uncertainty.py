"""The study of uncertainty: coverage, OOD detection and calibration."""

import json
import re
from pathlib import Path

import pytest
import torch

from vsm.cli import main
from vsm.memory import SupportSet
from vsm.runs.loading import load
from vsm.seeding import task_generators
from vsm_lab.study.uncertainty import COVERAGES, certainty


def test_a_model_is_measured_and_a_page_is_written(tmp_path: Path) -> None:
    study = tmp_path / "small.yaml"
    study.write_text("{kind: uncertainty, title: How sure, models: [glyphs-5w1s], episodes: 4}")
    assert main(["study", str(study), "--json", "--output", str(tmp_path / "store")]) == 0
    results = json.loads((tmp_path / "small" / "results.json").read_text(encoding="utf-8"))
    [found] = results["models"]
    validation, test = found["validation"]["shots"], found["test"]["shots"]
    assert list(validation) == list(test) == ["1", "2", "5", "10"]
    for of_shot in test.values():
        parts = of_shot["aleatoric"]["mean"] + of_shot["epistemic"]["mean"]
        assert of_shot["total"]["mean"] == pytest.approx(parts, abs=1e-5)
        answered = [of_shot[f"answered at {c}"]["mean"] for c in COVERAGES]
        assert answered == sorted(answered)
        assert of_shot["auroc"]["mean"] > 0.7
    assert found["test"]["paired"]["1 to 2"]["epistemic"]["mean"] == pytest.approx(
        test["2"]["epistemic"]["mean"] - test["1"]["epistemic"]["mean"]
    )
    page = (tmp_path / "small.md").read_text(encoding="utf-8")
    assert page.startswith("# How sure\n")
    assert re.search(r"\| 10 \| \d+\.\d ± \d+\.\d \|", page)


def test_queries_of_the_classes_and_ood_queries_are_told_apart_by_their_place() -> None:
    trained, queries_per_class = load("glyphs-5w1s"), 10
    random = torch.Generator().manual_seed(0)
    centers = 5 * torch.randn(1, 10, 1, trained.model.num_features, generator=random)
    support = centers[:, :5].expand(-1, -1, 2, -1)
    queries = centers.expand(-1, -1, queries_per_class, -1)
    noise = task_generators(0, "test", 0, range(1))
    told = certainty(trained, support, queries, noise)
    assert told["auroc"].item() == 1
    assert told["correct"].all()
    assert told["correct"].shape == (1, 50)
    model, memory = trained.model, trained.state
    support, queries = (model.project(part, memory) for part in (support, queries))
    inferred = model.infer(SupportSet.of(support), memory, torch.Generator())
    scores = inferred.rejection_scores(queries.flatten(1, 2), None).amin(-1)
    limit = trained.thresholds().at(0.9, [2] * 5)[0]
    assert told["rejected at 0.9"].item() == pytest.approx((scores[0, 50:] > limit).float().mean())
