"""Means with 95% intervals, and calibration."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95%
NUM_BINS = 15


@dataclass(frozen=True)
class Estimate:
    """A mean and the half-width of its 95% interval."""

    mean: float
    ci95: float


def estimate(values: Tensor) -> Estimate:
    """Mean of independent values ``[E]`` with the normal 95% interval over them."""
    values = values.double()
    spread = values.std().item() if len(values) > 1 else float("nan")
    return Estimate(values.mean().item(), NORMAL_QUANTILE * spread / len(values) ** 0.5)


class Reliability(NamedTuple):
    """Confidence against accuracy in equal bins of confidence, each ``[bins]``."""

    fraction: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def expected_calibration_error(self) -> float:
        """Σ_b fraction_b · |accuracy_b − confidence_b|."""
        return (self.fraction * (self.accuracy - self.confidence).abs()).sum().item()


def reliability(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> Reliability:
    """Bin predictions by confidence; empty bins have fraction, confidence and accuracy zero.

    Args:
        confidence: probability of the predicted class ``[P]``.
        correct: whether it was the true one ``[P]``.
        num_bins: equal bins of (0, 1].
    """
    confidence, correct = confidence.double(), correct.double()
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    counts = torch.bincount(bins, minlength=num_bins).double()
    filled = counts.clamp_min(1)
    return Reliability(
        counts / len(confidence),
        torch.bincount(bins, confidence, minlength=num_bins) / filled,
        torch.bincount(bins, correct, minlength=num_bins) / filled,
    )
