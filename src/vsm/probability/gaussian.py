"""Diagonal Gaussians: the distribution of every latent variable in the model."""

import math
from dataclasses import dataclass
from typing import Any

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
    """Independent normals over the last axis; all other axes are batch axes.

    Attributes:
        mean: ``[..., D]``.
        log_variance: ``[..., D]``.
    """

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
