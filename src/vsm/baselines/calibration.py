"""Distribution calibration: base classes lend their statistics to new ones."""

import torch
from torch import Tensor

from vsm.baselines.contract import BaseFeatures, BaseFeaturesSource, Baseline, tukey
from vsm.baselines.logistic import fit_classes
from vsm.errors import SettingsError
from vsm.seeding import Randomness, normal
from vsm.settings import BaselineSettings


class DistributionCalibration(Baseline):
    """Free Lunch for Few-shot Learning (Yang, Liu and Xu 2021).

    Every support image, after Tukey's transform, borrows from the k base classes with the nearest
    means. Features drawn from the calibrated Gaussian join the support set, and logistic regression
    is fitted to both:

    - mean ``(x + Σ_{c ∈ near} μ_c) / (k + 1)``,
    - covariance ``1/k · Σ_{c ∈ near} Σ_c + α``, with α in every entry.
    """

    def __init__(self, settings: BaselineSettings, base: BaseFeaturesSource) -> None:
        super().__init__(settings, base)
        self._statistics: BaseFeatures | None = None

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        """Classify ``[T, N, Q, D]`` by ``[T, N, K, D]`` and what is drawn around them."""
        support, queries = (tukey(part, self.settings.power) for part in (support, queries))
        drawn = self.draw(support, random)
        fitted = fit_classes(torch.cat([support, drawn.flatten(2, 3)], 2), self.settings)
        return fitted.log_probabilities(queries.flatten(1, 2))

    def draw(self, support: Tensor, random: Randomness) -> Tensor:
        """Draw features around transformed support features.

        Args:
            support: ``[T, N, K, D]``.
            random: source of the draws.

        Returns:
            ``[T, N, K, M, D]``, M the share of one support image.
        """
        base, nearest = self.statistics, self._nearest(support)  # [T, N, K, k]
        lenders = nearest.shape[-1]
        mean = (support + base.class_means[nearest].sum(-2)) / (lenders + 1)  # [T, N, K, D]
        count = self.settings.samples // support.shape[2]
        shape = (*support.shape[:3], count)
        common = normal(random, *shape, 1).to(support)  # α in every entry moves all features alike
        drawn: Tensor = mean.unsqueeze(-2) + self.settings.dispersion**0.5 * common
        for position in range(lenders):  # independent draws add up to the sum of covariances
            factors = base.class_factors[nearest[..., position]]  # [T, N, K, R, D]
            noise = normal(random, *shape, factors.shape[-2]).to(support)
            drawn += noise @ factors / lenders**0.5
        return drawn

    @property
    def statistics(self) -> BaseFeatures:
        """The base classes that lend."""
        if self._statistics is None:
            base = self.base()
            wanted, known = self.settings.nearest_classes, len(base.class_sizes)
            if wanted > known:
                raise SettingsError(
                    f"nearest_classes: {wanted} asked for, but there are {known} training classes; "
                    f"lower baseline.nearest_classes to {known} or less"
                )
            transform = self.settings.transform_base
            self._statistics = base.powered(self.settings.power) if transform else base
        return self._statistics

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Count the drawn features, their centered copy, their noise, and the factors."""
        rank = self.statistics.class_factors.shape[1]
        drawn = way * self.settings.samples * (3 * num_features + rank)
        factors = way * shot * rank * num_features
        return drawn + factors + super().elements_per_task(way, shot, queries, num_features)

    def _nearest(self, support: Tensor) -> Tensor:
        """Return the base classes of the nearest means: ``[T, N, K, k]``."""
        distances = torch.cdist(support.flatten(0, 2), self.statistics.class_means)
        _, nearest = distances.topk(self.settings.nearest_classes, largest=False)
        return nearest.view(*support.shape[:3], -1)
