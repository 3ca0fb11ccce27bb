"""Suggestions of what to label: against plain loops and all subsets, and on known classes."""

import csv
import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vsm
from test_review import pile
from vsm.classify import Suggestion, labeling
from vsm.classify.classifier import Embedded
from vsm.classify.labeling import greedy_max_coverage, one_shot_scores
from vsm.classify.pages import suggestions_csv, suggestions_html
from vsm.cli import main
from vsm.errors import ClassifierError
from vsm.memory import GaussianMemory, GaussianReader

WAY = 8


@pytest.fixture(scope="module")
def learned() -> vsm.FewShotClassifier:
    """A memory in which classes differ in other directions than their members."""
    return vsm.FewShotClassifier().learn_memory(*pile(40, seed=0))


@pytest.fixture
def classifier(learned: vsm.FewShotClassifier) -> vsm.FewShotClassifier:
    """One example of half of eight classes."""
    features, labels = classes()
    return vsm.FewShotClassifier(learned.encoder).fit(features[:40:10], labels[:40:10])


def classes() -> tuple[torch.Tensor, list[str]]:
    """Features of eight classes that are not remembered, and their labels."""
    features, labels = pile(WAY, seed=3)
    return features, [f"new {label}" for label in labels]


def unlabeled() -> tuple[torch.Tensor, list[str]]:
    """All of them but the examples."""
    features, labels = classes()
    left = [n for n in range(len(labels)) if n not in range(0, 40, 10)]
    return features[left], [labels[n] for n in left]


def reader_of(classifier: vsm.FewShotClassifier, **changes: Any) -> GaussianReader:
    assert classifier.memory is not None
    memory = classifier.memory.memory
    assert isinstance(memory, GaussianMemory)
    assert memory.read_settings.uses_memory
    reading = memory.read_settings._replace(**changes).tensor()
    return replace(memory, reading=reading).reader


def rows_of(classifier: vsm.FewShotClassifier, features: torch.Tensor) -> torch.Tensor:
    return classifier._require_fitted().project(features)


def plain_score(reader: GaussianReader, query: list[float], members: list[list[float]]) -> float:
    """a·log N(h; m, a(I + v)) of a class with these members, in plain float64."""
    width, count = len(query), len(members)
    ratios, slots = reader.ratios.tolist(), reader.slots.tolist()
    prior, total = [0.0] * width, 0.0
    if count:
        mean = [sum(member[d] for member in members) / count for d in range(width)]
        length = math.sqrt(sum(value * value for value in mean))
        cosines = [sum(a * b for a, b in zip(slot, mean, strict=True)) for slot in slots]
        scales = reader.cosine_scales.tolist()
        logits = [c / length * s for c, s in zip(cosines, scales, strict=True)]
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits]
        weights = [weight / sum(weights) for weight in weights]
        for weight, slot in zip(weights, slots, strict=True):
            prior = [p + reader.rho * weight * s for p, s in zip(prior, slot, strict=True)]
    for d in range(width):
        gain = count * ratios[d] / (count * ratios[d] + 1)
        center = prior[d] + (gain * (mean[d] - prior[d]) if count else 0.0)
        wide = 1 + ratios[d] / (count * ratios[d] + 1)
        noise = reader.noise
        log_density = -0.5 * (query[d] - center) ** 2 / (noise * wide) - 0.5 * math.log(
            2 * math.pi * noise * wide
        )
        total += noise * log_density
    # The score leaves out what no class changes.
    return total + 0.5 * width * (noise * math.log(2 * math.pi * noise) - math.log(2 * math.pi))


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_score_of_an_image_beside_one_alone_is_that_of_plain_loops(
    classifier: vsm.FewShotClassifier, rho: float
) -> None:
    reader = reader_of(classifier, rho=rho)
    rows = rows_of(classifier, unlabeled()[0])[:7]
    found = one_shot_scores(reader, rows[:3], rows)
    listed = rows.double().tolist()
    for x, u in itertools.product(range(3), range(7)):
        expected = plain_score(reader, listed[u], [listed[x]])
        assert found[x, u].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def worth(scores: torch.Tensor, explained: torch.Tensor, chosen: list[int]) -> float:
    """Σ_u of the best score, counted from scratch."""
    rows = [explained.tolist(), *(scores[place].tolist() for place in chosen)]
    return sum(float(max(column)) for column in zip(*rows, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_lazy_choices_are_those_of_counting_everything_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labeling, "CANDIDATES_AT_ONCE", 7)
    monkeypatch.setattr(labeling, "STALE_AT_ONCE", 3)
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(40, 2, generator=random, dtype=torch.float64)
    scores = -torch.cdist(points, points[:30]).square()
    explained = -torch.rand(30, generator=random, dtype=torch.float64)
    found = greedy_max_coverage(scores.__getitem__, explained, 40, 12)
    chosen: list[int] = []
    for place, stands_for, gain in found:
        before = worth(scores, explained, chosen)
        gains = [worth(scores, explained, [*chosen, other]) - before for other in range(40)]
        assert place not in chosen
        assert gain == pytest.approx(max(gains), abs=1e-9)
        assert gains[place] == pytest.approx(max(gains), abs=1e-9)
        best = torch.stack([explained, *(scores[other] for other in chosen)]).amax(0)
        assert stands_for == int((scores[place] > best).sum())
        chosen.append(place)


def test_what_explains_nothing_better_stands_for_nothing_and_is_taken_in_order() -> None:
    explained = torch.tensor([0.0, 1.0])
    scores = torch.stack([explained, explained - 1, explained])
    assert greedy_max_coverage(scores.__getitem__, explained, 3, 3) == [
        (0, 0, 0.0),
        (1, 0, 0.0),
        (2, 0, 0.0),
    ]


def test_choices_come_near_the_best_of_all_subsets() -> None:
    random = torch.Generator().manual_seed(2)
    points = torch.randn(12, 2, generator=random, dtype=torch.float64)
    scores = -torch.cdist(points, points).square()
    explained = torch.full((12,), -9.0, dtype=torch.float64)
    chosen = [place for place, *_ in greedy_max_coverage(scores.__getitem__, explained, 12, 3)]
    nothing = worth(scores, explained, [])
    best = max(
        worth(scores, explained, list(some)) for some in itertools.combinations(range(12), 3)
    )
    assert worth(scores, explained, chosen) - nothing >= (1 - 1 / math.e) * (best - nothing)


def test_a_suggestion_is_the_image_that_explains_most_by_plain_loops(
    classifier: vsm.FewShotClassifier,
) -> None:
    features, _ = unlabeled()
    features = features[::4]
    reader = reader_of(classifier)
    rows = rows_of(classifier, features).double().tolist()
    examples = rows_of(classifier, classes()[0][:40:10]).double().tolist()
    by_class = [[plain_score(reader, row, [one]) for one in examples] for row in rows]
    best = [max(scores) for scores in by_class]
    chosen: list[int] = []
    for one in classifier.suggest(features, 4):
        gains = [
            sum(max(plain_score(reader, u, [x]) - b, 0) for u, b in zip(rows, best, strict=True))
            for x in rows
        ]
        order = sorted(range(len(rows)), key=lambda x: -gains[x])
        assert one.image == next(x for x in order if x not in chosen)
        assert one.gain == pytest.approx(gains[one.image], rel=1e-3, abs=1e-3)
        never = plain_score(reader, rows[one.image], [])
        known = sum(math.exp(score) for score in by_class[one.image])
        assert one.novelty == pytest.approx(math.exp(never) / (math.exp(never) + known), abs=1e-3)
        assert one.probabilities[0] == pytest.approx(
            math.exp(max(by_class[one.image])) / known, abs=1e-3
        )
        chosen.append(one.image)
        new = [plain_score(reader, u, [rows[one.image]]) for u in rows]
        best = [max(pair) for pair in zip(best, new, strict=True)]


def test_near_duplicates_are_not_both_chosen(classifier: vsm.FewShotClassifier) -> None:
    features, _ = unlabeled()
    twice = torch.cat([features, features + 1e-4 * torch.randn_like(features)])
    chosen = [one.image % len(features) for one in classifier.suggest(twice, 30)]
    assert len(set(chosen)) == 30


def test_classes_without_examples_are_met_first(classifier: vsm.FewShotClassifier) -> None:
    features, labels = unlabeled()
    found = classifier.suggest(features, 4)
    met = {labels[one.image] for one in found}
    assert len(met - set(classifier.classes_)) >= 3
    told = [(one.is_novel, labels[one.image] not in classifier.classes_) for one in found]
    assert all(is_new for is_novel, is_new in told if is_novel)
    assert any(is_novel for is_novel, _ in told)


def test_an_odd_image_is_not_chosen_before_typical_ones(
    classifier: vsm.FewShotClassifier,
) -> None:
    features, _ = unlabeled()
    odd = torch.cat([features, torch.randn(1, features.shape[1])])
    assert len(features) not in [one.image for one in classifier.suggest(odd, 4)]


def test_all_are_chosen_once_where_more_are_asked_for(classifier: vsm.FewShotClassifier) -> None:
    features, _ = unlabeled()
    found = classifier.suggest(features, 1000)
    assert sorted(one.image for one in found) == list(range(len(features)))
    gains = [one.gain for one in found]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0


def test_one_class_is_enough(learned: vsm.FewShotClassifier) -> None:
    features, _ = unlabeled()
    one = vsm.FewShotClassifier(learned.encoder).fit(features[:1], [7])
    first = one.suggest(features[1:], 2)[0]
    assert first.classes == (7,)
    assert first.probabilities == (1.0,)
    assert "7" in first.reason


def test_the_same_seed_chooses_the_same_of_a_large_pile(
    learned: vsm.FewShotClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labeling, "MOST_EXPLAINED", 20)
    features, labels = unlabeled()

    def chosen(seed: int) -> list[Suggestion]:
        few = vsm.FewShotClassifier(learned.encoder, seed=seed).fit(features[:2], labels[:2])
        return few.suggest(features[2:], 5)

    assert chosen(0) == chosen(0)
    assert any(chosen(0) != chosen(seed) for seed in range(1, 4))
    assert chosen(0)[0].images == 20


def test_suggesting_writes_nothing(classifier: vsm.FewShotClassifier) -> None:
    assert classifier.memory is not None
    before = {name: one.clone() for name, one in classifier.memory.memory.tensors().items()}
    features, _ = unlabeled()
    answers = classifier.predict_proba(features)
    classifier.suggest(features, 5)
    assert classifier.memory is not None
    for name, one in classifier.memory.memory.tensors().items():
        assert torch.equal(before[name], one)
    np.testing.assert_array_equal(classifier.predict_proba(features), answers)


def test_what_cannot_be_chosen_is_refused(classifier: vsm.FewShotClassifier) -> None:
    features, labels = unlabeled()
    with pytest.raises(ClassifierError, match="number: expected at least 1, got 0"):
        classifier.suggest(features, 0)
    with pytest.raises(ClassifierError, match="no images to choose from"):
        classifier.suggest(Embedded(features[:0]))
    means = vsm.FewShotClassifier().fit(features, labels)
    with pytest.raises(ClassifierError, match="has no Gaussian memory, which suggestions need"):
        means.suggest(features)
    with pytest.raises(ClassifierError, match="call fit first"):
        vsm.FewShotClassifier(classifier.encoder).suggest(features)


def test_reasons_say_what_an_image_may_be_and_stands_for() -> None:
    one = Suggestion(3, ("ant", "bee"), (0.48, 0.41), 0.1, 1234, 4096, 2.5)
    assert one.reason == "'ant' or 'bee' (48% / 41%); stands for 1,234 of 4,096 images"
    sure = one._replace(probabilities=(0.9, 0.05))
    assert sure.reason == "probably 'ant' (90%); stands for 1,234 of 4,096 images"
    new = one._replace(novelty=0.7)
    assert new.reason.startswith("unlike all classes so far (70%), nearest 'ant'; stands for")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of three colors, two of which have an example; names are markup and a formula."""
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    random = np.random.default_rng(0)
    for name, color in (("<i>x", (200, 30, 30)), ("=1+1", (30, 30, 200)), ("new", (30, 200, 30))):
        for n in range(5):
            noise = random.integers(-25, 25, (40, 40, 3))
            pixels = (np.asarray(color) + noise).clip(0, 255).astype(np.uint8)
            labeled = n == 0 and name != "new"
            folder = tmp_path / "support" / name if labeled else tmp_path / "pool" / "nested"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{name if n else '-' + name}{n}.png")
    (tmp_path / "pool" / "nested" / "-new0.png").rename(tmp_path / "pool" / "-new0.png")
    return tmp_path


def arguments(root: Path, *more: str) -> list[str]:
    support, pool = str(root / "support"), str(root / "pool")
    words = ["suggest", "--support", support, "--unlabelled", pool, "--model", "cifar-fs-vsm"]
    return [*words, *more]


def test_suggestions_are_told_and_labels_taken_in(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, page = folders / "out" / "next.csv", folders / "next.html"
    table.parent.mkdir()
    words = ["--number", "5", "--csv", str(table), "--output", str(page)]
    assert main(arguments(folders, *words, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unlabeled"] == 13
    assert told["classes"] == ["<i>x", "=1+1"]
    assert len(told["suggestions"]) == 5
    assert all(Path(one["image"]).is_file() for one in told["suggestions"])
    text = page.read_text(encoding="utf-8")
    assert "<i>x" not in text
    assert text.count("data:image/jpeg;base64,") == 5
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    images = [(table.parent / row["path"]).resolve() for row in rows]
    assert images == [Path(one["image"]).resolve() for one in told["suggestions"]]
    assert {row["guess"] for row in rows} <= {"<i>x", "'=1+1"}
    filled = [f"{row['path']},new" for row in rows]
    table.write_text("\n".join(["path,label", *filled]))
    again = ["--support", str(folders / "support"), str(table), "--number", "99"]
    assert main(arguments(folders, *again, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unlabeled"] == 8
    assert told["classes"] == ["<i>x", "=1+1", "new"]
    later = {Path(one["image"]).resolve() for one in told["suggestions"]}
    assert len(later) == 8
    assert not later & set(images)
    assert main(arguments(folders, *words)) == 0
    printed = capsys.readouterr().out
    assert "5 of 13 images to label next" in printed
    assert "a table to fill in" in printed


def test_a_table_starts_no_formula_and_a_page_shows_all(folders: Path) -> None:
    images = sorted((folders / "pool").glob("*.png"))
    [one] = [Suggestion(0, ("=1+1", "b"), (0.5, 0.5), 0.2, 1, 1, 0.5)]
    [_, row] = suggestions_csv([one], images, folders / "pool").splitlines()
    assert row.startswith("./-new0.png,,'=1+1,")
    assert "&#x27;=1+1&#x27; or" in suggestions_html([one], images, folders)


def test_mistakes_are_one_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folders / "empty").mkdir()
    support = str(folders / "support")
    for words, message in (
        (["--number", "0"], "number: must be at least 1, got 0"),
        (["--unlabeled", str(folders / "none")], "there is no such file or folder"),
        (["--support", str(folders / "empty")], "has no class folders"),
        (["--model", str(folders / "empty")], "is not a run directory"),
    ):
        assert main(arguments(folders, *words)) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("vsm suggest: ")
        assert message in line
    for pool, message in (
        (str(folders / "empty"), "unlabeled: there are no images in"),
        (support, "are in --support already"),
    ):
        assert main(["suggest", "--support", support, "--unlabeled", pool]) == 2
        assert message in capsys.readouterr().err
    (folders / "pool" / "bad.png").write_text("not an image")
    assert main(arguments(folders)) == 2
    assert "bad.png: unreadable or truncated image" in capsys.readouterr().err


def test_embedded_examples_are_fitted_as_images_are(folders: Path) -> None:
    images = sorted((folders / "support").glob("*/*.png"))
    labels = [image.parent.name for image in images]
    first = vsm.FewShotClassifier.from_pretrained("cifar-fs-vsm").fit(images, labels)
    second = vsm.FewShotClassifier(first.encoder).fit(first.embed(images), labels)
    asked = sorted((folders / "pool").rglob("*.png"))
    np.testing.assert_array_equal(first.predict_proba(asked), second.predict_proba(asked))
