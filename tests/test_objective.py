"""Eqs. 4 and 14 against plain loops and torch.distributions."""

import pytest
import torch
from torch import Tensor

from vsm.memory import Recollection
from vsm.model import Prediction
from vsm.objective import (
    cross_entropy,
    objective,
    prototype_kl_bound,
    prototype_kl_monte_carlo,
)
from vsm.probability import DiagonalGaussian, GaussianMixture
from vsm.settings import ObjectiveSettings

TASKS, WAY, QUERIES, COMPONENTS, SAMPLES, WIDTH = 2, 3, 4, 5, 6, 7


def gaussian(*shape: int, seed: int) -> DiagonalGaussian:
    random = torch.Generator().manual_seed(seed)
    return DiagonalGaussian(
        torch.randn(shape, generator=random, dtype=torch.float64),
        0.3 * torch.randn(shape, generator=random, dtype=torch.float64),
    )


@pytest.fixture
def posterior() -> GaussianMixture:
    return GaussianMixture(gaussian(TASKS, WAY, COMPONENTS, WIDTH, seed=0))


@pytest.fixture
def prior() -> DiagonalGaussian:
    return gaussian(TASKS, WAY, QUERIES, WIDTH, seed=1)


@pytest.fixture
def log_probabilities() -> Tensor:
    scores = gaussian(TASKS, WAY * QUERIES, WAY, SAMPLES, seed=2).mean
    return scores.log_softmax(2)


def test_cross_entropy_averages_the_log_of_the_true_class(log_probabilities: Tensor) -> None:
    total = 0.0
    for t in range(TASKS):
        for n in range(WAY):
            for q in range(QUERIES):
                for s in range(SAMPLES):
                    total -= log_probabilities[t, n * QUERIES + q, n, s].item()
    expected = total / (TASKS * WAY * QUERIES * SAMPLES)
    assert cross_entropy(log_probabilities, "mean_of_logs").item() == pytest.approx(expected)


def test_log_of_mean_averages_probabilities_first(log_probabilities: Tensor) -> None:
    mean = log_probabilities.exp().mean(-1).log()
    total = sum(
        mean[t, n * QUERIES + q, n].item()
        for t in range(TASKS)
        for n in range(WAY)
        for q in range(QUERIES)
    )
    measured = cross_entropy(log_probabilities, "log_of_mean").item()
    assert measured == pytest.approx(-total / (TASKS * WAY * QUERIES))
    assert measured <= cross_entropy(log_probabilities, "mean_of_logs").item()


def test_prototype_bound_averages_the_components_divergences_from_each_querys_prior(
    posterior: GaussianMixture, prior: DiagonalGaussian
) -> None:
    bound = prototype_kl_bound(posterior, prior)
    assert bound.shape == (TASKS, WAY, QUERIES)
    for t in range(TASKS):
        for n in range(WAY):
            for q in range(QUERIES):
                target = torch.distributions.Normal(
                    prior.mean[t, n, q], prior.variance[t, n, q].sqrt()
                )
                expected = 0.0
                for c in range(COMPONENTS):
                    component = torch.distributions.Normal(
                        posterior.components.mean[t, n, c],
                        posterior.components.variance[t, n, c].sqrt(),
                    )
                    kl = torch.distributions.kl_divergence(component, target).sum().item()
                    expected += kl / COMPONENTS
                assert bound[t, n, q].item() == pytest.approx(expected)


def test_monte_carlo_estimate_equals_the_mean_log_ratio_of_its_samples(
    posterior: GaussianMixture, prior: DiagonalGaussian, random: torch.Generator
) -> None:
    prototypes = posterior.sample(SAMPLES, random)
    estimate = prototype_kl_monte_carlo(posterior, prototypes, prior)
    components = posterior.components
    for t, n, q in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        density = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=torch.zeros(COMPONENTS)),
            torch.distributions.Independent(
                torch.distributions.Normal(components.mean[t, n], components.variance[t, n].sqrt()),
                1,
            ),
        )
        target = DiagonalGaussian(prior.mean[t, n, q], prior.log_variance[t, n, q])
        values = prototypes[t, n]
        expected = density.log_prob(values) - target.log_prob(values)
        torch.testing.assert_close(estimate[t, n, q], expected.mean())


def test_bound_is_above_the_estimate_and_they_agree_for_one_component(
    posterior: GaussianMixture, prior: DiagonalGaussian, random: torch.Generator
) -> None:
    bound = prototype_kl_bound(posterior, prior)
    estimate = prototype_kl_monte_carlo(posterior, posterior.sample(20_000, random), prior)
    assert (bound >= estimate - 0.1).all()
    single = GaussianMixture(gaussian(TASKS, WAY, 1, WIDTH, seed=5))
    torch.testing.assert_close(
        prototype_kl_monte_carlo(single, single.sample(100_000, random), prior),
        prototype_kl_bound(single, prior),
        rtol=0.02,
        atol=0.05,
    )


@pytest.mark.parametrize("kl", ["bound", "monte_carlo"])
def test_the_total_adds_the_terms_with_their_weights_over_the_number_of_queries(
    kl: str,
    posterior: GaussianMixture,
    prior: DiagonalGaussian,
    log_probabilities: Tensor,
    random: torch.Generator,
) -> None:
    prototypes = posterior.sample(SAMPLES, random)
    divergence = torch.rand(TASKS, WAY, generator=random).double()
    recollection = Recollection(prototypes, torch.ones(TASKS, WAY, 1), divergence)
    settings = ObjectiveSettings(beta_z=0.3, beta_m=0.7, kl=kl)  # type: ignore[arg-type]
    prediction = Prediction(log_probabilities, prototypes, posterior, recollection)
    terms = objective(prediction, prior, settings)
    kl_z = (
        prototype_kl_bound(posterior, prior)
        if kl == "bound"
        else prototype_kl_monte_carlo(posterior, prototypes, prior)
    )
    num_queries = TASKS * WAY * QUERIES
    summed = (
        num_queries * cross_entropy(log_probabilities, "mean_of_logs")
        + 0.3 * kl_z.sum()
        + 0.7 * divergence.sum()
    )
    torch.testing.assert_close(terms.total, summed / num_queries)
    torch.testing.assert_close(terms.kl_z, kl_z.mean())
    torch.testing.assert_close(terms.kl_m, divergence.mean())


def test_mean_prototypes_have_no_divergence(log_probabilities: Tensor) -> None:
    prediction = Prediction(log_probabilities, torch.zeros(0), None, None)
    terms = objective(prediction, None, ObjectiveSettings())
    assert terms.kl_z == terms.kl_m == 0
    assert terms.total == terms.cross_entropy
