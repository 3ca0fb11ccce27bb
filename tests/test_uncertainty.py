"""The measurement of coverage, strangers and calibration: its parts, and the page."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import uncertainty
from vsm.classify import open_pretrained
from vsm.evaluation.rejection import class_scores, slots_of
from vsm.seeding import task_generators


def test_the_page_in_the_docs_is_rendered_from_the_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["uncertainty", "--render", "--page", str(tmp_path / "page.md")]
    monkeypatch.setattr(sys, "argv", words)
    uncertainty.main()
    expected = uncertainty.PAGE.read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == expected


def test_a_model_is_measured_and_a_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, page = tmp_path / "found.json", tmp_path / "page.md"
    words = ["uncertainty", "--models", "glyphs-5w1s", "--episodes", "4"]
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(results), "--page", str(page)])
    uncertainty.main()
    [found] = json.loads(results.read_text())["models"]
    assert list(found["validation"]) == list(found["test"]) == ["1", "2", "5", "10"]
    for of_shot in found["test"].values():
        parts = of_shot["aleatoric"]["mean"] + of_shot["epistemic"]["mean"]
        assert of_shot["total"]["mean"] == pytest.approx(parts, abs=1e-5)
        answered = [of_shot[f"answered at {c}"]["mean"] for c in uncertainty.COVERAGES]
        assert answered == sorted(answered)
        assert of_shot["auroc"]["mean"] > 0.7
    assert found["test_paired"]["1 to 2"]["epistemic"]["mean"] == pytest.approx(
        found["test"]["2"]["epistemic"]["mean"] - found["test"]["1"]["epistemic"]["mean"]
    )
    assert re.search(r"\| 10 \| \d+\.\d ± \d+\.\d \|", page.read_text(encoding="utf-8"))


def test_known_queries_and_strangers_are_told_apart_by_their_place() -> None:
    opened = open_pretrained("glyphs-5w1s")
    assert opened.memory is not None
    random = torch.Generator().manual_seed(0)
    centers = 5 * torch.randn(1, 10, 1, opened.model.num_features, generator=random)
    support = centers[:, :5].expand(-1, -1, 2, -1)
    queries = centers.expand(-1, -1, uncertainty.QUERIES, -1)
    noise = task_generators(0, "test", 0, range(1))
    told = uncertainty.doubts(opened, support, queries, noise)
    assert told["auroc"].item() == 1
    assert told["correct"].all()
    assert told["correct"].shape == (1, 50)
    prototypes = centers[:, :5]
    scores = class_scores(
        opened.model, prototypes, queries.flatten(1, 2), slots_of(opened.memory.memory)
    ).amin(-1)
    limit = opened.thresholds().at(0.9, [2] * 5)[0]
    assert told["spotted at 0.9"].item() == pytest.approx((scores[0, 50:] > limit).float().mean())
