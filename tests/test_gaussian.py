"""Diagonal Gaussians against torch.distributions."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from vsm.nn.distributions import (
    DiagonalGaussian,
    bounded_log_variance,
    unbounded_log_variance,
)

SHAPE = (3, 4, 7)


def gaussian(seed: int) -> DiagonalGaussian:
    random = torch.Generator().manual_seed(seed)
    return DiagonalGaussian(
        torch.randn(SHAPE, generator=random, dtype=torch.float64),
        torch.randn(SHAPE, generator=random, dtype=torch.float64),
    )


def oracle(one: DiagonalGaussian) -> "Independent[Normal]":
    return Independent(Normal(one.mean, (0.5 * one.log_variance).exp()), 1)


def test_kl_equals_that_of_torch_distributions() -> None:
    a, b = gaussian(0), gaussian(1)
    torch.testing.assert_close(a.kl(b), kl_divergence(oracle(a), oracle(b)))


def test_kl_from_itself_is_zero() -> None:
    assert gaussian(0).kl(gaussian(0)).abs().max() == 0


def test_log_prob_equals_that_of_torch_distributions() -> None:
    a = gaussian(0)
    value = gaussian(2).mean
    torch.testing.assert_close(a.log_prob(value), oracle(a).log_prob(value))


def test_samples_have_the_mean_and_variance_of_the_distribution(random: torch.Generator) -> None:
    a = gaussian(0)
    samples = a.sample(40_000, random)
    assert samples.shape == (3, 4, 40_000, 7)
    deviations = (samples.mean(-2) - a.mean) / (a.variance / 40_000).sqrt()
    assert deviations.abs().max() < 5
    torch.testing.assert_close(samples.var(-2), a.variance, rtol=0.05, atol=0)


def test_samples_pass_gradient_to_mean_and_log_variance(random: torch.Generator) -> None:
    mean = torch.zeros(2, requires_grad=True)
    log_variance = torch.zeros(2, requires_grad=True)
    sample = DiagonalGaussian(mean, log_variance).sample(1, random)
    sample.sum().backward()
    assert mean.grad is not None
    assert log_variance.grad is not None
    torch.testing.assert_close(mean.grad, torch.ones(2))
    torch.testing.assert_close(log_variance.grad, 0.5 * sample[0].detach())


def test_where_keeps_the_first_where_the_condition_holds() -> None:
    a, b = gaussian(0), gaussian(1)
    condition = torch.zeros(3, 4, dtype=torch.bool)
    condition[1, 2] = True
    mixed = a.where(condition, b)
    assert torch.equal(mixed.mean[1, 2], a.mean[1, 2])
    assert torch.equal(mixed.log_variance[0, 0], b.log_variance[0, 0])


def test_log_variance_is_bounded_and_its_gradient_never_dies() -> None:
    raw = torch.tensor([-1e9, -3.0, 0.0, 3.0, 1e9], requires_grad=True)
    bounded = bounded_log_variance(raw)
    assert bounded.abs().max() <= 10
    bounded.sum().backward()
    assert raw.grad is not None
    assert (raw.grad > 0).all()
    assert raw.grad[2] == 1


def test_the_bound_has_the_slope_of_finite_differences() -> None:
    raw = torch.tensor([-50.0, -3.0, -0.1, 0.2, 3.0, 70.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bounded_log_variance, raw)
    torch.testing.assert_close(bounded_log_variance(raw), 10 * raw / (10 + raw.abs()))


def test_the_inverse_of_the_bound_undoes_it() -> None:
    for value in (-9.0, -3.0, 0.0, 4.5):
        bounded = bounded_log_variance(torch.tensor(unbounded_log_variance(value)))
        assert bounded.item() == pytest.approx(value)
