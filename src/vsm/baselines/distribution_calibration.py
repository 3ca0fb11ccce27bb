"""Distribution calibration: base classes lend their statistics to new ones."""

from functools import cached_property

import torch
from torch import Tensor

from vsm.baselines.base import BaseFeatures, Baseline
from vsm.baselines.logistic import fit_logistic_regression
from vsm.errors import SettingsError
from vsm.seeding import Randomness, normal


def tukey(features: Tensor, power: float) -> Tensor:
    """Tukey's ladder of powers, x^λ; a negative feature keeps its sign: −|x|^λ."""
    return features.sign() * features.abs() ** power


class DistributionCalibration(Baseline):
    """Free Lunch for Few-shot Learning (Yang, Liu and Xu 2021).

    Every support image, after Tukey's transform, borrows from the k base classes with the nearest
    means. Features drawn from the calibrated Gaussian join the support set, and logistic regression
    is fitted to both:

    - mean ``(x + Σ_{c ∈ near} μ_c) / (k + 1)``,
    - covariance ``1/k · Σ_{c ∈ near} Σ_c + α``, with α in every entry.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        """See :class:`Baseline`."""
        support, queries = (tukey(part, self.settings.power) for part in (support, queries))
        drawn = self.draw(support, random)
        samples = torch.cat([support, drawn.flatten(2, 3)], 2)
        fitted = fit_logistic_regression(samples, self.settings)
        return fitted.log_probabilities(queries.flatten(1, 2))

    def draw(self, support: Tensor, random: Randomness) -> Tensor:
        """Draw M features around each transformed support feature: ``[T, N, K, M, D]``."""
        base, lenders = self.statistics, self.settings.nearest_classes
        distances = torch.cdist(support.flatten(0, 2), base.class_means)
        nearest = distances.topk(lenders, largest=False).indices.view(*support.shape[:3], -1)
        mean = (support + base.class_means[nearest].sum(-2)) / (lenders + 1)  # [T, N, K, D]
        count = self.settings.samples // support.shape[2]
        shape = (*support.shape[:3], count)
        common = normal(random, *shape, 1).to(support)  # α in every entry shifts all features
        drawn: Tensor = mean.unsqueeze(-2) + self.settings.dispersion**0.5 * common
        for position in range(lenders):  # independent draws add up to the sum of covariances
            factors = base.class_factors[nearest[..., position]]  # [T, N, K, R, D]
            noise = normal(random, *shape, factors.shape[-2]).to(support)
            drawn += noise @ factors / lenders**0.5
        return drawn

    @cached_property
    def statistics(self) -> BaseFeatures:
        """The base classes that lend."""
        base = self.base()
        wanted, known = self.settings.nearest_classes, len(base.class_sizes)
        if wanted > known:
            raise SettingsError(
                f"nearest_classes: {wanted} asked for, but there are {known} training classes; "
                f"lower baseline.nearest_classes to {known} or less"
            )
        if not self.settings.transform_base:
            return base
        return BaseFeatures(tukey(base.features, self.settings.power), base.class_sizes)

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Count the drawn features, their centered copy, their noise, and the factors."""
        rank = self.statistics.class_factors.shape[1]
        drawn = way * self.settings.samples * (3 * num_features + rank)
        factors = way * shot * rank * num_features
        return drawn + factors + super().elements_per_task(way, shot, queries, num_features)
