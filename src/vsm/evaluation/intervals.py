"""Means with 95% intervals, rank correlation, areas under curves, and reliability."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.seeding import integers

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95%
NUM_BINS = 15


@dataclass(frozen=True)
class Estimate:
    """A mean and the half-width of its 95% interval."""

    mean: float
    ci95: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} ± {self.ci95:.1%}"


def estimate(values: Tensor) -> Estimate:
    """Mean of independent values ``[E]`` with the normal 95% interval over them."""
    values = values.double()
    std = values.std().item() if len(values) > 1 else float("nan")
    return Estimate(values.mean().item(), NORMAL_QUANTILE * std / len(values) ** 0.5)


def crossed_estimate(values: Tensor) -> Estimate:
    """Mean of ``values [S, E]`` of S training seeds on E shared episodes, with its 95% interval.

    Seeds and episodes are both samples: y_se = μ + a_s + b_e + ε_se. The variance of the mean is
    var(a)/S + var(b)/E + var(ε)/(S·E), estimated from the mean squares of the two-way layout, with
    negative variances taken as zero; the interval is Student's, by Satterthwaite's degrees of
    freedom. One seed leaves the interval over episodes, :func:`estimate`.
    """
    num_seeds, num_episodes = values.shape
    if num_seeds == 1 or num_episodes == 1:
        return estimate(values.flatten())
    values = values.double()
    mean, of_seed, of_episode = values.mean(), values.mean(1), values.mean(0)
    rest = values - of_seed.unsqueeze(1) - of_episode.unsqueeze(0) + mean
    by_seed, by_episode = num_seeds - 1, num_episodes - 1
    residual = rest.square().sum().item() / (by_seed * by_episode)
    # Mean squares with their degrees of freedom; one no larger than the residual adds nothing.
    parts = [
        (num_episodes * (of_seed - mean).square().sum().item() / by_seed, by_seed),
        (num_seeds * (of_episode - mean).square().sum().item() / by_episode, by_episode),
    ]
    larger = [(square, degrees) for square, degrees in parts if square > residual]
    terms = [*larger, ((1 - len(larger)) * residual, by_seed * by_episode)]
    total = sum(square for square, _ in terms)
    if total == 0:
        return Estimate(mean.item(), 0.0)
    degrees = total**2 / sum(square**2 / degrees for square, degrees in terms)
    error = math.sqrt(total / (num_seeds * num_episodes))
    return Estimate(mean.item(), student_quantile(degrees) * error)


def class_bootstrap(
    values: Tensor, class_ids: Tensor, random: torch.Generator, resamples: int = 2000
) -> Estimate:
    """Mean over episodes of what their pairs of classes add up to, with an interval over *classes*.

    An interval over thousands of episodes of few test classes tells how well these classes are
    known, not what others of their kind would give. Here the C classes that occur are the sample.
    A class is resampled both as the right answer and as a wrong one: each resample draws C classes
    with replacement, and an ordered pair of different classes counts w_c·w_d times, as often as
    both were drawn. With v_cd the sum of the values of queries of c against d, and n_cd how often
    the two met,

        mean* = (N − 1) · Σ w_c w_d v_cd / Σ w_c w_d n_cd.

    The interval is Student's, with C − 1 degrees of freedom and the std of the resampled means,
    times √(C / (C − 1)), by which resampling C classes understates it. Noise that belongs to
    neither class is counted up to three times (Owen 2007): with many classes that rarely meet, the
    interval is too wide rather than too narrow.

    ``values [E, N, N]`` are of queries of the i-th class of an episode against its j-th, such as
    the share that one method takes for j less that of another; the diagonal is not read.
    """
    way = class_ids.shape[1]
    classes, member = class_ids.unique(return_inverse=True)  # [C], [E, N]
    count = len(classes)
    pairs = member.unsqueeze(2) * count + member.unsqueeze(1)  # [E, N, N]
    different = ~torch.eye(way, dtype=torch.bool).expand_as(pairs)
    cells, size = pairs[different], count * count
    sums = torch.bincount(cells, values[different].double(), size).view(count, count)
    meetings = torch.bincount(cells, minlength=size).double().view(count, count)
    mean = (way - 1) * (sums.sum() / meetings.sum()).item()
    drawn = integers(random, count, resamples, count)
    weights = torch.zeros(resamples, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    met = (weights @ meetings * weights).sum(1)
    means = (weights @ sums * weights).sum(1)[met > 0] / met[met > 0]
    factor = student_quantile(count - 1) * math.sqrt(count / (count - 1))
    return Estimate(mean, factor * (way - 1) * means.std().item())


def auroc(lower: Tensor, higher: Tensor) -> Tensor:
    """Area under the ROC curve: how often ``higher [..., U]`` exceed ``lower [..., P]``, ties ½."""
    one, two = lower.unsqueeze(-1), higher.unsqueeze(-2)
    return ((one < two).double() + (one == two).double() / 2).mean((-2, -1))


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two samples ``[P]``, ties averaged; NaN if one of them is constant."""
    # How many values are below, less how many are above: twice the rank about its mean.
    apart = (values.unsqueeze(1) - values.unsqueeze(0) for values in (first, second))
    one, two = (differences.sign().double().sum(1) for differences in apart)
    scale = math.sqrt(one.square().sum().item() * two.square().sum().item())
    return (one @ two).item() / scale if scale else float("nan")


def student_quantile(degrees: float) -> float:
    """Return t with P(|T| < t) = 0.95 for Student's T with ν = ``degrees`` of freedom, ν ≥ 1.

    With t = √ν·tan θ that probability is 2Γ((ν+1)/2) / (√π Γ(ν/2)) · ∫₀^θ cos^(ν−1): θ is found by
    bisection, the integral by Simpson's rule. Where the integrand is a needle, the expansion about
    the normal quantile is exact to six digits.
    """
    if degrees > 1000:
        return NORMAL_QUANTILE + (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / (4 * degrees)
    scale = 2 / math.sqrt(math.pi)
    scale *= math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(40):
        angle = (low + high) / 2
        if scale * _power_of_cosine(degrees - 1, angle) < 0.95:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _power_of_cosine(power: float, angle: float, intervals: int = 100) -> float:
    """∫₀^angle cos^power by Simpson's rule."""
    width = angle / intervals
    weights = [1, *([4, 2] * (intervals // 2))]
    weights[-1] = 1
    values = (math.pow(math.cos(width * step), power) for step in range(intervals + 1))
    return width / 3 * sum(weight * value for weight, value in zip(weights, values, strict=True))


class Reliability(NamedTuple):
    """Confidence against accuracy in equal bins of confidence, each ``[bins]``."""

    fraction: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def expected_calibration_error(self) -> float:
        """Σ_b fraction_b · ``|accuracy_b − confidence_b|``."""
        return (self.fraction * (self.accuracy - self.confidence).abs()).sum().item()


def reliability(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> Reliability:
    """Put predictions ``[P]`` into equal bins of confidence in (0, 1]; empty bins are all zero."""
    confidence, correct = confidence.double(), correct.double()
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    counts = torch.bincount(bins, minlength=num_bins).double()
    filled = counts.clamp_min(1)
    return Reliability(
        counts / len(confidence),
        torch.bincount(bins, confidence, minlength=num_bins) / filled,
        torch.bincount(bins, correct, minlength=num_bins) / filled,
    )
