"""Mixtures against torch.distributions, plain loops and Monte Carlo."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from vsm.nn.distributions import (
    DiagonalGaussian,
    GaussianMixture,
    pairwise_log_prob,
    weighted_moments,
)

BATCH, COMPONENTS, WIDTH = 3, 6, 5


def gaussian(*shape: int, seed: int = 0, scale: float = 1.0) -> DiagonalGaussian:
    random = torch.Generator().manual_seed(seed)
    return DiagonalGaussian(
        scale * torch.randn(shape, generator=random, dtype=torch.float64),
        0.5 * torch.randn(shape, generator=random, dtype=torch.float64),
    )


@pytest.fixture
def mixture() -> GaussianMixture:
    return GaussianMixture(gaussian(BATCH, COMPONENTS, WIDTH))


def oracle(mixture: GaussianMixture) -> MixtureSameFamily:
    components = mixture.components
    return MixtureSameFamily(
        Categorical(logits=torch.zeros(BATCH, mixture.num_components)),
        Independent(Normal(components.mean, (0.5 * components.log_variance).exp()), 1),
    )


def test_log_prob_equals_that_of_mixture_same_family(mixture: GaussianMixture) -> None:
    values = gaussian(BATCH, 9, WIDTH, seed=1).mean
    expected = oracle(mixture).log_prob(values.transpose(0, 1)).T
    torch.testing.assert_close(mixture.log_prob(values), expected)


def test_pairwise_log_prob_stays_exact_far_from_zero_in_single_precision() -> None:
    near, far = gaussian(COMPONENTS, WIDTH), 1000.0
    values = gaussian(4, WIDTH, seed=1).mean
    shifted = DiagonalGaussian((near.mean + far).float(), near.log_variance.float())
    torch.testing.assert_close(
        pairwise_log_prob((values + far).float(), shifted).double(),
        pairwise_log_prob(values, near),
        rtol=2e-3,
        atol=2e-3,
    )


def test_moments_equal_plain_loops(mixture: GaussianMixture) -> None:
    moments = mixture.moments()
    for b in range(BATCH):
        for d in range(WIDTH):
            means = [mixture.components.mean[b, c, d].item() for c in range(COMPONENTS)]
            logs = [mixture.components.log_variance[b, c, d].item() for c in range(COMPONENTS)]
            average = sum(means) / COMPONENTS
            assert moments.mean[b, d].item() == pytest.approx(average)
            assert moments.mean_variance[b, d].item() == pytest.approx(
                sum(math.exp(v) for v in logs) / COMPONENTS
            )
            assert moments.variance_of_means[b, d].item() == pytest.approx(
                sum((m - average) ** 2 for m in means) / COMPONENTS
            )
            assert moments.mean_log_variance[b, d].item() == pytest.approx(sum(logs) / COMPONENTS)


def test_weighted_moments_with_equal_weights_equal_the_unweighted_ones() -> None:
    components = gaussian(COMPONENTS, WIDTH)
    weights = torch.full((2, COMPONENTS), 1 / COMPONENTS, dtype=torch.float64)
    for weighted, plain in zip(
        weighted_moments(weights, components), GaussianMixture(components).moments(), strict=True
    ):
        torch.testing.assert_close(weighted, plain.expand(2, -1))


def test_weighted_moments_do_not_cancel_far_from_zero_in_single_precision() -> None:
    components = gaussian(COMPONENTS, WIDTH)
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.1, 0.2, 0.1]], dtype=torch.float64)
    far = DiagonalGaussian((components.mean + 3000).float(), components.log_variance.float())
    torch.testing.assert_close(
        weighted_moments(weights.float(), far).variance_of_means.double(),
        weighted_moments(weights, components).variance_of_means,
        rtol=1e-2,
        atol=1e-3,
    )


def test_the_bound_is_the_weighted_sum_of_the_components_divergences() -> None:
    components, prior = gaussian(COMPONENTS, WIDTH), gaussian(2, WIDTH, seed=1)
    weights = gaussian(2, COMPONENTS, seed=2).mean.softmax(-1)
    bound = weighted_moments(weights, components).bound_on_kl(prior)
    for row in range(2):
        target = DiagonalGaussian(prior.mean[row], prior.log_variance[row])
        expected = sum(
            weights[row, c]
            * DiagonalGaussian(components.mean[c], components.log_variance[c]).kl(target)
            for c in range(COMPONENTS)
        )
        torch.testing.assert_close(bound[row], expected)


def test_the_bound_lies_between_the_monte_carlo_estimate_and_that_plus_log_c(
    mixture: GaussianMixture, random: torch.Generator
) -> None:
    prior = gaussian(BATCH, WIDTH, seed=3)
    bound = mixture.moments().bound_on_kl(prior)
    samples = mixture.sample(30_000, random)
    log_ratio = mixture.log_prob(samples) - prior.unsqueeze(-2).log_prob(samples)
    error = 4 * log_ratio.std(-1) / log_ratio.shape[-1] ** 0.5
    assert (bound >= log_ratio.mean(-1) - error).all()
    assert (bound <= log_ratio.mean(-1) + math.log(COMPONENTS) + error).all()


def test_one_component_makes_bound_and_estimate_agree(random: torch.Generator) -> None:
    single = GaussianMixture(gaussian(BATCH, 1, WIDTH))
    prior = gaussian(BATCH, WIDTH, seed=3)
    exact = DiagonalGaussian(single.components.mean[:, 0], single.components.log_variance[:, 0]).kl(
        prior
    )
    torch.testing.assert_close(single.moments().bound_on_kl(prior), exact)
    samples = single.sample(100_000, random)
    estimate = (single.log_prob(samples) - prior.unsqueeze(-2).log_prob(samples)).mean(-1)
    torch.testing.assert_close(estimate, exact, rtol=0.02, atol=0.02)


def well_separated(num_components: int) -> GaussianMixture:
    """Components whose samples reveal which one they came from."""
    mean = 100.0 * torch.arange(num_components).view(1, -1, 1).expand(2, -1, 3)
    return GaussianMixture(DiagonalGaussian(mean, torch.full_like(mean, -10.0)))


@pytest.mark.parametrize(("num_samples", "num_components"), [(4, 9), (9, 9), (23, 9), (5, 1)])
def test_sampling_is_stratified(
    num_samples: int, num_components: int, random: torch.Generator
) -> None:
    samples = well_separated(num_components).sample(num_samples, random)
    for row in (samples[..., 0] / 100).round().long():
        counts = torch.bincount(row, minlength=num_components)
        assert counts.sum() == num_samples
        assert counts.max() - counts.min() <= 1


def test_samples_take_the_components_in_turn(random: torch.Generator) -> None:
    samples = well_separated(3).sample(7, random)
    for row in (samples[..., 0] / 100).round().long():
        assert row.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_samples_follow_the_mixture(mixture: GaussianMixture, random: torch.Generator) -> None:
    samples = mixture.sample(60_000, random)
    moments = mixture.moments()
    variance = moments.mean_variance + moments.variance_of_means
    torch.testing.assert_close(samples.mean(-2), moments.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(samples.var(-2), variance, rtol=0.05, atol=0)


def test_the_gradient_of_samples_and_moments_is_that_of_finite_differences() -> None:
    random = torch.Generator().manual_seed(1)
    leaves = [torch.randn(2, 3, 2, generator=random, dtype=torch.float64) for _ in range(2)]
    for leaf in leaves:
        leaf.requires_grad_()

    def outputs(mean: torch.Tensor, log_variance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixture = GaussianMixture(DiagonalGaussian(mean, log_variance))
        return mixture.sample(2, torch.Generator().manual_seed(0)), *mixture.moments()

    assert torch.autograd.gradcheck(outputs, leaves)
