"""Reviews of labeled images: against leaving out one by one, and on planted mistakes."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vsm
from vsm.classify.labeling import Review, leave_one_out, review
from vsm.classify.pages import review_csv, review_html
from vsm.cli import main
from vsm.errors import ClassifierError
from vsm.memory import GaussianMemory, SupportSet
from vsm.runs.trained_model import TrainedModel

WIDTH, EACH = 12, 10


def pile(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Features whose classes differ in other directions than their members, and their labels."""
    random = np.random.default_rng(seed)
    between, within = np.linspace(2, 0.2, WIDTH), np.linspace(0.2, 2, WIDTH)
    means = between * random.normal(size=(count, WIDTH))
    rows = means.repeat(EACH, 0) + within * random.normal(size=(count * EACH, WIDTH))
    return torch.from_numpy(rows).float(), [f"c{n // EACH}" for n in range(len(rows))]


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    found = vsm.FewShotClassifier().learn_memory(*pile(40, seed=0)).encoder
    assert found is not None
    return found


def test_leaving_out_in_closed_form_is_leaving_out_one_by_one(trained: TrainedModel) -> None:
    memory = trained.state
    assert isinstance(memory, GaussianMemory)
    assert memory.read_settings.uses_memory
    features, _ = pile(3, seed=5)
    rows = trained.model.project(features, memory)[:23]
    class_ids = torch.tensor([0] * 10 + [1] * 12 + [2])  # one class has one image
    found = leave_one_out(memory.reader, rows, class_ids)
    for n in range(len(rows)):
        for c in range(3):
            others = rows[(class_ids == c) & (torch.arange(len(rows)) != n)]
            if len(others):
                support = SupportSet.of(others.view(1, 1, len(others), -1))
                expected = memory.reader.infer(support).scores(rows[n].view(1, 1, -1)).item()
            else:
                expected = memory.reader.marginal_scores(rows[n]).item()
            assert found[n, c].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_planted_mistakes_outliers_and_twins_come_first(trained: TrainedModel) -> None:
    features, labels = pile(8, seed=3)
    wrong = [4, 25, 47, 68]
    for n in wrong:
        labels[n] = f"c{(n // EACH + 3) % 8}"
    features[33] = features[32] + 1e-3
    features[71] = 5 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    found = review(trained, features, labels)
    assert {one.image for one in found.label_issues[:4]} == set(wrong)
    odds = [one.log_odds for one in found.label_issues]
    assert odds == sorted(odds, reverse=True)
    assert min(odds) > 0
    for one in found.label_issues[:4]:
        assert one.suggestion == f"c{one.image // EACH}"
        assert one.probability < 0.1
    assert (found.near_duplicates[0].first, found.near_duplicates[0].second) == (32, 33)
    assert found.probabilities.shape == (80, 8)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-5)
    assert len(found.outliers) == 80
    assert found.confusable[0].probability >= found.confusable[-1].probability


def test_what_cannot_be_reviewed_is_refused(trained: TrainedModel) -> None:
    features, labels = pile(1, seed=1)
    with pytest.raises(ClassifierError, match="two classes at least"):
        review(trained, features, labels)
    means = vsm.FewShotClassifier().fit(features, labels)._require_fitted().trained
    with pytest.raises(ClassifierError, match="has no Gaussian memory"):
        review(means, *pile(2, seed=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in class folders whose names are markup and a formula."""
    random = np.random.default_rng(0)
    for name, color in (("<script>x", (200, 30, 30)), ("=1+1", (30, 30, 200))):
        (tmp_path / "pile" / name).mkdir(parents=True)
        for n in range(4):
            noise = random.integers(-25, 25, (40, 40, 3))
            pixels = (np.asarray(color) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pile" / name / f"{n}.png")
    return tmp_path / "pile"


def test_the_command_writes_a_page_and_a_table_in_which_no_name_is_code(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    page, table = tmp_path / "review.html", tmp_path / "review.csv"
    words = ["--model", "cifar-fs-vsm", "--output", str(page), "--csv", str(table)]
    assert main(["review", str(folder), *words, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["images"] == 8
    assert printed["classes"] == 2
    assert printed["num_label_issues"] == len(printed["label_issues"])
    assert {"near_duplicates", "confusable"} < printed.keys()
    assert Path(printed["outliers"][0]["image"]).is_file()
    text = page.read_text(encoding="utf-8")
    assert "<script>x" not in text
    assert "&lt;script&gt;x" in text
    assert "data:image/jpeg;base64," in text
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    assert len(rows) == 8
    assert {row["label"] for row in rows} == {"<script>x", "'=1+1"}
    assert main(["review", str(folder), *words]) == 0
    assert "labels may be wrong" in capsys.readouterr().out
    assert main(["review", str(folder), *words, "--duplicate", "2"]) == 2
    assert main(["review", str(tmp_path / "none"), *words]) == 2


def test_the_page_and_the_table_show_what_was_found(folder: Path, trained: TrainedModel) -> None:
    images = sorted(folder.glob("*/*.png"))
    features, _ = pile(1, seed=2)
    labels = [image.parent.name for image in images]
    found: Review = review(trained, features[:8], labels, duplicate=0.1)
    page = review_html(found, images, folder, number=3)
    assert f"Labels that may be wrong ({len(found.label_issues)})" in page
    assert f"({len(found.near_duplicates)} pairs)" in page
    rows = list(csv.DictReader(io.StringIO(review_csv(found, images, folder))))
    assert sum(row["suggestion"] != "" for row in rows) == len(found.label_issues)
