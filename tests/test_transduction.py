"""Transductive inference against plain loops, its own objective, and enumeration."""

import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vsm
from data_layouts import shared_data
from vsm.encoders import Encoder
from vsm.errors import ClassifierError
from vsm.evaluation import transduction_choice
from vsm.evaluation.intervals import estimate
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.evaluation.transduction_choice import (
    Outcome,
    Trial,
    choose_transduction,
    outcomes_of,
    query_sets,
)
from vsm.learning import gaussian_model
from vsm.memory import (
    GaussianMemory,
    GaussianPosterior,
    Posterior,
    ReadSettings,
    SampledPosterior,
    SupportSet,
    Transduction,
    transduce,
)
from vsm.memory import transduction as module
from vsm.memory.transduction import COVERAGE, FEW, at_shot, read_temperatures
from vsm.nn.layers import PrototypeClassifier
from vsm.settings import GaussianSettings, ModelSettings

D = 4


@dataclass(frozen=True)
class Task:
    """One task: what is inferred of it by examples, images without labels, and thresholds."""

    posterior: GaussianPosterior
    images: Tensor  # [1, U, D]
    limits: Tensor  # [N]


def a_task(shots: Sequence[int] = (2, 2, 2), count: int = 9, seed: int = 0) -> Task:
    """Return a task in double precision; ``shots`` are the examples of each class."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, D, generator=random).double()
    class_ids = torch.arange(8).repeat_interleave(5)
    rows += 2 * torch.randn(8, D, generator=random).double()[class_ids]
    memory = GaussianMemory.fit(
        rows, class_ids, torch.zeros(D), ReadSettings("un", 0.5, 0.2, 0.4, 3.0, 1.3)
    )
    reader = memory.reader
    single: dict[str, Any] = {
        name: v.double() for name, v in reader._asdict().items() if isinstance(v, Tensor)
    }
    reader = reader._replace(**single, constants={})
    means = 2 * torch.randn(len(shots), D, generator=random).double()
    of_class = torch.arange(len(shots)).repeat_interleave(torch.tensor(shots))
    noise = torch.randn(sum(shots), D, generator=random).double()
    support = SupportSet.of_classes(means[of_class] + noise, shots)
    images = 2 * torch.randn(1, count, D, generator=random).double()
    limits = torch.linspace(0.5, 1.5, len(shots)).double()
    return Task(reader.infer(support), images, limits)


Loops = tuple[list[list[float]], list[float], list[float]]
"""Prototypes, log w of classes relative to equal ones, and images of classes and background."""


def scores_by_loops(task: Task, mean: list[list[float]]) -> list[list[float]]:
    """Rejection scores of every image for every class, number by number."""
    variance = task.posterior.gaussian.variance[0].tolist()
    ratios = task.posterior.reader.ratios.tolist()
    found = []
    for image in task.images[0].tolist():
        unknown = sum(x**2 / (1 + e) for x, e in zip(image, ratios, strict=True))
        rows = zip(mean, variance, strict=True)
        known = [
            sum((x - m) ** 2 / (1 + v) for x, m, v in zip(image, *row, strict=True)) for row in rows
        ]
        found.append([0.5 * (squares - unknown) for squares in known])
    return found


def by_loops(task: Task, settings: Transduction, steps: int, background: bool = True) -> Loops:
    """Do what the module says, number by number."""
    gaussian, images = task.posterior.gaussian, task.images[0].tolist()
    start, variance = gaussian.mean[0].tolist(), gaussian.variance[0].tolist()
    way, omega, limits = len(start), settings.weight, task.limits.tolist()
    expected = settings.prior * len(images) / way + FEW
    mean, weights, counts = start, [1.0] * (way + 1), [0.0] * (way + 1)
    near = [
        not background or any(score <= limit for score, limit in zip(row, limits, strict=True))
        for row in scores_by_loops(task, start)
    ]
    for _ in range(steps):
        likely = []
        for row, is_near in zip(scores_by_loops(task, mean), near, strict=True):
            odds = [
                weights[n] * math.exp((limits[n] if background else 0) - row[n]) * is_near
                for n in range(way)
            ]
            odds.append(weights[way] if background else 0.0)
            likely.append([one / sum(odds) for one in odds])
        counts = [sum(row[n] for row in likely) for n in range(way + 1)]
        sums = [
            [sum(r[n] * x[d] for r, x in zip(likely, images, strict=True)) for d in range(D)]
            for n in range(way)
        ]
        mean = [
            [
                (start[n][d] / variance[n][d] + omega * sums[n][d])
                / (1 / variance[n][d] + omega * counts[n])
                for d in range(D)
            ]
            for n in range(way)
        ]
        weights = [count + expected for count in counts]
    total = sum(weights[:way])
    return mean, [math.log(way * one / total) for one in weights[:way]], counts


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("shots", [(2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize("settings", [Transduction(0.3, 1.0), Transduction(1.0, 0.2)])
def test_every_step_equals_plain_loops(
    settings: Transduction, shots: Sequence[int], background: bool
) -> None:
    task = a_task(shots)
    limits = task.limits if background else None
    for steps in (1, 2, 6):
        after, found = transduce(task.posterior, task.images, None, limits, settings, steps)
        mean, shares, counts = by_loops(task, settings, steps, background)
        assert after.log_shares is not None
        torch.testing.assert_close(after.mean[0], torch.tensor(mean, dtype=torch.float64))
        torch.testing.assert_close(after.log_shares[0], torch.tensor(shares, dtype=torch.float64))
        torch.testing.assert_close(found.counts[0], torch.tensor(counts[:-1], dtype=torch.float64))
        assert found.background.item() == pytest.approx(counts[-1], rel=1e-9, abs=1e-12)
        assert sum(counts) == pytest.approx(task.images.shape[1])


def objective(task: Task, settings: Transduction, after: Posterior, counts: Tensor) -> float:
    """The objective of the module, by loops, for prototypes and shares."""
    gaussian, way = task.posterior.gaussian, len(task.limits)
    expected = settings.prior * task.images.shape[1] / way + FEW
    shares = (counts + expected) / (counts + expected).sum()
    apart = (after.mean - gaussian.mean)[0].square() / gaussian.variance[0]
    value = -0.5 * (apart / (1 + gaussian.variance[0])).sum().item()
    limits, before = task.limits.tolist(), scores_by_loops(task, gaussian.mean[0].tolist())
    for row, first in zip(scores_by_loops(task, after.mean[0].tolist()), before, strict=True):
        is_near = any(score <= limit for score, limit in zip(first, limits, strict=True))
        parts = [shares[n].item() * math.exp(limits[n] - row[n]) for n in range(way)]
        value += settings.weight * math.log(shares[way].item() + is_near * sum(parts))
    return value + settings.weight * expected * shares.log().sum().item()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [Transduction(0.3, 1.0), Transduction(1.0, 0.1)])
def test_no_step_lowers_the_objective(settings: Transduction, seed: int) -> None:
    task = a_task((1, 3, 2), 12, seed)
    values = []
    for steps in range(1, 15):
        after, found = transduce(task.posterior, task.images, None, task.limits, settings, steps)
        counts = torch.cat([found.counts[0], found.background])
        values.append(objective(task, settings, after, counts))
    gains = [later - earlier for earlier, later in pairwise(values)]
    assert min(gains) > -1e-10
    assert values[-1] > values[0] + 1e-6


def test_prototypes_are_the_exact_posterior_where_assignments_are_clear() -> None:
    """The oracle adds up all assignments of five images to two classes, with W = I and B = e."""
    task = a_task((1, 1), 5)
    posterior = task.posterior
    ratios = posterior.reader.ratios
    members = torch.tensor([0, 0, 1, 0, 1])
    centers = torch.stack([torch.full((D,), 6.0), torch.full((D,), -6.0)]).double()
    noise = torch.randn(1, 5, D, generator=torch.Generator().manual_seed(1)).double()
    images = centers[members] + 0.5 * noise
    support = SupportSet.of(centers.view(1, 2, 1, D) + 0.3)
    inferred = posterior.reader._replace(rho=0.0).infer(support)
    total, mean = 0.0, torch.zeros(2, D).double()
    for assignment in product(range(2), repeat=5):
        likelihood, prototypes = 1.0, torch.zeros(2, D).double()
        for n in range(2):
            own = images[0][torch.tensor(assignment) == n]
            rows = torch.cat([support.features[0, n], own])
            covariance = (
                torch.eye(len(rows)).double() + torch.ones(len(rows), len(rows)).double() * 0
            )
            for d in range(D):
                joint = covariance + ratios[d]
                gaussian = torch.distributions.MultivariateNormal(
                    torch.zeros(len(rows)).double(), joint
                )
                likelihood *= gaussian.log_prob(rows[:, d]).exp().item()
                prototypes[n, d] = rows[:, d].sum() / (1 / ratios[d] + len(rows))
        total += likelihood
        mean += likelihood * prototypes
    after, _ = transduce(inferred, images, None, None, Transduction(1.0, 1.0), steps=10)
    torch.testing.assert_close(after.mean[0], mean / total, atol=1e-6, rtol=1e-6)
    assert (inferred.mean[0] - mean / total).abs().max() > 0.1


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_order_and_batching_of_images_do_not_matter(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(count=20)
    expected, assigned = transduce(task.posterior, task.images, None, task.limits, Transduction())
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", at_once)
    images = task.images[:, torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    found, also = transduce(task.posterior, images, None, task.limits, Transduction())
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(also.counts, assigned.counts)


def test_tasks_of_a_batch_do_not_influence_each_other() -> None:
    one, two = a_task(seed=1), a_task(seed=2)
    reader = one.posterior.reader
    support = torch.cat([one.posterior.support_mean, two.posterior.support_mean]).unsqueeze(2)
    images = torch.cat([one.images, two.images])
    together, _ = transduce(
        reader.infer(SupportSet.of(support)), images, None, one.limits, Transduction()
    )
    for t in range(2):
        alone = reader.infer(SupportSet.of(support[t : t + 1]))
        expected, _ = transduce(alone, images[t : t + 1], None, one.limits, Transduction())
        torch.testing.assert_close(together.mean[t], expected.mean[0])


def test_without_weight_or_images_the_answer_is_the_inductive_one() -> None:
    task = a_task()
    for images, settings in (
        (task.images, Transduction(weight=0.0)),
        (task.images[:, :0], Transduction()),
    ):
        after, found = transduce(task.posterior, images, None, task.limits, settings)
        assert after is task.posterior
        assert found.counts.sum() == 0


def test_images_of_other_classes_move_no_prototype() -> None:
    """They lie where only a class never met would put them; without a background they would."""
    task = a_task(count=6)
    far = torch.full((1, 30, D), 25.0).double()
    protected, found = transduce(task.posterior, far, None, task.limits, Transduction(1.0))
    assert found.background.item() == pytest.approx(30, abs=1e-6)
    torch.testing.assert_close(protected.mean, task.posterior.mean)
    exposed, _ = transduce(task.posterior, far, None, None, Transduction(1.0))
    assert (exposed.mean - task.posterior.mean).abs().max() > 1


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 1, D),
        torch.ones(1, 50, D),
        torch.full((1, 3, D), 1e4),
        torch.randn(1, 2, D, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["one image", "duplicates", "far away", "fewer than classes"],
)
@pytest.mark.parametrize("background", [True, False])
def test_odd_images_give_finite_answers(images: Tensor, background: bool) -> None:
    task = a_task()
    limits = task.limits if background else None
    after, _ = transduce(task.posterior, images.double(), None, limits, Transduction())
    assert after.log_probabilities(task.images).isfinite().all()


def test_many_images_of_one_other_class_move_no_prototype() -> None:
    """One alone is nearer to a class than the background is; together they would draw it along."""
    task = a_task()
    center = task.posterior.mean[:, 0]
    away = torch.randn(1, D, generator=torch.Generator().manual_seed(2)).double()
    for _ in range(60):  # just beyond the thresholds
        score = task.posterior.rejection_scores((center + away).unsqueeze(1), None)[0, 0]
        if (score > task.limits).all():
            break
        away *= 1.1
    images = (center + away).unsqueeze(1).expand(-1, 40, -1)
    after, found = transduce(task.posterior, images, None, task.limits, Transduction(1.0))
    torch.testing.assert_close(after.mean, task.posterior.mean)
    assert found.background.item() == pytest.approx(40)
    near, _ = transduce(task.posterior, images, None, score + 0.1, Transduction(1.0))
    assert (near.mean - task.posterior.mean).norm() > 0.5


def test_answers_weigh_classes_by_their_shares() -> None:
    task = a_task()
    shares = torch.tensor([[0.5, -0.2, 0.0]]).double()
    moved = task.posterior.moved(task.posterior.mean, shares)
    expected = task.posterior.scores(task.images) + shares.unsqueeze(1)
    torch.testing.assert_close(moved.scores(task.images), expected)
    log_probabilities = moved.log_probabilities(task.images).squeeze(-1)  # by linear scores
    torch.testing.assert_close(log_probabilities, expected.log_softmax(-1))


def conjugate() -> SampledPosterior:
    """A posterior by Bayes' rule in feature space, with three samples of each prototype."""
    random = torch.Generator().manual_seed(3)
    mean = torch.randn(1, 3, 1, D, generator=random).double()
    samples = mean + 0.1 * torch.randn(1, 3, 3, D, generator=random).double()
    classifier = PrototypeClassifier(ModelSettings(temperature=2.0)).double()
    evidence = torch.rand(1, 3, D, generator=random).double() + 1
    return SampledPosterior(samples, classifier, evidence=evidence)


def test_conjugate_inference_uses_unlabeled_images_by_the_same_rule() -> None:
    posterior, omega = conjugate(), 0.4
    images = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(4)).double()
    slots = torch.randn(5, D, generator=torch.Generator().manual_seed(5)).double()
    limits = torch.tensor([0.2, 0.2, 0.2]).double()
    after, found = transduce(posterior, images, slots, limits, Transduction(omega), steps=1)
    scores = posterior.rejection_scores(images, slots)[0]  # of the samples, before they moved
    near = (scores <= limits).any(-1, keepdim=True)
    odds = torch.cat([(limits - scores).exp() * near, torch.ones(6, 1).double()], -1)
    likely = odds / odds.sum(-1, keepdim=True)
    torch.testing.assert_close(found.counts[0], likely[:, :3].sum(0))
    assert posterior.evidence is not None
    sums = omega * likely[:, :3].mT @ images[0]
    counts = omega * likely[:, :3].sum(0).unsqueeze(-1)
    expected = (posterior.evidence * posterior.mean + sums) / (posterior.evidence + counts)
    torch.testing.assert_close(after.mean, expected)
    spread = after.prototypes - after.mean.unsqueeze(2)
    torch.testing.assert_close(spread, posterior.prototypes - posterior.mean.unsqueeze(2))


def test_inference_without_a_rule_of_bayes_is_refused() -> None:
    images = torch.zeros(1, 2, D).double()
    cosine = PrototypeClassifier(ModelSettings(distance="cosine")).double()
    for posterior in (replace(conjugate(), evidence=None), replace(conjugate(), classifier=cosine)):
        with pytest.raises(ClassifierError, match="transductive: needs Gaussian inference, or"):
            transduce(posterior, images, None, None, Transduction())


def test_temperatures_lie_between_those_of_known_shots() -> None:
    known = {1: 2.0, 4: 8.0}
    assert [at_shot(known, shot) for shot in (1, 2, 4, 50)] == pytest.approx([2.0, 4.0, 8.0, 8.0])
    assert at_shot(known, 0.5) == 2.0
    assert read_temperatures({"1": 2.0}) == {1: 2.0}


@pytest.mark.parametrize(
    "change",
    [
        {"weight": -1.0},
        {"weight": math.nan},
        {"prior": math.inf},
        {"weight": True},
        {"temperatures": {}},
        {"temperatures": {"1": 0.0}},
        {"temperatures": {"0": 1.0}},
    ],
)
def test_stored_settings_come_back_or_are_refused(change: dict[str, object]) -> None:
    stored = Transduction(0.3, 2.0, {1: 1.5}).as_dict()
    assert Transduction.from_dict(stored) == Transduction(0.3, 2.0, {1: 1.5})
    with pytest.raises(ValueError, match="expected"):
        Transduction.from_dict({**stored, **change})


# --- how it is chosen ----------------------------------------------------------------------------


def classes_of(apart: float, count: int = 12, size: int = 40, seed: int = 0) -> ClassFeatures:
    """Rows of classes whose means are so far apart, in units of their scatter."""
    random = torch.Generator().manual_seed(seed)
    means = apart * torch.randn(count, 1, 8, generator=random)
    rows = means + torch.randn(count, size, 8, generator=random)
    return ClassFeatures(rows.flatten(0, 1), [size] * count)


def chosen_for(known: ClassFeatures, others: ClassFeatures, limit: float) -> Transduction | None:
    model = gaussian_model(
        Encoder(ModelSettings(), (8,), "features:test"),
        "features:test",
        GaussianSettings(normalization="un"),
        0,
    )
    memory = GaussianMemory.fit(
        known.features, known.class_ids, torch.zeros(8), ReadSettings("un", 1.0, 1.0)
    )
    return choose_transduction(model, [Trial(memory, others)], {1: limit, 5: limit}, 0)


def test_images_that_help_are_used_and_noise_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transduction_choice, "EPISODES", 40)
    known, others = classes_of(1.2, 30), classes_of(1.2, seed=1)
    useful = chosen_for(known, others, 2.0)
    assert useful is not None
    assert useful.weight > 0
    assert set(useful.temperatures) == {1, 5}
    nothing = chosen_for(classes_of(0.0, 30), classes_of(0.0, seed=1), 2.0)
    assert nothing is not None
    assert nothing.weight == 0


def test_a_candidate_that_harms_one_kind_of_query_set_is_not_chosen() -> None:
    """Of two, the more likely one has lost accuracy where queries are of one class."""
    labels = torch.zeros(50, 4, dtype=torch.int64)

    def outcome(log_odds: float) -> Outcome:
        scores = torch.tensor([log_odds, 0.0]).expand(50, 4, 2) + torch.zeros(50, 1, 1)
        return Outcome(scores.log_softmax(-1), labels)

    tried = [Transduction(0.0), Transduction(0.1), Transduction(0.2)]
    usual = {1: [[outcome(0.1), outcome(1.0), outcome(2.0)]]}
    for harmless, weight in (
        ([True] * 3, 0.2),
        ([True, True, False], 0.1),
        ([True, False, False], 0.0),
    ):
        found = transduction_choice._most_likely(tried, usual, torch.tensor(harmless))
        assert found.weight == weight


def test_of_too_few_images_nothing_is_tried() -> None:
    few = ClassFeatures(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), [3, 3])
    assert chosen_for(classes_of(1.0), few, 1.0) == Transduction()


def test_query_sets_ask_for_no_more_images_than_there_are() -> None:
    uneven = ClassFeatures(torch.zeros(107, 8), [12, 20, 25, 30, 11, 9])
    for shot in (1, 5):
        for kind in query_sets(5, shot, [uneven]):
            assert kind.number * kind.outliers / (1 - kind.outliers) <= 9
            assert 1 <= kind.number <= 5 * (9 - shot)
            if isinstance(kind.proportions, tuple):
                used = sum(one > 0 for one in kind.proportions)
                assert kind.number <= used * (9 - shot)


def test_responsibilities_of_many_images_and_classes_are_never_held_at_once() -> None:
    """All together they would take 160 MB, three times over with what is derived of them."""
    script = Path(__file__).with_name("together_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "16", "40000", "1000"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    before, after, *_ = map(float, done.stdout.split())
    assert after - before < 200, done.stdout


# --- real images ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unseen_photographs() -> ClassFeatures:
    """Features of 60 images of each test class of CIFAR-FS, by the shipped Conv4-64."""
    archive = zipfile.ZipFile(shared_data("cifar_fs", "cifar100.zip"))
    names = archive.read("cifar100/splits/bertinetto/test.txt").decode().split()
    images = [
        np.asarray(Image.open(archive.open(f"cifar100/data/{name}/{place:04}.png")))
        for name in names
        for place in range(1, 61)
    ]
    features = vsm.load("cifar-fs-vsm").embed(images).cpu()
    return ClassFeatures(features, [60] * len(names))


@pytest.mark.parametrize("shot", [1, 5])
def test_real_images_without_labels_do_no_harm(
    shot: int, unseen_photographs: ClassFeatures
) -> None:
    """In no way of dealing queries to classes, outliers and tiny sets included."""
    trained = vsm.load("cifar-fs-vsm")
    limit = trained.thresholds().at(COVERAGE, [shot] * 5)[0].item()
    ways = [Transduction(weight=0.0), trained.transduction]
    trial = Trial(trained.state, unseen_photographs)
    gains = {}
    for kind in query_sets(5, shot, [unseen_photographs]):
        before, after = outcomes_of(trained.model, [trial], limit, (5, shot), kind, ways, 0, 80)
        gains[kind] = estimate(after.accuracy - before.accuracy)
    assert len(gains) == 12
    assert {kind: gain for kind, gain in gains.items() if gain.mean + gain.ci95 < 0} == {}
    usual = [gain.mean for kind, gain in gains.items() if kind.is_usual]
    assert sum(usual) / len(usual) > (0.03 if shot == 1 else 0.005)
