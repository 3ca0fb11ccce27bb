"""Query sets of evaluation: which images they hold, of which classes, and what is measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import vsm
from vsm.baselines import BaseFeaturesSource, Baseline
from vsm.classify.classifier import Embedded
from vsm.cli import main
from vsm.data import EpisodeSampler, ImageDataset, PixelNormalization
from vsm.data.episodes import EvaluationBatch, Proportions
from vsm.errors import EpisodeError
from vsm.evaluation.evaluator import ELEMENTS_AT_ONCE, EpisodeProtocol, evaluate_classifier
from vsm.runs.trained_model import ModelOnData, TrainedModel
from vsm.seeding import Randomness
from vsm.settings import BaselineSettings

MODEL = "glyphs-5w1s"
KINDS: list[tuple[Proportions, float]] = [
    ("balanced", 0.0),
    ("balanced", 0.3),
    (2.0, 0.0),
    (0.5, 0.5),
    ((1.0, 0.0, 2.0), 0.1),
]


def dataset_of(sizes: Sequence[int], test: Sequence[int]) -> ImageDataset:
    """Classes of so many images of one pixel, of which ``test`` are the test split."""
    images = np.zeros((sum(sizes), 1, 1, 1), np.uint8)
    others = np.setdiff1d(np.arange(len(sizes)), test)
    return ImageDataset(
        name="counted",
        images=images,
        class_names=tuple(f"class{number}" for number in range(len(sizes))),
        class_starts=np.cumsum([0, *sizes]),
        splits={"train": others, "test": np.asarray(test)},
        normalization=PixelNormalization((0.0,), (1.0,)),
    )


@pytest.fixture(scope="module")
def uneven() -> ImageDataset:
    """Test classes of different sizes, which are not in order and do not lie together."""
    return dataset_of([30, 17, 12, 14, 40, 17, 25, 13, 11, 16], test=[7, 1, 9, 4, 2, 6])


@pytest.fixture(scope="module")
def large() -> ImageDataset:
    """Classes of so many images that drawing some leaves about as many."""
    return dataset_of([2000] * 7, test=range(6))


@pytest.fixture(scope="module")
def trained(data_folder: Path) -> TrainedModel:
    """A shipped model, which embeds each image once for all tests."""
    return vsm.load(MODEL)


def listed(sampler: EpisodeSampler, count: int = 60, seed: int = 0) -> EvaluationBatch:
    """All episodes of a list in one batch."""
    parts = list(sampler.evaluation_batches(count, seed))
    return EvaluationBatch(*(torch.cat(ids) for ids in zip(*parts, strict=True)))


def counts_of(labels: Tensor, way: int) -> npt.NDArray[np.int64]:
    """How many queries of each class every task has ``[T, N]``, by counting."""
    return np.stack([(labels == n).sum(1).numpy() for n in range(way)], 1)


def class_of(dataset: ImageDataset, image_id: int) -> int:
    """Find the class of an image by looking at all of them."""
    [found] = [c for c in range(len(dataset.class_names)) if image_id in dataset.image_ids(c)]
    return found


def test_balanced_sets_are_the_one_list_of_episodes_class_after_class(uneven: ImageDataset) -> None:
    sampler = EpisodeSampler(uneven, "test", 3, 2, 4)
    sets = list(sampler.evaluation_batches(120, seed=3))
    episodes = list(sampler.evaluation_episodes(120, seed=3))
    assert [len(one.class_ids) for one in sets] == [len(one.class_ids) for one in episodes]
    for one, episode in zip(sets, episodes, strict=True):
        assert torch.equal(one.class_ids, episode.class_ids)
        assert torch.equal(one.support_ids, episode.image_ids[..., :2])
        assert torch.equal(one.query_ids, episode.image_ids[..., 2:].flatten(1))
        assert one.labels.tolist() == [[0] * 4 + [1] * 4 + [2] * 4] * len(one.labels)


@pytest.mark.parametrize(("proportions", "outliers"), KINDS)
def test_classes_and_support_do_not_depend_on_the_queries(
    uneven: ImageDataset, proportions: Proportions, outliers: float
) -> None:
    plain = listed(EpisodeSampler(uneven, "test", 3, 2, 4), 70)
    found = listed(EpisodeSampler(uneven, "test", 3, 2, 4, proportions, outliers), 70)
    assert torch.equal(found.class_ids, plain.class_ids)
    assert torch.equal(found.support_ids, plain.support_ids)
    assert torch.equal(found.labels, plain.labels) == (proportions == "balanced")


@pytest.mark.parametrize(("proportions", "outliers"), KINDS)
@pytest.mark.parametrize("shot", [1, 3])
def test_queries_are_new_images_of_their_class_and_outliers_of_none(
    uneven: ImageDataset, proportions: Proportions, outliers: float, shot: int
) -> None:
    sampler = EpisodeSampler(uneven, "test", 3, shot, 4, proportions, outliers)
    batch, own = listed(sampler), 12
    others = round(own * outliers / (1 - outliers))
    assert batch.support_ids.shape == (60, 3, shot)
    assert batch.query_ids.shape == (60, own + others)
    assert batch.labels.shape == (60, own)
    for classes, support, queries, labels in zip(*(part.tolist() for part in batch), strict=True):
        for n, of_class in enumerate(support):
            assert {class_of(uneven, one) for one in of_class} == {classes[n]}
        taken = [one for of_class in support for one in of_class]
        assert len(set(taken + queries)) == len(taken) + len(queries), "an image is met once"
        for query, label in zip(queries[:own], labels, strict=True):
            assert class_of(uneven, query) == classes[label]
        rest = {class_of(uneven, one) for one in queries[own:]}
        assert rest <= set(uneven.splits["test"].tolist()) - set(classes)


@pytest.mark.parametrize(
    ("outliers", "number"), [(0.01, 0), (0.2, 3), (0.3, 5), (0.5, 12), (0.6, 18), (0.75, 36)]
)
def test_outliers_are_the_share_that_was_asked_for(
    large: ImageDataset, outliers: float, number: int
) -> None:
    batch = listed(EpisodeSampler(large, "test", 3, 1, 4, 2.0, outliers), 5)
    assert batch.query_ids.shape == (5, 12 + number)


def test_every_image_of_a_class_is_as_likely_a_query_and_every_other_as_likely_an_outlier(
    uneven: ImageDataset,
) -> None:
    batch = listed(EpisodeSampler(uneven, "test", 3, 1, 4, 2.0, 0.3), 1500)
    ids, counts = uneven.split_ids("test"), counts_of(batch.labels, 3)
    owner = np.repeat(uneven.splits["test"], uneven.class_sizes[uneven.splits["test"]])
    drawn, chances = np.zeros((2, len(ids))), np.zeros((2, len(ids)))
    variances = np.zeros((2, len(ids)))
    tasks = zip(*(part.numpy() for part in batch[:3]), counts, strict=True)
    for classes, support, queries, count in tasks:
        p = np.zeros((2, len(ids)))
        for n, class_id in enumerate(classes):
            free = (owner == class_id) & ~np.isin(ids, support)
            p[0, free] = count[n] / free.sum()
        outside = ~np.isin(owner, classes)
        p[1, outside] = 5 / outside.sum()
        drawn += np.stack([np.isin(ids, queries[:12]), np.isin(ids, queries[12:])])
        chances, variances = chances + p, variances + p * (1 - p)
    normal = (drawn - chances) / np.sqrt(variances)
    assert np.abs(normal).max() < 4.5  # of 246 numbers
    assert normal.std() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 20.0])
def test_numbers_of_queries_are_drawn_from_the_dirichlet_multinomial(
    large: ImageDataset, alpha: float
) -> None:
    way, total = 5, 75
    counts = counts_of(listed(EpisodeSampler(large, "test", way, 1, 15, alpha), 1000).labels, way)
    assert (counts.sum(1) == total).all()
    apart = counts - total / way
    spread, width = way * alpha, np.sqrt(len(counts))
    variance = total / way * (1 - 1 / way) * (total + spread) / (1 + spread)

    def agrees(found: npt.NDArray[Any], expected: float) -> None:
        assert abs(found.mean() - expected) < 4 * found.std() / width

    for n in range(way):
        agrees(apart[:, n], 0.0)
    agrees(np.square(apart).mean(1), variance)
    agrees(apart[:, 0] * apart[:, 1], -variance / (way - 1))
    # The largest number, the smallest, and so on, are those of numpy's own draws.
    random = np.random.default_rng(0)
    simulated = random.multinomial(total, random.dirichlet(np.full(way, alpha), 20_000))
    for place in range(way):
        agrees(np.sort(counts, 1)[:, place].astype(float), np.sort(simulated, 1)[:, place].mean())


def test_large_classes_have_no_more_queries_than_small_ones() -> None:
    dataset = dataset_of([400, 4000, 1500, 30], test=[2, 0, 1])
    batch = listed(EpisodeSampler(dataset, "test", 3, 1, 4, 2.0), 1000)
    counts = counts_of(batch.labels, 3)
    for class_id in range(3):
        found = counts[(batch.class_ids == class_id).numpy()]
        assert len(found) == 1000
        assert abs(found.mean() - 4) < 4 * found.std() / np.sqrt(1000)


def test_weights_are_those_of_the_classes_in_their_order(large: ImageDataset) -> None:
    def counts(*weights: float) -> npt.NDArray[np.int64]:
        sampler = EpisodeSampler(large, "test", len(weights), 1, 10, weights)
        return counts_of(listed(sampler, 200).labels, len(weights))

    assert (counts(1.0, 0.0, 0.0, 0.0, 0.0) == [50, 0, 0, 0, 0]).all()
    assert (counts(0.0, 0.0, 7.0) == [0, 0, 30]).all()
    for weights, shares in (((3.0, 1.0, 0.0), (0.75, 0.25, 0.0)), ((0.1, 0.1), (0.5, 0.5))):
        found = counts(*weights) / (10 * len(weights))
        error = 4 * np.sqrt(0.25 / found[:, 0].size / (10 * len(weights)))
        np.testing.assert_allclose(found.mean(0), shares, atol=error)
        assert found[:, 0].std() > 0
        assert (found[:, 2:] == 0).all()


@pytest.mark.parametrize(("proportions", "outliers"), KINDS)
def test_a_longer_list_begins_with_a_shorter_one(
    uneven: ImageDataset, proportions: Proportions, outliers: float
) -> None:
    sampler = EpisodeSampler(uneven, "test", 3, 1, 4, proportions, outliers)
    lists = [listed(sampler, count) for count in (1, 50, 70, 120)]
    for shorter, longer in pairwise(lists):
        for few, many in zip(shorter, longer, strict=True):
            assert torch.equal(many[: len(few)], few)
    other = listed(sampler, 50, seed=1)
    assert not torch.equal(other.query_ids, lists[1].query_ids)
    torch.manual_seed(7)  # the global generators have no say
    np.random.seed(7)  # noqa: NPY002
    assert torch.equal(listed(sampler, 120).query_ids, lists[-1].query_ids)


def test_tasks_of_a_list_are_different(uneven: ImageDataset) -> None:
    batch = listed(EpisodeSampler(uneven, "test", 3, 1, 4, 2.0, 0.3), 200)
    assert len(batch.query_ids.unique(dim=0)) == 200
    assert len(np.unique(counts_of(batch.labels[:50], 3) - counts_of(batch.labels[50:100], 3))) > 3


def test_a_set_with_other_proportions_is_another_draw(large: ImageDataset) -> None:
    found = [
        listed(EpisodeSampler(large, "test", 3, 1, 4, kind, outliers), 20).query_ids[:, :12]
        for kind, outliers in ((2.0, 0.0), (2.0, 0.3), (3.0, 0.0))
    ]
    assert all(not torch.equal(one, other) for one, other in pairwise(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proportions": 0.0}, r"proportions: expected balanced, or a number α above 0.*got 0\.0"),
        ({"proportions": float("nan")}, r"proportions: expected balanced, or a number.*got nan"),
        ({"proportions": -1.0}, r"proportions: expected balanced, or a number α.*got -1\.0"),
        ({"proportions": float("inf")}, r"proportions: expected balanced, or a number.*got inf"),
        ({"proportions": (1.0, 1.0)}, r"proportions: expected 3 weights of classes, got \(1\.0"),
        ({"proportions": (1.0,) * 4}, r"proportions: expected 3 weights of classes, got \(1\.0"),
        ({"proportions": (0.0,) * 3}, r"proportions: expected 3 weights of classes, got \(0\.0"),
        ({"proportions": (2.0, -1.0, 1.0)}, r"proportions: expected 3 weights of classes"),
        ({"proportions": (1.0, float("nan"), 1.0)}, r"proportions: expected 3 weights of classes"),
        ({"proportions": (1.0, float("inf"), 1.0)}, r"proportions: expected 3 weights of classes"),
        ({"outliers": 1.0}, r"outliers: expected a share from 0 to below 1, got 1\.0"),
        ({"outliers": -0.1}, r"outliers: expected a share from 0 to below 1, got -0\.1"),
        ({"outliers": float("nan")}, r"outliers: expected a share from 0 to below 1, got nan"),
        (
            {"outliers": 0.3, "way": 8},
            r"outliers: 0\.3 of the queries asked for, but all 8 classes of the test split of tiny "
            "are in every task; lower way",
        ),
        (
            {"proportions": 2.0, "queries": 6},
            r"proportions: 6 queries per class can be dealt unequally where each class has 13 "
            r"samples, but one of the test split of tiny has 12; lower queries",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line_when_the_sampler_is_built(
    tiny_dataset: ImageDataset, change: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = {"way": 3, "shot": 1, "queries": 5}
    with pytest.raises(EpisodeError, match=message) as error:
        EpisodeSampler(tiny_dataset, "test", **(usual | change))
    assert "\n" not in str(error.value)


def test_a_class_without_enough_images_is_named_when_its_queries_are_drawn(
    tiny_dataset: ImageDataset,
) -> None:
    exact = EpisodeSampler(tiny_dataset, "test", 2, 2, 5, (1.0, 0.0))
    assert (listed(exact, 5).labels == 0).all(), "all ten images that are left"
    alone = EpisodeSampler(tiny_dataset, "test", 3, 1, 5, (0.0, 0.0, 1.0))
    asked = r"queries: 15 images asked for by the proportions \(0.*\), but .* fewer; lower queries"
    with pytest.raises(EpisodeError, match=asked):
        listed(alone, 5)
    crowded = EpisodeSampler(tiny_dataset, "test", 7, 1, 5, outliers=0.3)
    with pytest.raises(EpisodeError, match="outliers: 15 images of other classes asked for, but"):
        listed(crowded, 5)


def test_balanced_sets_with_outliers_have_equally_many_queries_of_each_class(
    uneven: ImageDataset,
) -> None:
    counts = counts_of(listed(EpisodeSampler(uneven, "test", 3, 1, 4, outliers=0.3)).labels, 3)
    assert (counts == 4).all()


def test_a_whole_number_asks_for_the_same_list_as_its_float(large: ImageDataset) -> None:
    kinds: list[tuple[Proportions, Proportions]] = [(2, 2.0), ((1, 0, 2), (1.0, 0.0, 2.0))]
    for whole, real in kinds:
        one, other = (EpisodeSampler(large, "test", 3, 1, 4, kind) for kind in (whole, real))
        assert torch.equal(listed(one, 5).query_ids, listed(other, 5).query_ids)


@pytest.mark.parametrize("given", [(), [1.0, 0.0, 2.0], "uneven", None])
def test_proportions_that_are_none_of_the_three_kinds_are_refused(
    tiny_dataset: ImageDataset, given: Any
) -> None:
    with pytest.raises(EpisodeError, match="proportions: expected"):
        EpisodeSampler(tiny_dataset, "test", 3, 1, 5, given)


def answers_of(ids: Tensor, way: int) -> Tensor:
    """Some answer for every image: log-probabilities ``[..., N]`` by its position."""
    return torch.sin(1.0 + ids.unsqueeze(-1) * torch.arange(1, way + 1)).log_softmax(-1)


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize(("proportions", "outliers"), [(0.5, 0.0), (2.0, 0.3), ("balanced", 0.5)])
def test_outliers_are_shown_and_never_counted(
    uneven: ImageDataset, proportions: Proportions, outliers: float, at_once: int
) -> None:
    sampler = EpisodeSampler(uneven, "test", 3, 1, 4, proportions, outliers)
    others = round(12 * outliers / (1 - outliers))

    def classify(support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        assert len(support) <= at_once
        assert support.shape[1:] == (3, 1, 1)
        assert queries.shape[1:] == (12 + others, 1)
        answers = answers_of(queries.squeeze(-1), 3)
        answers[:, 12:] = torch.nan  # whatever is said of outliers
        return answers

    measured = evaluate_classifier(
        classify,
        lambda wanted: wanted.unsqueeze(-1).double(),
        sampler,
        70,
        0,
        elements_per_task=ELEMENTS_AT_ONCE // at_once,
    )
    assert measured.log_probabilities.shape == (70, 12, 3)
    right, confusions, log_likelihoods = [], np.zeros((70, 3, 3), int), []
    batch = listed(sampler, 70)
    for task, (queries, labels) in enumerate(zip(batch.query_ids, batch.labels, strict=True)):
        for query, label in zip(queries, labels.tolist(), strict=False):
            answer = answers_of(query.double(), 3)
            best = int(answer.argmax())
            right.append(best == label)
            confusions[task, label, best] += 1
            log_likelihoods.append(answer[label].item())
    assert len(right) == 70 * 12
    assert measured.accuracy.mean == pytest.approx(np.mean(right))
    assert measured.nll == pytest.approx(-np.mean(log_likelihoods))
    assert torch.equal(measured.labels, batch.labels)
    np.testing.assert_array_equal(measured.confusions, confusions)


SETS: dict[str, Any] = {"queries": 5, "episodes": 8, "proportions": 2.0, "outliers": 0.3}


@pytest.mark.parametrize("transductive", [False, True])
def test_what_is_measured_is_what_the_classifier_answers(
    trained: TrainedModel, transductive: bool
) -> None:
    few: dict[str, Any] = SETS | {"episodes": 6}
    measured = trained.evaluate(transductive=transductive, **few)
    dataset = trained.on(measured.protocol).dataset
    assert isinstance(dataset, ImageDataset)
    batch = listed(measured.protocol.sampler(dataset), 6)
    accuracies, chances = [], []
    for support, queries, labels in zip(*batch[1:], strict=True):
        examples, images = (dataset.images[ids.numpy()] for ids in (support[:, 0], queries))
        classifier = trained.classifier()
        asked = classifier.embed(images)
        classifier.fit(examples, [0, 1, 2, 3, 4], unlabeled=asked if transductive else None)
        of_the_task = Embedded(asked.features[: len(labels)])
        accuracies.append(classifier.score(of_the_task, labels))
        chances.append(classifier.predict_proba(of_the_task))
    assert measured.accuracy.mean == pytest.approx(np.mean(accuracies))
    found = measured.evaluation.log_probabilities.exp()
    torch.testing.assert_close(found, torch.from_numpy(np.stack(chances)), rtol=1e-3, atol=1e-5)


def test_both_ways_are_compared_on_the_same_episodes(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vsm.runs.loading.load", lambda *_, **__: trained)
    asked = ["--queries", "5", "--episodes", "8", "--proportions", "2.0", "--outliers", "0.3"]
    assert main(["compare", MODEL, "--baselines", "knn", "--transductive", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    apart, together = (trained.evaluate(transductive=one, **SETS) for one in (False, True))
    knn = trained.evaluate(classifier="knn", **SETS)
    for one in (together, knn):
        assert torch.equal(one.evaluation.class_ids, apart.evaluation.class_ids)
        assert torch.equal(one.evaluation.labels, apart.evaluation.labels)
    assert not torch.equal(
        together.evaluation.log_probabilities, apart.evaluation.log_probabilities
    )
    assert told["runs"] == [
        {"run": MODEL, **json.loads(json.dumps(apart.as_dict()))},
        {"run": f"{MODEL}, transductive", **json.loads(json.dumps(together.as_dict()))},
    ]
    assert [one["transductive"] for one in told["runs"]] == [False, True]
    assert told["baselines"][0]["accuracy"] == knn.accuracy.mean
    differences = {(one["a"], one["b"]): one for one in told["differences"]}
    assert len(differences) == 3
    for (a, one), (b, other) in (
        ((f"{MODEL}, transductive", together), (MODEL, apart)),
        ((f"{MODEL}, transductive", together), ("knn", knn)),
        ((MODEL, apart), ("knn", knn)),
    ):
        by_episode = (one.evaluation.correct.float() - other.evaluation.correct.float()).mean(1)
        found = differences[a, b]
        assert found["difference"] == pytest.approx(by_episode.mean().item(), abs=1e-6)
        error = by_episode.std().item() / np.sqrt(8)
        assert found["ci95"] == pytest.approx(1.96 * error, rel=1e-3)


def test_evaluate_says_what_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["evaluate", MODEL, "--queries", "5", "--episodes", "20"]
    kinds = ["--transductive", "--proportions", "2.0", "--outliers", "0.3"]
    assert main([*asked, *kinds, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["transductive"], told["proportions"], told["outliers"]) == (True, 2.0, 0.3)
    assert 0.8 < told["accuracy"] <= 1
    protocol = EpisodeProtocol("glyphs", "test", 5, 1, 5, 20, 0, "inductive", None, True, 2.0, 0.3)
    said = protocol.describe()
    assert said.endswith(", proportions 2.0, 30% outliers among them, classified together")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--proportions", "0"], "proportions: expected balanced, or a number α above 0"),
        (["--proportions", "-1"], "proportions: expected balanced, or a number α above 0"),
        (["--proportions", ".nan"], "proportions: expected balanced, or a number α above 0"),
        (["--outliers", "1.0"], "outliers: expected a share from 0 to below 1, got 1.0"),
        (["--outliers", "-0.1"], "outliers: expected a share from 0 to below 1, got -0.1"),
        (["--outliers", "0.1", "--way", "42"], "all 42 classes of the test split of glyphs are"),
        (["--proportions", "2.0", "--queries", "10"], "each class has 21 samples, but one of the"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", MODEL, "--queries", "5", "--episodes", "4", "--json"]
    assert main([*asked, *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vsm evaluate: ")
    assert message in line


class Guesser(Baseline):
    """A baseline that is right more often the larger its ``skill``, and counts what it is shown."""

    label: ClassVar = "guesser"
    candidates: ClassVar[Sequence[Mapping[str, float]]] = [{"skill": s} for s in (0.2, 0.9, 0.5)]
    shown: ClassVar[list[tuple[float, int, int]]]

    def __init__(
        self, settings: BaselineSettings, base: BaseFeaturesSource, **chosen: float
    ) -> None:
        super().__init__(settings, base)
        self.skill = chosen["skill"]

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        self.shown.append((self.skill, len(queries), queries.shape[1]))
        means = torch.nn.functional.normalize(support.mean(2), dim=-1)
        scores = 20 * queries @ means.mT
        noise = torch.arange(scores.numel()).view_as(scores).sin() * 20 * queries.norm(dim=-1).max()
        answers: Tensor = (self.skill * scores + (1 - self.skill) * noise).log_softmax(-1)
        return answers


def test_a_baseline_of_ones_own_is_tuned_on_validation_classes_alone(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Guesser.shown, drawn = [], []
    sampler_of = EpisodeProtocol.sampler

    def sampler(protocol: EpisodeProtocol, dataset: ImageDataset) -> EpisodeSampler:
        drawn.append(protocol)
        return sampler_of(protocol, dataset)

    monkeypatch.setattr(EpisodeProtocol, "sampler", sampler)
    monkeypatch.setattr("vsm.runs.trained_model.TUNING_EPISODES", 16)
    protocol = EpisodeProtocol("glyphs", "test", 5, 1, 5, 4, 0, outliers=0.6)
    subject: ModelOnData = trained.on(protocol)
    measured = subject.measure_baseline(Guesser, protocol, BaselineSettings())
    assert measured.baseline_settings == {"skill": 0.9}
    assert measured.label == "guesser"
    assert measured.as_dict()["baseline_settings"] == {"skill": 0.9}
    assert [one.split for one in drawn] == ["validation"] * 12 + ["test"]
    assert drawn[-1] == protocol
    kinds = [(one.proportions, one.outliers) for one in drawn[:4]]
    assert kinds == [("balanced", 0.0), ("balanced", 0.3), (2.0, 0.0), (2.0, 0.3)]
    again = [(one.proportions, one.outliers) for one in drawn[4:12]]
    assert again == kinds * 2
    assert [one[0] for one in Guesser.shown] == [*[0.2] * 4, *[0.9] * 4, *[0.5] * 4, 0.9]
    assert Guesser.shown[-1][2] == 25 + 38, "the outliers of the episodes that are measured"
    # The choice is for N, K and Q, whatever the sets are like.
    balanced = EpisodeProtocol(**asdict(protocol) | {"outliers": 0.0, "episodes": 6})
    subject.measure_baseline(Guesser, balanced, BaselineSettings())
    assert len(drawn) == 14
    assert Guesser.shown[-1] == (0.9, 6, 25)


def test_a_baseline_of_ones_own_is_measured_wherever_the_model_can_be(
    trained: TrainedModel,
) -> None:
    Guesser.shown = []
    trained.evaluate(queries=15, episodes=2)
    trained.compare(baselines=[Guesser], queries=15, episodes=2)
