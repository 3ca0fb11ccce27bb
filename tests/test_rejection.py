"""Saying "none of these": coverage of known classes, and out-of-distribution inputs."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from classify_helpers import (
    CLASSES,
    clustered_features,
    examples,
    write_folders,
    write_run,
)
from vsm import FewShotClassifier
from vsm.cli import main
from vsm.data import ImageDataset
from vsm.errors import ClassifierError
from vsm.evaluation.calibration import (
    LEVELS,
    Thresholds,
    conformal,
    lowest_scores,
)
from vsm.memory import Observations, SampledPosterior, SupportSet
from vsm.memory.named import trained_memory
from vsm.model import FewShotModel
from vsm.runs.directory import RunDirectory
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel, made_in_memory
from vsm.seeding import generator
from vsm.settings import ModelSettings, RunSettings


def test_a_threshold_is_the_smallest_score_that_covers_so_many() -> None:
    scores = torch.randperm(399, generator=torch.Generator().manual_seed(0)).double()
    found = conformal(scores)
    assert len(found) == LEVELS - 1
    for level, threshold in enumerate(found, start=1):
        # By counting: the share of scores and one more that are not above it.
        covered = (int((scores <= threshold).sum()), 400)
        assert covered[0] / covered[1] >= level / LEVELS
        assert (covered[0] - 1) / covered[1] < level / LEVELS
    assert conformal(torch.zeros(10))[-1] == math.inf, "ten scores cannot promise 99.5%"


def test_classes_have_the_threshold_of_their_number_of_images_and_of_classes() -> None:
    steps = {1: 100.0, 5: 0.0}
    thresholds = Thresholds(
        {
            shot: {
                way: tuple(base + level - 0.5 * way for level in range(1, LEVELS)) for way in (1, 4)
            }
            for shot, base in steps.items()
        }
    )
    assert thresholds.at(0.9, [1, 4, 5, 99]).tolist() == [278.0, 278.0, 178.0, 178.0]
    assert thresholds.at(0.9, [1, 4, 5, 99, 1]).tolist() == [278.0, 278.0, 178.0, 178.0, 278.0]
    assert thresholds.at(0.9, [1, 4, 5]).tolist() == [279.5, 279.5, 179.5]
    assert thresholds.at(0.9001, [5]).tolist() == [180.5]
    assert thresholds.at(0.999, [1, 5]).tolist() == [math.inf, math.inf], "beyond what is known"
    for wrong in (0.0, 1.0, 90.0):
        with pytest.raises(ClassifierError, match="reject: expected a coverage between 0 and 1"):
            thresholds.at(wrong, [1])


@pytest.mark.parametrize("distance", ["squared_euclidean", "cosine"])
@pytest.mark.parametrize("has_slots", [True, False])
def test_a_score_is_the_distance_to_a_class_against_all_that_is_remembered_of_others(
    distance: str, has_slots: bool, random: torch.Generator
) -> None:
    settings = RunSettings(
        data="features:x",
        method="protonet",
        model=ModelSettings(distance=distance, temperature=0.7),  # type: ignore[arg-type]
    )
    model = FewShotModel(settings, (4,)).eval()
    prototypes = torch.randn(2, 3, 5, 4, generator=random)
    queries = torch.randn(2, 6, 4, generator=random)
    slots = torch.randn(7, 4, generator=random)
    posterior = SampledPosterior(prototypes, model.classifier)
    found = posterior.rejection_scores(queries, slots if has_slots else None)

    def apart(one: torch.Tensor, two: torch.Tensor) -> float:
        if distance == "cosine":
            return 1 - torch.cosine_similarity(one.double(), two.double(), dim=0).item()
        return (one - two).square().sum().item()

    for t, b, n in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(3)):
        query = queries[t, b]
        near = np.mean([apart(query, sample) for sample in prototypes[t, n]]) / 0.7
        others = [math.exp(-apart(query, slot) / 0.7) for slot in slots]
        expected = near + (math.log(sum(others)) if has_slots else 0)
        assert found[t, b, n].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", ["statistics", "slots"])
def test_the_lowest_scores_are_those_of_groups_of_classes(kind: str) -> None:
    encoder = learned_encoder() if kind == "statistics" else encoder_with_slots()
    assert encoder.memory is not None
    features, _, _ = clustered_features(10, 9, seed=3)
    rows = encoder.embed(features).view(2, 5, 9, -1)
    support, queries = rows.split([2, 7], 2)
    memory = encoder.memory.memory
    found = lowest_scores(encoder.model, memory, support, queries, seed=0)
    support, queries = (encoder.model.project(part, memory) for part in (support, queries))
    inferred = encoder.model.infer(
        SupportSet.of(support), memory, generator(0, "rejection-noise", 2)
    )
    groups = {1: [[n] for n in range(5)], 2: [[0, 1], [2, 3]], 5: [[0, 1, 2, 3, 4]]}
    assert found.keys() == groups.keys()
    for way, listed in groups.items():
        assert found[way].shape == (2, way, 7, len(listed))
        for g, group in enumerate(listed):
            for place, n in enumerate(group):
                slots = memory.rejection_slots
                scores = inferred.rejection_scores(queries[:, n], slots)
                torch.testing.assert_close(found[way][:, place, :, g], scores[..., group].amin(-1))


def test_neither_what_people_added_nor_what_has_a_fitted_label_is_held_against_an_image() -> None:
    classifier = FewShotClassifier(encoder_with_slots())
    features, _, names = clustered_features(64, 20)
    assert classifier.memory is not None
    slots = classifier.memory.memory.rejection_slots
    assert slots is not None
    new, _, _ = clustered_features(2, 5, seed=9)
    classifier.fit(new, ["this"] * 5 + ["that"] * 5).remember()
    classifier.fit(torch.cat([features[:4], new[:1]]), [names[0]] * 4 + ["other"])
    fitted = classifier._fitted
    assert fitted is not None
    assert fitted.recalled is not None
    assert {"this", "that"} <= set(fitted.recalled.names)
    kept = fitted._other_slots()
    assert kept is not None
    torch.testing.assert_close(
        kept, slots[[name != names[0] for name in classifier.memory.names[:64]]]
    )


@cache
def learned_encoder() -> TrainedModel:
    features, class_ids, names = clustered_features(64, 20)
    encoder = FewShotClassifier().learn_memory(features, [names[c] for c in class_ids]).encoder
    assert encoder is not None
    return encoder


def encoder_with_slots() -> TrainedModel:
    """Return a model of conjugate inference over the same features, with a slot per class."""
    features, class_ids, names = clustered_features(64, 20)
    settings = RunSettings(data="features:x", model=ModelSettings(inference="conjugate"))
    model = FewShotModel(settings, (features.shape[1],)).eval()
    with torch.no_grad():
        memory = model.consolidate(model.empty_memory(), Observations(features, class_ids), 0)
    assert memory is not None
    encoder = model.encoder.identity
    return made_in_memory(model, trained_memory(settings, encoder, memory, tuple(names), 0))


def learned() -> FewShotClassifier:
    return FewShotClassifier(learned_encoder())


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_as_many_of_new_classes_are_answered_as_was_asked(coverage: float) -> None:
    classifier = learned()
    answered = []
    for seed in range(40):
        features, class_ids, _ = clustered_features(5, 30, seed=200 + seed)
        shot = 1 + 4 * (seed % 2)  # one or five examples
        way = 2 if seed % 4 < 2 else 5
        fitted = np.arange(150) % 30 < shot
        known = (class_ids < way).numpy()
        classifier.fit(features[fitted & known], class_ids[fitted & known])
        answers = classifier.predict(features[~fitted & known], reject=coverage)
        answered.append(np.mean(answers != -1))
    assert abs(np.mean(answered) - coverage) < 0.08  # about three standard errors over 40 tasks


def many_features(classes: int, each: int, seed: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Rows of more features than there are classes, which differ most where members do least."""
    random = torch.Generator().manual_seed(seed)
    width = 300
    between, within = (torch.linspace(a, b, width) for a, b in ((0.5, 0.02), (0.5, 2.0)))
    means = between * torch.randn(classes, width, generator=random)
    noise = within * torch.randn(classes * each, width, generator=random)
    return means.repeat_interleave(each, 0) + noise, np.arange(classes).repeat(each)


def test_thresholds_of_some_classes_hold_for_a_memory_of_all() -> None:
    """Folds of the classes are measured with the others, and the memory in the end holds all."""
    classifier = FewShotClassifier().learn_memory(*many_features(30, 20, seed=0))
    assert classifier.memory is not None
    assert classifier.memory.memory.read_settings.uses_memory  # type: ignore[attr-defined]  # Gaussian
    answered, rejected = [], []
    for seed in range(1, 11):
        features, class_ids = many_features(10, 20, seed)
        known, fitted = class_ids < 5, np.arange(200) % 20 < 2
        classifier.fit(features[known & fitted], class_ids[known & fitted])
        answers = classifier.predict(features, reject=0.9)
        answered.append(np.mean(answers[known & ~fitted] != -1))
        rejected.append(np.mean(answers[~known] == -1))
    assert 0.87 < np.mean(answered) < 0.98
    assert np.mean(rejected) > 0.1


def test_answers_that_are_given_stay_the_same_and_are_saved(tmp_path: Path) -> None:
    classifier = learned()
    features, class_ids, names = clustered_features(5, 30, seed=300)
    labels = [names[c] for c in class_ids]
    classifier.fit(features[::10], labels[::10])
    plain, careful = classifier.predict(features), classifier.predict(features, reject=0.6)
    assert set(careful) <= {*names, "none of these"}
    assert (careful == "none of these").any()
    given = careful != "none of these"
    assert (careful[given] == plain[given]).all()
    classifier.save(tmp_path / "shapes.vsm")
    loaded = FewShotClassifier.load(tmp_path / "shapes.vsm")
    assert (loaded.predict(features, reject=0.6) == careful).all()


def test_a_label_that_means_none_and_a_model_without_thresholds_are_refused() -> None:
    features, class_ids, _ = clustered_features(5, 4)
    names = np.asarray(["none of these", "a", "b", "c", "d"])[class_ids]
    classifier = learned().fit(features, names)
    with pytest.raises(ClassifierError, match="reject: 'none of these' means that an image is"):
        classifier.predict(features, reject=0.9)
    with pytest.raises(ClassifierError, match="no rejection thresholds were measured"):
        FewShotClassifier().fit(features, class_ids).predict(features, reject=0.9)


def test_explanations_and_answers_agree_on_what_is_none_of_the_classes() -> None:
    classifier = learned()
    features, class_ids, names = clustered_features(5, 30, seed=300)
    labels = np.asarray(names)[class_ids]
    asked = classifier.fit(features[::10], labels[::10]).embed(features)
    answers = classifier.predict(features, reject=0.6)
    assert 0 < np.mean(answers == "none of these") < 1
    plain, careful = classifier.explain_all(asked), classifier.explain_all(asked, reject=0.6)
    assert [one.prediction for one in careful] == answers.tolist()
    assert (classifier.predict(asked, reject=0.6) == answers).all()
    # Only the answer changes.
    for one, other in zip(plain, careful, strict=True):
        assert replace(other, prediction=one.prediction) == one


def calibrate_run(run: Path, dataset: ImageDataset) -> Path:
    """Measure the thresholds of a run directory on ``dataset``, as training does at its end."""
    trained = load(run)
    path = RunDirectory(run).calibration
    trained.calibrate_rejection(dataset).write(path, trained.encoder.fingerprint)
    return run


def test_thresholds_hold_while_all_trained_classes_are_remembered(
    tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    run = calibrate_run(write_run(tmp_path / "run"), tiny_dataset)
    support, labels = examples(tiny_dataset, dict.fromkeys(CLASSES, 2))
    asked, _ = examples(tiny_dataset, dict.fromkeys(CLASSES, 3), first=5)

    def answers() -> list[str]:
        classifier = FewShotClassifier.from_pretrained(run).fit(support, labels)
        return list(classifier.predict(asked, reject=0.7).tolist())

    before = answers()
    assert 0 < before.count("none of these") < len(before)
    folder = write_folders(tmp_path / "more", tiny_dataset, 1, first=9)
    for path in folder.iterdir():
        path.rename(path.with_name(f"new-{path.name}"))
    assert main(["memory", "add", str(run), "--images", str(folder)]) == 0
    known = load(run)
    assert known.memory is not None
    assert len(known.memory.added) == len(CLASSES)
    assert known.thresholds() == known.calibration.thresholds
    answers()

    def refused() -> str:
        with pytest.raises(ClassifierError, match="with other remembered classes") as told:
            answers()
        return str(told.value)

    assert main(["memory", "forget", str(run), *sorted(known.memory.added)]) == 0
    assert answers() == before, "as if nothing had been added"
    assert main(["memory", "forget", str(run), known.memory.names[0]]) == 0
    assert f"measure them with vsm models calibrate {run}" in refused()
    assert FewShotClassifier.from_pretrained(run).fit(support, labels).predict(asked).size
    calibrate_run(run, tiny_dataset)
    answers()


def test_what_people_added_has_no_say_in_the_thresholds(
    tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    trained = load(write_run(tmp_path / "run"))
    classifier = FewShotClassifier(trained)
    classifier.fit(*examples(tiny_dataset, dict.fromkeys(CLASSES, 2))).remember()
    assert classifier.memory is not None
    grown = trained.with_memory(classifier.memory, "grown")
    assert grown.calibrate_rejection(tiny_dataset) == trained.calibrate_rejection(tiny_dataset)


def test_a_memory_that_grew_keeps_the_thresholds_and_another_does_not() -> None:
    classifier = learned()
    encoder, memory = classifier.encoder, classifier.memory
    assert encoder is not None
    assert memory is not None
    features, class_ids, _ = clustered_features(2, 5, seed=9)
    classifier.fit(features, class_ids).remember()
    assert classifier.memory is not None
    grown = encoder.with_memory(classifier.memory, "grown")
    assert grown.thresholds() == encoder.thresholds()
    fewer = encoder.with_memory(memory.forget(memory.names[:1]), "fewer")
    with pytest.raises(ClassifierError, match="measured with other remembered classes") as told:
        fewer.thresholds()
    assert "vsm models calibrate" not in str(told.value), "there is no directory to calibrate"


def test_a_run_measures_its_thresholds_on_validation_classes(
    tmp_path: Path, tiny_dataset: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    run = calibrate_run(write_run(tmp_path / "run", "protonet"), tiny_dataset)
    classifier = FewShotClassifier.from_pretrained(run)
    classifier.fit(*examples(tiny_dataset, dict.fromkeys(CLASSES, 1)))
    asked, _ = examples(tiny_dataset, dict.fromkeys(CLASSES, 7), first=5)
    outside = [np.zeros((28, 28), np.uint8), np.full((28, 28), 255, np.uint8)]
    answered = classifier.predict(asked, reject=0.9) != "none of these"
    assert 0.75 < answered.mean() <= 1
    assert (classifier.predict(outside, reject=0.9) == "none of these").all()
    assert classifier.encoder is not None
    known = classifier.encoder.thresholds().by_shot
    assert list(known) == [1, 2, 5, 10]
    assert all(list(ways) == [1, 2, 5] for ways in known.values())  # of eight validation classes

    support = write_folders(tmp_path / "support", tiny_dataset, 1)
    query = write_folders(tmp_path / "query", tiny_dataset, 7, first=5)
    command = ["classify", "--support", str(support), "--query", str(query), "--model", str(run)]
    assert main([*command, "--reject", "0.9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["answers"]
    assert [one["prediction"] for one in told] == classifier.predict(asked, reject=0.9).tolist()
    assert main([*command, "--reject", "0.5", "--explain"]) == 0
    assert "none of these" in capsys.readouterr().out
