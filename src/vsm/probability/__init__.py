"""Distribution objects and their divergences. This package knows tensors only."""

from vsm.probability.gaussian import (
    DiagonalGaussian,
    bounded_log_variance,
    unbounded_log_variance,
)
from vsm.probability.mixture import GaussianMixture

__all__ = ["DiagonalGaussian", "GaussianMixture", "bounded_log_variance", "unbounded_log_variance"]
