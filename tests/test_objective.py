"""Eqs. 4 and 14 against plain loops and torch.distributions."""

import pytest
import torch
from torch import Tensor

from vsm.memory import Recollection, SampledPosterior
from vsm.model import (
    Prediction,
    cross_entropy,
    objective,
    prototype_kl_bound,
    prototype_kl_monte_carlo,
)
from vsm.nn.distributions import DiagonalGaussian, GaussianMixture
from vsm.nn.layers import PrototypeClassifier
from vsm.settings import ModelSettings, ObjectiveSettings

TASKS, WAY, QUERIES, COMPONENTS, SAMPLES, WIDTH = 2, 3, 4, 5, 6, 7
CLASSIFIER = PrototypeClassifier(ModelSettings())


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
    inferred = SampledPosterior(prototypes, CLASSIFIER, posterior, recollection)
    prediction = Prediction(inferred, log_probabilities)
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


def test_the_monte_carlo_divergence_differentiates_the_samples_as_well_as_the_densities(
    posterior: GaussianMixture, prior: DiagonalGaussian, log_probabilities: Tensor
) -> None:
    """The oracle draws and scores with torch.distributions; its gradient is a difference."""
    shape = (TASKS, WAY, COMPONENTS, WIDTH)  # a sample from every component
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3)).double()

    def by_distributions(mean: Tensor, log_variance: Tensor) -> float:
        components = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=torch.zeros(TASKS, WAY, COMPONENTS)),
            torch.distributions.Independent(components, 1),
        )
        target = torch.distributions.Normal(prior.mean, prior.variance.sqrt())  # [T, N, Q, D]
        total = 0.0
        for sample in (mean + components.stddev * noise).unbind(2):  # [T, N, D]
            log_ratio = mixture.log_prob(sample).unsqueeze(-1) - target.log_prob(
                sample.unsqueeze(2)
            ).sum(-1)
            total += log_ratio.mean().item() / COMPONENTS
        return total

    at = [posterior.components.mean.clone(), posterior.components.log_variance.clone()]
    mean, log_variance = (value.clone().requires_grad_() for value in at)
    prototypes = mean + (0.5 * log_variance).exp() * noise
    posterior = GaussianMixture(DiagonalGaussian(mean, log_variance))
    prediction = Prediction(SampledPosterior(prototypes, CLASSIFIER, posterior), log_probabilities)
    kl_z = objective(prediction, prior, ObjectiveSettings(kl="monte_carlo")).kl_z
    assert kl_z.item() == pytest.approx(by_distributions(*at))
    kl_z.backward()
    for which, value in enumerate((mean, log_variance)):
        assert value.grad is not None
        for place in [(0, 0, 0, 0), (1, 2, 4, 6), (0, 1, 3, 2)]:
            ends = []
            for change in (1e-5, -1e-5):
                moved = [part.clone() for part in at]
                moved[which][place] += change
                ends.append(by_distributions(*moved))
            difference = (ends[0] - ends[1]) / 2e-5
            assert value.grad[place].item() == pytest.approx(difference, rel=1e-5, abs=1e-8)


def test_mean_prototypes_have_no_divergence(log_probabilities: Tensor) -> None:
    prediction = Prediction(SampledPosterior(torch.zeros(0), CLASSIFIER), log_probabilities)
    terms = objective(prediction, None, ObjectiveSettings())
    assert terms.kl_z == terms.kl_m == 0
    assert terms.total == terms.cross_entropy
