"""What answers of the Gaussian memory do not know, by quadrature; and what they rest on."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vsm import FewShotClassifier
from vsm.encoders import Encoder
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.learning import gaussian_model, learn_statistics, name_memory
from vsm.memory import GaussianMemory, GaussianPosterior, GaussianReader, ReadSettings, SupportSet
from vsm.nn.distributions import DiagonalGaussian
from vsm.runs.trained_model import made_in_memory
from vsm.seeding import generator
from vsm.settings import GaussianSettings, ModelSettings

WIDTH = 5


def values(*shape: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def prototypes_of(means: Tensor, variances: Tensor) -> GaussianPosterior:
    """One task with N classes, whose posterior has these moments ``[N, D]``."""
    return posterior_of(DiagonalGaussian(means.unsqueeze(0), variances.log().unsqueeze(0)))


def posterior_of(gaussian: DiagonalGaussian) -> GaussianPosterior:
    mean, width = gaussian.mean, gaussian.mean.shape[-1]
    none, slots = torch.zeros(width), torch.zeros(0, width)
    reader = GaussianReader(torch.eye(width), none, none + 1, slots, none[:0], 0.0, 1.0, {})
    return GaussianPosterior(gaussian, mean, torch.zeros(*mean.shape[:2], 0), mean, reader)


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.clamp_min(1e-300).log()).sum(-1)


def normal_log_density(x: Tensor, mean: float, variance: float) -> Tensor:
    return -0.5 * ((x - mean) ** 2 / variance + math.log(2 * math.pi * variance))


def by_quadrature(x: float, means: list[float], variances: list[float]) -> tuple[Tensor, Tensor]:
    """E H[y | x, z] and the std of p(y | x, z) over a grid of all prototypes, given x too.

    p(z | x) ∝ Π_c q(z_c) · Σ_y N(x; z_y, 1): nothing is assumed of the class that x is of.
    """
    axes, log_prior, points = [], [], 151 if len(means) == 2 else 61
    for mean, variance in zip(means, variances, strict=True):
        spread = math.sqrt(variance)
        axis = torch.linspace(mean - 8 * spread, mean + 8 * spread, points, dtype=torch.float64)
        axis = axis + (x - mean) * variance / (1 + variance) / 2  # x draws the prototype to it
        axes.append(axis)
        log_prior.append(normal_log_density(axis, mean, variance))
    z = torch.cartesian_prod(*axes)  # [G, N]
    prior = torch.cartesian_prod(*log_prior).sum(-1).exp()
    likelihoods = normal_log_density(z, x, 1.0).exp()
    weights = prior * likelihoods.sum(-1)
    weights = weights / weights.sum()
    answers = likelihoods / likelihoods.sum(-1, keepdim=True)
    aleatoric = weights @ entropy(answers)
    first, second = weights @ answers, weights @ answers.square()
    return aleatoric, (second - first.square()).sqrt()


CASES: list[tuple[list[float], list[float]]] = [
    ([0.0, 2.0], [1.0, 1.0]),
    ([-0.5, 1.0], [4.0, 0.3]),
    ([0.0, 0.0], [0.2, 3.0]),
    ([-1.0, 0.5, 2.0], [1.5, 0.5, 2.5]),
]


@pytest.mark.parametrize(("means", "variances"), CASES)
def test_uncertainty_splits_as_quadrature_over_the_prototypes_says(
    means: list[float], variances: list[float]
) -> None:
    images = [-1.5, 0.3, 1.0, 4.0]
    found = prototypes_of(
        torch.tensor(means, dtype=torch.float64).unsqueeze(-1),
        torch.tensor(variances, dtype=torch.float64).unsqueeze(-1),
    )
    queries = torch.tensor(images, dtype=torch.float64).view(1, -1, 1)
    std, total, aleatoric, epistemic = found.uncertainty(
        queries, generator(0, "uncertainty"), samples=20_000
    )
    for b, x in enumerate(images):
        densities = torch.stack(
            [
                normal_log_density(torch.tensor(x, dtype=torch.float64), mean, 1 + variance).exp()
                for mean, variance in zip(means, variances, strict=True)
            ]
        )
        expected_total = entropy(densities / densities.sum())
        expected, expected_std = by_quadrature(x, means, variances)
        assert total[0, b].item() == pytest.approx(expected_total.item(), abs=1e-9)
        assert aleatoric[0, b].item() == pytest.approx(expected.item(), abs=0.006)
        assert epistemic[0, b].item() == pytest.approx(
            (expected_total - expected).item(), abs=0.006
        )
        np.testing.assert_allclose(std[0, b], expected_std, atol=0.006)


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_with_few_draws_the_parts_still_add_up_and_none_is_negative(size: float) -> None:
    found = prototypes_of(values(6, WIDTH, seed=1), size * values(6, WIDTH, seed=2).exp())
    queries = 2 * values(1, 40, WIDTH, seed=3)
    std, total, aleatoric, epistemic = found.uncertainty(
        queries, generator(0, "uncertainty"), samples=4
    )
    assert std.shape == (1, 40, 6)
    torch.testing.assert_close(aleatoric + epistemic, total)
    torch.testing.assert_close(total, entropy(found.scores(queries).softmax(-1)))
    assert (epistemic >= 0).all()
    assert (aleatoric >= 0).all()
    assert (std >= 0).all()


def test_tasks_are_split_as_each_would_be_alone() -> None:
    means, log_variances = values(3, 4, WIDTH, seed=20), values(3, 4, WIDTH, seed=21)
    queries = values(3, 7, WIDTH, seed=22)

    def split(tasks: slice) -> tuple[Tensor, ...]:
        found = posterior_of(DiagonalGaussian(means[tasks], log_variances[tasks]))
        return found.uncertainty(queries[tasks], generator(0, "same"))

    together = split(slice(None))
    for t in range(3):
        for one, other in zip(together, split(slice(t, t + 1)), strict=True):
            torch.testing.assert_close(one[t], other[0])


def remembered() -> GaussianMemory:
    class_ids = torch.arange(12).repeat_interleave(6)
    rows = 1.5 * values(12, WIDTH, seed=4)[class_ids] + values(72, WIDTH, seed=5)
    return GaussianMemory.fit(rows, class_ids, torch.zeros(WIDTH), ReadSettings("un", 1.0, 1.0))


def test_more_examples_leave_less_to_learn_and_very_many_nothing() -> None:
    reader = remembered().reader
    examples = reader.project(1.5 * values(1, 4, 1, WIDTH, seed=6).float())
    queries = reader.project(1.5 * values(1, 100, WIDTH, seed=7).float())
    parts = []
    for shot in (1, 2, 5, 20, 100, 10**6):
        support = SupportSet(examples, examples[:, :, 0], torch.full((1, 4, 1), float(shot)))
        split = reader.infer(support).uncertainty(queries, generator(0, "uncertainty"), samples=256)
        parts.append(split.epistemic.mean().item())
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 0.05
    assert parts[-1] == pytest.approx(0, abs=1e-4)


def classifier_of(settings: GaussianSettings) -> FewShotClassifier:
    """Four remembered classes in five dimensions, so that some directions tell none apart."""
    class_ids = torch.arange(4).repeat_interleave(6)
    rows = (1.5 * values(4, WIDTH, seed=8)[class_ids] + values(24, WIDTH, seed=9)).float()
    model = gaussian_model(
        Encoder(ModelSettings(), (WIDTH,), "features:x"), "features:x", settings, 0
    )
    learned = learn_statistics(model, ClassFeatures(rows, [6] * 4), torch.arange(4), None)
    named = name_memory(model, learned, tuple("wxyz"), 24)
    return FewShotClassifier(made_in_memory(model, named))


@pytest.mark.parametrize("beta", [0.0, 0.5, math.inf])
def test_an_explanation_says_what_closed_forms_say(beta: float) -> None:
    asked = GaussianSettings(normalization="un", epsilon=1.0, beta=beta, rho=0.5)
    classifier = classifier_of(asked)
    new, labels = values(4, WIDTH, seed=10), ["a", "b", "b", "b"]
    images = values(6, WIDTH, seed=11)
    classifier.fit(new, labels)
    probabilities = classifier.predict_proba(images)
    assert classifier.memory is not None
    memory = classifier.memory.memory
    assert isinstance(memory, GaussianMemory)
    ratios = memory.reader.ratios.double().numpy()
    for b, explained in enumerate(classifier.explain_all(images)):
        total, aleatoric, epistemic = explained.uncertainty
        assert total == pytest.approx(-sum(p * math.log(p) for p in probabilities[b]), abs=1e-5)
        assert aleatoric + epistemic == pytest.approx(total, abs=1e-6)
        assert 0 <= epistemic <= total
        # The memory counts as κ images where its mean share κ_d / (κ_d + K), κ_d = 1/e_d, is κ's.
        assert explained.memory_strength is not None
        for label, shot in (("a", 1), ("b", 3)):
            share = np.mean([1 / (1 + shot * e) for e in ratios])
            expected = shot * share / (1 - share)
            assert explained.memory_strength[label] == pytest.approx(expected, rel=1e-3)
        assert explained.moved is not None
        for label, moved in explained.moved.items():
            rows = [
                memory.reader.project(row.float())
                for row, of in zip(new, labels, strict=True)
                if of == label
            ]
            mean = torch.stack(rows).mean(0)
            support = SupportSet.of(torch.stack(rows).view(1, 1, -1, WIDTH))
            change = memory.reader.infer(support).gaussian.mean[0, 0] - mean
            assert moved.length == pytest.approx((change.norm() / mean.norm()).item(), rel=1e-3)
            largest = int(change.square().argmax())
            assert moved.directions[0].number == largest + 1
            assert moved.directions[0].share == pytest.approx(
                (change[largest] ** 2 / change.square().sum()).item(), rel=1e-3
            )


def test_the_same_seed_explains_in_the_same_way() -> None:
    classifier = classifier_of(GaussianSettings(normalization="un", epsilon=1.0, beta=1.0, rho=0.0))
    image = values(WIDTH, seed=12)
    classifier.fit(values(2, WIDTH, seed=13), ["a", "b"])
    assert classifier.explain(image).uncertainty == classifier.explain(image).uncertainty
