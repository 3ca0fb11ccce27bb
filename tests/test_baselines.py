"""Baselines on fixed features, against plain float64 loops, scikit-learn and each other."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn import functional as F

from tiny import RecordedProgress
from vsm.baselines import BASELINES, BaseFeatures, Baseline, DistributionCalibration
from vsm.baselines.logistic import LinearClassifiers, fit_logistic_regression
from vsm.cli import main
from vsm.data import EpisodeSampler, ImageDataset
from vsm.encoders import Encoder
from vsm.errors import EpisodeError, SettingsError
from vsm.evaluation.evaluator import EpisodeProtocol, evaluate_classifier
from vsm.runs import trained_model
from vsm.runs.loading import load
from vsm.seeding import task_generators
from vsm.settings import BASELINE_NAMES, BaselineName, BaselineSettings

Array = npt.NDArray[np.float64]
FEW: dict[str, Any] = {"samples": 20, "adapter_steps": 20}  # so that none takes time


def episodes(shot: int, way: int = 4, num_tasks: int = 3) -> tuple[Tensor, Tensor]:
    """Positive support ``[T, N, K, 7]`` and queries ``[T, 2·N, 7]`` around class means."""
    random = torch.Generator().manual_seed(shot)
    means = torch.rand(num_tasks, way, 1, 7, generator=random)
    noise = torch.rand(num_tasks, way, shot + 2, 7, generator=random)
    support, queries = (means + noise).double().split([shot, 2], 2)
    return support, queries.flatten(1, 2)


def base_of(sizes: Sequence[int], width: float = 1.0, num_features: int = 7) -> BaseFeatures:
    """Positive features of classes of these sizes; width 0 makes each class a point."""
    random = torch.Generator().manual_seed(9)
    rows = []
    for size in sizes:
        mean = 1 + torch.rand(1, num_features, generator=random)
        rows.append(mean + width * torch.rand(size, num_features, generator=random))
    return BaseFeatures(torch.cat(rows).double(), sizes)


def build(name: BaselineName, base: BaseFeatures | None = None, **changes: Any) -> Baseline:
    known = base or base_of([5, 9, 12])
    return BASELINES[name](BaselineSettings(**changes), lambda: known)


def noise_of(num_tasks: int) -> list[torch.Generator]:
    return task_generators(0, "test", 0, range(num_tasks))


def log_softmax(scores: Array) -> Array:
    shifted: Array = scores - scores.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


# --- the contract, for all of them ---------------------------------------------------------------


def test_the_dictionary_holds_every_name_that_the_command_line_offers() -> None:
    assert tuple(BASELINES) == BASELINE_NAMES


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_probabilities_are_normalized_and_queries_mostly_found(
    name: BaselineName, shot: int
) -> None:
    support, queries = episodes(shot, num_tasks=40)
    found = build(name, **FEW).fit_predict(support, queries, noise_of(40))
    assert found.shape == (40, 8, 4)
    assert found.dtype == queries.dtype
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(40, 8).double())
    labels = torch.arange(4).repeat_interleave(2)
    assert (found.argmax(-1) == labels).double().mean() > 0.4  # chance is a quarter


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_order_of_classes_support_and_queries_does_not_matter(
    name: BaselineName, shot: int
) -> None:
    support, queries = episodes(shot)
    points = base_of([6, 7, 8], width=0.0)  # calibration then draws nothing but its mean
    baseline = build(name, points, dispersion=0.0, tolerance=1e-9, **FEW)
    found = baseline.fit_predict(support, queries, noise_of(3)).unflatten(1, (4, 2))
    classes, images = torch.tensor([2, 0, 3, 1]), torch.arange(shot).flip(0)
    moved_queries = queries.unflatten(1, (4, 2))[:, classes].flip(2).flatten(1, 2)
    moved = baseline.fit_predict(support[:, classes][:, :, images], moved_queries, noise_of(3))
    expected = found[:, classes].flip(2)[..., classes].flatten(1, 2)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize("name", BASELINE_NAMES)
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_identical_features_give_even_odds(value: float, name: BaselineName, shot: int) -> None:
    support, queries = torch.full((2, 3, shot, 7), value), torch.full((2, 6, 7), value)
    base = BaseFeatures(torch.full((12, 7), value), [6, 6])
    baseline = build(name, base, dispersion=0.0, **FEW)
    found = baseline.fit_predict(support, queries, noise_of(2))
    torch.testing.assert_close(found, torch.full((2, 6, 3), 1 / 3).log())


@pytest.mark.parametrize("name", BASELINE_NAMES)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_tiny_and_huge_features_give_finite_results(name: BaselineName, scale: float) -> None:
    support, queries = (scale * part.float() for part in episodes(5))
    base = BaseFeatures(scale * base_of([5, 9, 12]).features.float(), [5, 9, 12])
    assert torch.isfinite(build(name, base, **FEW).fit_predict(support, queries, noise_of(3))).all()


@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_an_episode_does_not_depend_on_its_neighbors(name: BaselineName) -> None:
    support, queries = episodes(5)
    baseline = build(name, tolerance=1e-9, **FEW)
    together = baseline.fit_predict(support, queries, noise_of(3))
    for t in range(3):
        random = task_generators(0, "test", 0, range(t, t + 1))
        alone = baseline.fit_predict(support[t : t + 1], queries[t : t + 1], random)
        torch.testing.assert_close(alone[0], together[t], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["simpleshot_l2n", "simpleshot_un", "cosine", "logistic"])
def test_training_features_are_not_asked_for_without_need(name: BaselineName) -> None:
    def embed_everything() -> BaseFeatures:
        raise AssertionError("these cost minutes")

    support, queries = episodes(1)
    BASELINES[name](BaselineSettings(), embed_everything).fit_predict(support, queries, noise_of(3))


# --- nearest centroids ---------------------------------------------------------------------------


def simpleshot_loop(support: Array, query: Array, mean: Array, transformation: str) -> Array:
    """Log-probabilities ``[N]`` of one query of one episode."""

    def transform(vector: Array) -> Array:
        if transformation == "cl2n":
            vector = vector - mean
        return vector if transformation == "un" else vector / np.sqrt((vector * vector).sum())

    scores = []
    for images in support:
        centroid = sum(transform(image) for image in images) / len(images)
        scores.append(-(((transform(query) - centroid) / 1.0) ** 2).sum() / 0.5)
    return log_softmax(np.array(scores))


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize(
    ("name", "transformation"),
    [("simpleshot", "cl2n"), ("simpleshot_l2n", "l2n"), ("simpleshot_un", "un")],
)
def test_simpleshot_equals_a_plain_loop(name: BaselineName, transformation: str, shot: int) -> None:
    support, queries = episodes(shot)
    base = base_of([5, 9, 12])
    found = build(name, base, temperature=0.5).fit_predict(support, queries, noise_of(3))
    mean = base.features.numpy().mean(0)
    for t in range(3):
        for b, query in enumerate(queries[t].numpy()):
            expected = simpleshot_loop(support[t].numpy(), query, mean, transformation)
            np.testing.assert_allclose(found[t, b].numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("shot", [1, 5])
def test_cosine_centroids_equal_a_plain_loop(shot: int) -> None:
    support, queries = episodes(shot)
    found = build("cosine", temperature=0.5).fit_predict(support, queries, noise_of(3))
    for t in range(3):
        for b, query in enumerate(queries[t].numpy()):
            scores = []
            for images in support[t].numpy():
                mean = images.mean(0)
                lengths = np.sqrt((mean @ mean) * (query @ query))
                scores.append((mean @ query / lengths - 1) / 0.5)
            np.testing.assert_allclose(found[t, b].numpy(), log_softmax(np.array(scores)))


@pytest.mark.parametrize("shot", [1, 4])
def test_the_nearest_neighbor_is_that_of_scikit_learn(shot: int) -> None:
    support, queries = episodes(shot)
    found = build("knn").fit_predict(support, queries, noise_of(3))
    for task in range(len(support)):
        way, width = support.shape[1], support.shape[-1]
        oracle = KNeighborsClassifier(n_neighbors=1, metric="cosine")
        oracle.fit(support[task].reshape(-1, width), np.arange(way).repeat(shot))
        expected = oracle.predict(queries[task])
        assert found[task].argmax(-1).tolist() == expected.tolist()


# --- logistic regression -------------------------------------------------------------------------


def problem(shot: int, num_features: int) -> tuple[Tensor, Tensor]:
    """Samples ``[6, 4·K, D]`` and labels ``[4·K]``, class after class."""
    random = torch.Generator().manual_seed(shot)
    labels = torch.arange(4).repeat_interleave(shot)
    means = torch.randn(6, 4, num_features, generator=random)
    noise = torch.randn(6, 4 * shot, num_features, generator=random)
    return (3 + means[:, labels] + noise).double(), labels


def fit(samples: Tensor, inverse_penalty: float, tolerance: float, steps: int) -> LinearClassifiers:
    """Fit samples ``[T, 4·K, D]``, class after class."""
    settings = BaselineSettings(
        inverse_penalty=inverse_penalty, tolerance=tolerance, max_iterations=steps
    )
    return fit_logistic_regression(samples.unflatten(1, (4, -1)), settings)


@pytest.mark.parametrize("inverse_penalty", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("shot", "num_features"), [(1, 30), (5, 30), (30, 5), (5, 20)])
def test_the_gradient_vanishes_at_the_fit(
    shot: int, num_features: int, inverse_penalty: float
) -> None:
    samples, labels = problem(shot, num_features)
    fitted = fit(samples, inverse_penalty, 1e-10, 2000)
    weights = fitted.weights.clone().requires_grad_()
    biases = fitted.biases.clone().requires_grad_()
    for t in range(len(samples)):
        logits = samples[t] @ weights[t].T + biases[t]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        (loss + weights[t].square().sum() / (2 * inverse_penalty)).backward()
    assert weights.grad is not None
    assert biases.grad is not None
    assert weights.grad.abs().max() < 1e-6
    assert biases.grad.abs().max() < 1e-6
    assert weights.abs().max() > 0.01


@pytest.mark.parametrize(("shot", "num_features"), [(1, 30), (5, 30), (30, 5)])
def test_the_fit_is_that_of_scikit_learn(shot: int, num_features: int) -> None:
    samples, labels = problem(shot, num_features)
    fitted = fit(samples, 2.0, 1e-9, 2000)
    found = fitted.log_probabilities(samples).numpy()
    for t in range(len(samples)):
        one = LogisticRegression(C=2.0, tol=1e-10, max_iter=5000)
        one.fit(samples[t].numpy(), labels.numpy())
        expected = one.predict_log_proba(samples[t].numpy())
        np.testing.assert_allclose(found[t], expected, atol=5e-4)  # it stops before we do


@pytest.mark.parametrize("shot", [1, 5])
def test_the_logistic_baseline_is_scikit_learn_on_unit_vectors(shot: int) -> None:
    support, queries = episodes(shot)
    found = build("logistic", tolerance=1e-9).fit_predict(support, queries, noise_of(3))
    labels = np.arange(4).repeat(shot)
    for t in range(3):
        rows = support[t].flatten(0, 1).numpy()
        inputs = queries[t].numpy()
        one = LogisticRegression(tol=1e-10, max_iter=5000)
        one.fit(rows / np.linalg.norm(rows, axis=1, keepdims=True), labels)
        expected = one.predict_log_proba(inputs / np.linalg.norm(inputs, axis=1, keepdims=True))
        np.testing.assert_allclose(found[t].numpy(), expected, atol=1e-6)


def test_single_precision_reaches_the_fit_of_double_precision() -> None:
    samples, _ = problem(100, 20)
    double = fit(samples, 1.0, 1e-9, 2000)
    single = fit(samples.float(), 1.0, 1e-6, 2000)
    torch.testing.assert_close(
        single.log_probabilities(samples.float()).double(),
        double.log_probabilities(samples),
        atol=1e-2,
        rtol=0,
    )


def test_tasks_that_need_more_steps_are_counted() -> None:
    samples, _ = problem(5, 30)
    samples[0] = 0  # converged before the first step
    with pytest.warns(RuntimeWarning, match="5 of 6 tasks had not converged after 2 steps"):
        fit(samples, 1.0, 1e-9, 2)


# --- distribution calibration --------------------------------------------------------------------


def test_statistics_of_base_classes_equal_those_of_numpy() -> None:
    sizes = [1, 3, 7, 8, 40]  # one image, fewer than features, as many, more
    base = base_of(sizes)
    start = 0
    for c, size in enumerate(sizes):
        rows = base.features[start : start + size].numpy()
        start += size
        np.testing.assert_allclose(base.class_means[c].numpy(), rows.mean(0))
        factor = base.class_factors[c]
        assert factor.shape == (7, 7)
        expected = np.cov(rows.T) if size > 1 else np.zeros((7, 7))
        np.testing.assert_allclose((factor.T @ factor).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(base.mean.numpy(), base.features.numpy().mean(0))


def test_factors_of_small_classes_stay_small() -> None:
    assert base_of([3, 5], num_features=50).class_factors.shape == (2, 5, 50)


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"class_sizes: expected .* sum to the 4 rows .* \[2, 3\]"):
        BaseFeatures(torch.zeros(4, 2), [2, 3])


def calibrated(image: Array, means: Array, covariances: Array, k: int, alpha: float) -> Any:
    """Equations 5 and 6 of the paper for one transformed support image, by plain loops."""
    distances = [((image - mean) ** 2).sum() for mean in means]
    nearest = sorted(range(len(means)), key=lambda c: distances[c])[:k]
    mean = (sum(means[c] for c in nearest) + image) / (k + 1)
    covariance = sum(covariances[c] for c in nearest) / k + alpha  # α in every entry
    return mean, covariance


@pytest.mark.parametrize("transform_base", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drawn_features_have_the_calibrated_mean_and_covariance(
    k: int, transform_base: bool
) -> None:
    sizes = [30, 2, 40, 6]
    base = base_of(sizes, num_features=3)
    changes = {"nearest_classes": k, "dispersion": 0.3, "samples": 200_000}
    baseline = build("calibration", base, transform_base=transform_base, **changes)
    assert isinstance(baseline, DistributionCalibration)
    support = torch.rand(2, 1, 2, 3, generator=torch.Generator().manual_seed(0)).double() + 1
    drawn = baseline.draw(support, noise_of(2))
    assert drawn.shape == (2, 1, 2, 100_000, 3)
    features = base.features.numpy() ** (0.5 if transform_base else 1.0)
    classes = np.split(features, np.cumsum(sizes)[:-1])
    means = np.stack([rows.mean(0) for rows in classes])
    covariances = np.stack([np.cov(rows.T) for rows in classes])
    for t in range(2):
        for i in range(2):
            image = support[t, 0, i].numpy()
            mean, covariance = calibrated(image, means, covariances, k, 0.3)
            rows = drawn[t, 0, i].numpy()
            np.testing.assert_allclose(rows.mean(0), mean, atol=0.012)
            np.testing.assert_allclose(np.cov(rows.T), covariance, atol=0.015)


@pytest.mark.parametrize("transform_base", [False, True])
@pytest.mark.parametrize("shot", [1, 5])
def test_calibration_around_points_equals_logistic_regression_on_what_a_loop_adds(
    shot: int, transform_base: bool
) -> None:
    support, queries = episodes(shot)
    base = base_of([3, 4, 5, 6], width=0.0)
    changes = {"dispersion": 0.0, "tolerance": 1e-9, "samples": 12}
    baseline = build("calibration", base, transform_base=transform_base, **changes)
    found = baseline.fit_predict(support, queries, noise_of(3))
    means = base.features[[0, 3, 7, 12]].numpy() ** (0.5 if transform_base else 1.0)
    nothing = np.zeros((4, 7, 7))
    for t in range(3):
        rows = []
        for images in np.sqrt(support[t].numpy()):
            for image in images:
                mean, _ = calibrated(image, means, nothing, 2, 0.0)
                rows += [image, *([mean] * (12 // shot))]
        fitted = fit(torch.from_numpy(np.stack(rows))[None], 1.0, 1e-9, 2000)
        expected = fitted.log_probabilities(queries[t].sqrt()[None])[0]
        torch.testing.assert_close(found[t], expected, atol=1e-5, rtol=0)


def test_negative_features_keep_their_sign_under_the_power() -> None:
    support, queries = episodes(1)
    base = BaseFeatures(-base_of([3, 4]).features, [3, 4])
    baseline = build("calibration", base, dispersion=0.0, transform_base=True, **FEW)
    mirrored = BaseFeatures(-base.features, [3, 4])
    powered = BaseFeatures(mirrored.features**0.5, [3, 4])
    expected = build("calibration", mirrored, dispersion=0.0, transform_base=True, **FEW)
    found = baseline.fit_predict(-support, -queries, noise_of(3))
    assert torch.isfinite(found).all()
    assert isinstance(baseline, DistributionCalibration)
    torch.testing.assert_close(baseline.statistics.class_means, -powered.class_means)
    positive = expected.fit_predict(support, queries, noise_of(3))
    assert (found.argmax(-1) == positive.argmax(-1)).double().mean() > 0.8  # other noise


def test_noise_of_calibration_belongs_to_its_task() -> None:
    support, _ = episodes(5)
    baseline = build("calibration", **FEW)
    assert isinstance(baseline, DistributionCalibration)
    complete = baseline.draw(support, noise_of(3))
    part = baseline.draw(support[1:], task_generators(0, "test", 0, range(1, 3)))
    torch.testing.assert_close(part, complete[1:])
    assert not torch.allclose(complete[0] - complete[0].mean(2, keepdim=True), complete[1])


def test_too_few_base_classes_are_named() -> None:
    support, queries = episodes(1)
    baseline = build("calibration", base_of([3, 4]), nearest_classes=3)
    with pytest.raises(SettingsError, match="nearest_classes: 3 asked for, but there are 2"):
        baseline.fit_predict(support, queries, noise_of(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.0), ("inverse_penalty", -1.0), ("samples", 0), ("power", 0.0)],
)
def test_hyper_parameters_that_cannot_work_are_named(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"{name}: must be greater than 0"):
        BaselineSettings(**{name: value})


# --- measured like any model ---------------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_stored_features_are_measured_the_same_in_parts_and_at_once(
    name: BaselineName, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = torch.from_numpy(tiny_dataset.images[:, ::9, ::9, 0].reshape(-1, 16) / 255).float()
    base = BaseFeatures(stored[: 30 * 12], [12] * 30)
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 2, 4)
    baseline = build(name, base, tolerance=1e-6, **FEW)

    def measured(num_episodes: int) -> Tensor:
        return evaluate_classifier(
            baseline.fit_predict,
            lambda wanted: stored[wanted],
            sampler,
            num_episodes,
            seed=0,
            elements_per_task=baseline.elements_per_task(3, 2, 4, 16),
        ).log_likelihood

    complete = measured(12)
    assert complete.shape == (12, 12)
    torch.testing.assert_close(measured(7), complete[:7], atol=1e-3, rtol=1e-3)
    monkeypatch.setattr("vsm.evaluation.evaluator.ELEMENTS_AT_ONCE", 1)
    torch.testing.assert_close(measured(12), complete, atol=1e-3, rtol=1e-3)


SHORT = [
    *("--data", "glyphs", "--queries", "2", "--tasks", "1", "--steps", "2"),
    *("--model.channels", "4", "--validation.episodes", "2", "--learn-memory", "false"),
]
ALL = ",".join(BASELINE_NAMES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A protonet and a vsm of two steps."""
    folder = tmp_path_factory.mktemp("baseline-runs")
    for method in ("protonet", "vsm"):
        out = ["--method", method, "--output", str(folder / method)]
        assert main(["train", *SHORT, *out, "--json"]) == 0
    return folder


def protocol(episodes: int, **changes: Any) -> EpisodeProtocol:
    shape = {"data": "glyphs", "split": "test", "way": 5, "shot": 2, "queries": 3, "seed": 0}
    return EpisodeProtocol(episodes=episodes, **{**shape, **changes})


def test_nearest_means_without_transformation_are_what_the_protonet_computes(runs: Path) -> None:
    loaded = load(runs / "protonet").on(protocol(20))
    own = loaded.measure(protocol(20))
    simple = loaded.measure_baseline("simpleshot_un", protocol(20), BaselineSettings())
    torch.testing.assert_close(simple.evaluation.log_likelihood, own.evaluation.log_likelihood)
    assert torch.equal(simple.evaluation.correct, own.evaluation.correct)


def test_every_split_is_embedded_once_for_a_run_and_all_its_baselines(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(runs / "vsm").on(protocol(3))
    embedded: list[int] = []
    embed = Encoder.embed

    def counted(self: Encoder, images: Tensor, *rest: Any) -> Tensor:
        embedded.append(len(images))
        return embed(self, images, *rest)

    monkeypatch.setattr(Encoder, "embed", counted)
    for name in ("simpleshot", "logistic", "calibration"):
        loaded.measure_baseline(name, protocol(3), BaselineSettings(samples=10))
    loaded.measure(protocol(3))
    sizes = loaded.dataset.class_sizes
    wanted = sum(sizes[loaded.dataset.classes(split)].sum() for split in ("train", "test"))
    assert sum(embedded) == wanted


def test_base_features_are_those_of_the_training_classes(runs: Path) -> None:
    loaded = load(runs / "vsm").on(protocol(3))
    base, dataset = loaded.base_features, loaded.dataset
    assert len(base.class_sizes) == len(dataset.classes("train"))
    last = int(dataset.classes("train")[-1])
    images = dataset.normalize(dataset.load(dataset.image_ids(last)))
    with torch.no_grad():
        expected = loaded.trained.model.embed(images).mean(0)
    torch.testing.assert_close(base.class_means[-1], expected)


def test_progress_counts_the_episodes_of_models_and_baselines(runs: Path) -> None:
    loaded = load(runs / "vsm").on(protocol(7))
    for name in (None, "cosine"):
        progress = RecordedProgress()
        progress.start("evaluate", 7)
        if name is None:
            loaded.measure(protocol(7), progress)
        else:
            loaded.measure_baseline("cosine", protocol(7), BaselineSettings(), progress)
        assert progress.shown[-1] == ("evaluate", 7, 7)


def test_the_penalty_is_chosen_on_validation_classes_alone(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_model, "TUNING_EPISODES", 8)
    loaded = load(runs / "protonet").on(protocol(5))
    tuned = loaded.measure_baseline("logistic-tuned", protocol(5), BaselineSettings())
    validation = replace(protocol(8), split="validation", seed=0)
    scores = {}
    for penalty in trained_model.PENALTIES:
        given = BaselineSettings(inverse_penalty=penalty)
        scores[penalty] = loaded.measure_baseline("logistic", validation, given).evaluation
    best = max(scores, key=lambda penalty: scores[penalty].accuracy.mean)
    assert tuned.baseline_settings == asdict(BaselineSettings(inverse_penalty=best))
    assert tuned.as_dict()["method"] == "logistic-tuned"
    plain = loaded.measure_baseline("logistic", protocol(5), BaselineSettings(inverse_penalty=best))
    assert tuned.evaluation.accuracy == plain.evaluation.accuracy
    whole = replace(loaded.dataset, splits={"all": loaded.dataset.classes("test")})
    with pytest.raises(EpisodeError, match="validation classes, which these data do not have"):
        replace(loaded, dataset=whole).measure_baseline(
            "logistic-tuned", protocol(5), BaselineSettings()
        )


def test_features_that_depend_on_the_episode_are_refused(runs: Path) -> None:
    transductive = protocol(3, batch_norm="transductive")
    loaded = load(runs / "vsm").on(transductive)
    with pytest.raises(EpisodeError, match="batch_norm: the baseline logistic needs features that"):
        loaded.measure_baseline("logistic", transductive, BaselineSettings())


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    [line] = capsys.readouterr().out.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def test_compare_adds_baselines_on_the_first_runs_features_with_paired_differences(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(runs / "protonet"), str(runs / "vsm")
    few = ["--episodes", "10", "--queries", "3", "--baseline.samples", "15"]
    few += ["--baseline.adapter-steps", "3"]
    assert main(["compare", first, second, "--baselines", ALL, *few, "--json"]) == 0
    printed = printed_json(capsys)
    assert [run["run"] for run in printed["runs"]] == [first, second]
    assert [one["method"] for one in printed["baselines"]] == list(BASELINE_NAMES)
    for one in printed["baselines"]:
        assert one["features_of"] == first
        assert one["baseline_settings"]["samples"] == 15
        assert one["memory_slots"] is None
    differences = {(one["a"], one["b"]): one for one in printed["differences"]}
    assert len(differences) == 11 * 10 / 2
    gain = differences[first, "logistic"]
    logistic = printed["baselines"][BASELINE_NAMES.index("logistic")]
    assert gain["difference"] == pytest.approx(
        printed["runs"][0]["accuracy"] - logistic["accuracy"]
    )
    assert differences[first, "simpleshot_un"]["difference"] == 0
    assert differences[first, "simpleshot_un"]["ci95"] == 0


def test_one_run_may_be_compared_with_baselines_alone(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    few = ["--episodes", "4", "--queries", "3"]
    assert main(["compare", str(runs / "vsm"), "--baselines", "cosine, logistic", *few]) == 0
    shown = capsys.readouterr().out
    assert f"cosine on the features of {runs / 'vsm'} (vsm)" in shown
    assert f"{runs / 'vsm'} − logistic" in shown


def test_evaluate_measures_one_baseline(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--episodes", "4", "--queries", "3", "--json"]
    assert main(["evaluate", str(runs / "vsm"), "--classifier", "logistic", *few]) == 0
    printed = printed_json(capsys)
    assert (printed["method"], printed["memory_slots"]) == ("logistic", None)
    assert main(["evaluate", str(runs / "vsm"), *few]) == 0
    own = printed_json(capsys)
    assert own["method"] == "vsm"
    assert "features_of" not in own


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compare", "{run}"], "runs: two or more are compared, or one with --baselines, got one"),
        (["compare", "{run}", "--baselines", "svm"], "unknown baseline 'svm'; known: simpleshot,"),
        (["compare", "{run}", "--baselines", "cosine", "--batch-norm", "transductive"], "batch_no"),
        (["evaluate", "{run}", "--classifier", "svm"], "svm"),
        (["evaluate", "{run}", "--baseline.power", "-1"], "power: must be greater than 0, got -1"),
        (
            ["evaluate", "{run}", "--classifier", "cosine", "--memory-slots", "3"],
            "memory_slots: the classifier cosine has no memory, got 3",
        ),
    ],
)
def test_mistakes_are_named_with_exit_code_2(
    arguments: list[str], named: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main([word.format(run=runs / "vsm") for word in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert named in captured.err
    assert captured.out == ""


def test_help_names_baselines_without_torch() -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        "for command in ('compare', 'evaluate'):\n"
        "    try: main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--baselines" in done.stdout
    assert b"--classifier" in done.stdout
    assert b"--baseline.dispersion" in done.stdout


OTHER_SETTINGS: dict[str, Any] = {
    **{"temperature": 2.0, "inverse_penalty": 3.0, "tolerance": 0.1, "max_iterations": 1},
    **{"power": 1.0, "transform_base": False, "nearest_classes": 1, "dispersion": 0.5},
    **{"samples": 40, "adapter_steps": 3, "adapter_learning_rate": 0.1},
}


@pytest.mark.filterwarnings("ignore:logistic regression")
@pytest.mark.parametrize("name", BASELINE_NAMES)
def test_every_setting_of_a_baseline_has_an_effect_or_is_refused(name: BaselineName) -> None:
    draw = torch.Generator().manual_seed(0)
    known = BaseFeatures(torch.rand(24, 5, generator=draw), [8] * 3)
    support = torch.rand(1, 3, 4, 5, generator=draw)
    queries = torch.rand(1, 6, 5, generator=draw)

    def answers(**changes: Any) -> Tensor:
        given = {"adapter_steps": 2, "samples": 8, **changes}
        baseline = BASELINES[name](BaselineSettings(**given), lambda: known)
        return baseline.fit_predict(support, queries, noise_of(1))

    assert {one.name for one in fields(BaselineSettings)} == OTHER_SETTINGS.keys()
    for setting, value in OTHER_SETTINGS.items():
        refusal = ""
        try:
            BaselineSettings(**{setting: value}).require_effect([name])
        except SettingsError as error:
            refusal = str(error)
        has_effect = not torch.equal(answers(**{setting: value}), answers())
        has_effect &= (name, setting) != ("logistic-tuned", "inverse_penalty")  # it is chosen
        assert has_effect != (f"baseline.{setting}" in refusal)
