"""Diagonal Gaussians, mixtures of them, and divergences.

KL(mixture ‖ Gaussian) has no closed form. Two estimates are offered:

* the convexity bound Σ_k w_k KL(N_k ‖ N), which exceeds the KL by the mutual information
  I(z; k) ≤ log C, and needs only four weighted moments over the components;
* an unbiased Monte Carlo estimate, whose densities are computed by matrix products.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.seeding import Randomness, normal

LOG_VARIANCE_BOUND = 10.0
LOG_TWO_PI = math.log(2 * math.pi)


def bounded_log_variance(unbounded: Tensor) -> Tensor:
    """Squash to (-10, 10) by b·x / (b + |x|), whose slope is 1 at zero and never reaches zero.

    A hard clamp would stop the gradient of every variance that touched it.
    """
    bounded: Tensor = _Bounded.apply(unbounded)  # type: ignore[no-untyped-call]  # torch's
    return bounded


class _Bounded(torch.autograd.Function):
    """y = x·r with r = b / (b + |x|), and its slope r² written out.

    Composed of separate operations, this made half a dozen more passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, unbounded: Tensor) -> Tensor:
        root = (unbounded.abs() / LOG_VARIANCE_BOUND).add_(1).reciprocal_()
        ctx.save_for_backward(root)
        return unbounded * root

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        slope: Tensor = root.square()
        return slope.mul_(gradients[0])


def unbounded_log_variance(bounded: float) -> float:
    """Return what :func:`bounded_log_variance` maps to ``bounded``, its inverse for one number."""
    return LOG_VARIANCE_BOUND * bounded / (LOG_VARIANCE_BOUND - abs(bounded))


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent normals over the last axis D; all other axes are batch axes."""

    mean: Tensor
    log_variance: Tensor

    @property
    def variance(self) -> Tensor:
        """``[..., D]``."""
        return self.log_variance.exp()

    @property
    def precision(self) -> Tensor:
        """``[..., D]``."""
        return (-self.log_variance).exp()

    def sample(self, num_samples: int, random: Randomness) -> Tensor:
        """Draw reparameterized samples ``[..., num_samples, D]``."""
        mean = self.mean.unsqueeze(-2)
        noise = normal(random, *self.mean.shape[:-1], num_samples, self.mean.shape[-1])
        return torch.addcmul(mean, (0.5 * self.log_variance).exp().unsqueeze(-2), noise.to(mean))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value`` ``[..., D]`` summed over D: ``[...]``."""
        squares = (value - self.mean).square() * self.precision
        return -0.5 * (squares + self.log_variance + LOG_TWO_PI).sum(-1)

    def kl(self, other: "DiagonalGaussian") -> Tensor:
        """Return KL(self ‖ other) in nats, summed over D: ``[...]``."""
        log_ratio = self.log_variance - other.log_variance
        squares = (self.mean - other.mean).square() * other.precision
        return 0.5 * (log_ratio.exp() + squares - 1 - log_ratio).sum(-1)

    def unsqueeze(self, axis: int) -> "DiagonalGaussian":
        """Insert a batch axis."""
        return DiagonalGaussian(self.mean.unsqueeze(axis), self.log_variance.unsqueeze(axis))

    def where(self, condition: Tensor, other: "DiagonalGaussian") -> "DiagonalGaussian":
        """Keep this one where ``condition`` ``[...]`` holds and take ``other`` elsewhere."""
        keep = condition.unsqueeze(-1)
        return DiagonalGaussian(
            torch.where(keep, self.mean, other.mean),
            torch.where(keep, self.log_variance, other.log_variance),
        )


class Moments(NamedTuple):
    """Weighted moments over the components of a mixture, each ``[..., D]``."""

    mean: Tensor
    mean_variance: Tensor
    variance_of_means: Tensor
    mean_log_variance: Tensor

    def bound_on_kl(self, other: DiagonalGaussian) -> Tensor:
        """Return Σ_k w_k KL(N_k ‖ other), summed over D; batch axes are broadcast."""
        variance = self.mean_variance + self.variance_of_means
        squares = (variance + (self.mean - other.mean).square()) * other.precision
        return 0.5 * (other.log_variance - self.mean_log_variance + squares - 1).sum(-1)

    def unsqueeze(self, axis: int) -> "Moments":
        """Insert a batch axis."""
        return Moments(*(moment.unsqueeze(axis) for moment in self))


def mean_and_variances(
    weights: Tensor, components: DiagonalGaussian
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, mean variance and variance of means ``[..., D]`` of mixtures.

    They have ``weights [..., C]`` and share ``components [C, D]``. The variance of the means is
    taken about their plain average before weighting, because E[μ²] − E[μ]² of features far from
    zero cancels catastrophically in single precision.
    """
    center = _center(components.mean, -2)
    centered = components.mean - center
    mean = weights @ centered
    between = (weights @ centered.square() - mean.square()).clamp_min(0)
    return mean + center, weights @ components.variance, between


def weighted_moments(weights: Tensor, components: DiagonalGaussian) -> Moments:
    """Moments of mixtures with ``weights [..., C]`` that share ``components [C, D]``."""
    moments = mean_and_variances(weights, components)
    return Moments(*moments, weights @ components.log_variance)


def _center(means: Tensor, axis: int) -> Tensor:
    """Average ``means`` over ``axis`` without gradient; zero where the axis is empty."""
    detached = means.detach()
    return detached.mean(axis) if means.shape[axis] else detached.sum(axis)


@dataclass(frozen=True)
class GaussianMixture:
    """An equally weighted mixture, as in Eq. 10: (1/C) Σ_c N_c with components ``[..., C, D]``."""

    components: DiagonalGaussian

    @property
    def num_components(self) -> int:
        """C."""
        return self.components.mean.shape[-2]

    def moments(self) -> Moments:
        """Return the equally weighted moments over the components, each ``[..., D]``."""
        mean = self.components.mean.mean(-2)
        return Moments(
            mean,
            self.components.variance.mean(-2),
            (self.components.mean - mean.unsqueeze(-2)).square().mean(-2),
            self.components.log_variance.mean(-2),
        )

    def sample(self, num_samples: int, random: Randomness) -> Tensor:
        """Draw reparameterized samples, as evenly as possible from the components in their order.

        Sample ℓ ``[..., L, D]`` comes from component ℓ mod C. The components of Eq. 10 belong to
        independent draws of m, so any L of them serve as well as the first L.
        """
        mean, log_variance = self.components.mean, self.components.log_variance
        if num_samples <= self.num_components:
            mean, log_variance = mean[..., :num_samples, :], log_variance[..., :num_samples, :]
        else:
            cycle = torch.arange(num_samples, device=mean.device) % self.num_components
            mean, log_variance = mean.index_select(-2, cycle), log_variance.index_select(-2, cycle)
        noise = normal(random, *mean.shape).to(mean)
        return torch.addcmul(mean, (0.5 * log_variance).exp(), noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of ``value`` ``[..., L, D]``: ``[..., L]``."""
        log_densities = pairwise_log_prob(value, self.components)  # [..., L, C]
        return torch.logsumexp(log_densities, -1) - math.log(self.num_components)


def pairwise_log_prob(values: Tensor, components: DiagonalGaussian) -> Tensor:
    """Log-densities of ``values [..., L, D]`` under ``components [..., C, D]``: ``[..., L, C]``."""
    constants = (components.log_variance + LOG_TWO_PI).sum(-1)
    return -0.5 * (pairwise_squares(values, components) + constants.unsqueeze(-2))


def pairwise_squares(values: Tensor, components: DiagonalGaussian) -> Tensor:
    """Squared Mahalanobis distances, Σ_d (x_d − m_d)² / σ_d², of the same shapes."""
    center = _center(components.mean, -2).unsqueeze(-2)
    values, means = values - center, components.mean - center
    precision = components.precision
    scaled = means * precision
    constants = (means * scaled).sum(-1).unsqueeze(-2)
    return values.square() @ precision.mT - values @ (2 * scaled).mT + constants
