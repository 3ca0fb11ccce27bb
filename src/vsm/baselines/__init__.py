"""Simple classifiers on fixed features, to compare the memory with.

:func:`vsm.evaluation.evaluator.evaluate_classifier` measures them on the same episodes as models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.baselines.adapter import Adapter, episode_scores, train_adapter
from vsm.baselines.logistic import fit_logistic_regression
from vsm.errors import SettingsError
from vsm.nn.layers import Distance, pairwise_distance
from vsm.seeding import Randomness, normal
from vsm.settings import BaselineName, BaselineSettings


@dataclass(frozen=True)
class BaseFeatures:
    """Features of the training classes; their statistics are computed once."""

    features: Tensor  # [B, D], class after class
    class_sizes: Sequence[int]  # how many rows each of the C classes has

    def __post_init__(self) -> None:
        if sum(self.class_sizes) != len(self.features) or min(self.class_sizes, default=0) < 1:
            raise ValueError(
                f"class_sizes: expected positive sizes that sum to the {len(self.features)} rows "
                f"of features, got {list(self.class_sizes)}"
            )

    @cached_property
    def mean(self) -> Tensor:
        """Mean of all training features ``[D]``."""
        return self.features.mean(0)

    @cached_property
    def class_means(self) -> Tensor:
        """``[C, D]``."""
        return torch.stack([rows.mean(0) for rows in self._classes()])

    @cached_property
    def class_factors(self) -> Tensor:
        """Σ_c = F_cᵀF_c: ``[C, R, D]``, R the largest rank that a class's covariance can have.

        A draw from N(0, Σ_c) is F_cᵀe with e standard normal. Σ_c is the full, unbiased covariance,
        zero for a class of one image; as factors, classes of 20 images need 20·D numbers, not D².
        """
        rank = min(max(self.class_sizes), self.features.shape[1])
        factors = self.features.new_zeros(len(self.class_sizes), rank, self.features.shape[1])
        for factor, rows in zip(factors, self._classes(), strict=True):
            centered = (rows - rows.mean(0)) / max(len(rows) - 1, 1) ** 0.5
            small = centered if len(rows) <= rank else torch.linalg.qr(centered, mode="r").R
            factor[: len(small)] = small
        return factors

    def _classes(self) -> Sequence[Tensor]:
        return torch.split(self.features, list(self.class_sizes))


BaseFeaturesSource = Callable[[], BaseFeatures]
"""Gives the training features; called only by baselines that need them."""


class Baseline(ABC):
    """A classifier on fixed features, fitted to the support set of every episode."""

    def __init__(self, settings: BaselineSettings, base: BaseFeaturesSource) -> None:
        self.settings = settings
        self.base = base

    @abstractmethod
    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        """Return log-probabilities ``[T, B, N]`` of all T episodes.

        Support ``[T, N, K, D]`` and queries ``[T, B, D]``; ``random`` is the source of draws.
        """

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Estimate how many numbers an episode needs at once, to bound memory use."""
        return way * (shot + queries) * num_features + way**2 * queries * shot


class BaselineKind(Protocol):
    """Makes a baseline whose hyper-parameters are chosen on validation classes."""

    @property
    def label(self) -> str:
        """What it is called."""

    @property
    def candidates(self) -> Sequence[Mapping[str, float]]:
        """Hyper-parameters to try."""

    def __call__(
        self, settings: BaselineSettings, base: BaseFeaturesSource, **chosen: float
    ) -> Baseline:
        """Return the baseline with the hyper-parameters that were chosen."""


class SimpleShot(Baseline):
    """SimpleShot (Wang, Chao, Weinberger and van der Maaten 2019).

    Nearest class mean by distance of features that are left alone (``un``), scaled to length one
    (``l2n``), or centered by the mean of all training features first (``cl2n``). The mean of scaled
    features is not scaled again. The published rule is Euclidean and has no probabilities; these
    are the softmax of the negative squared distance, or cosine distance, over the temperature.
    """

    def __init__(
        self,
        settings: BaselineSettings,
        base: BaseFeaturesSource,
        transformation: Literal["un", "l2n", "cl2n"] = "cl2n",
        distance: Distance = "squared_euclidean",
    ) -> None:
        super().__init__(settings, base)
        self.transformation, self.distance = transformation, distance

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn."""
        centroids = self._transform(support).mean(2, keepdim=True)  # [T, N, 1, D]
        inputs = self._transform(queries)
        distances = pairwise_distance(inputs, centroids, self.distance).squeeze(-1)
        return F.log_softmax(-distances / self.settings.temperature, -1)

    def _transform(self, features: Tensor) -> Tensor:
        if self.transformation == "cl2n":
            features = features - self.base().mean
        return features if self.transformation == "un" else F.normalize(features, dim=-1)


class NearestNeighbor(Baseline):
    """The class of the most similar support image, as in a search by embeddings.

    Probabilities are the softmax of the largest cosine in each class over the temperature.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn."""
        way, shot = support.shape[1:3]
        examples = F.normalize(support, dim=-1).flatten(1, 2)  # [T, N·K, D]
        cosines = F.normalize(queries, dim=-1) @ examples.mT  # [T, B, N·K]
        nearest = cosines.unflatten(-1, (way, shot)).amax(-1)
        return F.log_softmax(nearest / self.settings.temperature, -1)


class LogisticRegression(Baseline):
    """A good embedding is all you need (Tian, Wang, Krishnan, Tenenbaum and Isola 2020).

    Multinomial logistic regression with an L2 penalty on features scaled to length one.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn."""
        fitted = fit_logistic_regression(F.normalize(support, dim=-1), self.settings)
        return fitted.log_probabilities(F.normalize(queries, dim=-1))


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
        return fitted.log_probabilities(queries)

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


class ProtoNetAdapter(Baseline):
    """A prototypical network (Snell, Swersky and Zemel 2017) whose only layer is linear.

    A feature x becomes z = A·x̂ + b, where hats mean length one. A and b start as the identity and
    minimize the loss of episodes of the training classes. A query belongs to the class with the
    nearest mean c of ẑ over its support: the softmax of −(1 − cos(ẑ, c)) / 0.1, the 0.1 times
    the temperature of the settings.

    Like a memory, and unlike ``cosine``, it learns from the features of the training classes which
    directions separate classes. A gain over it is more than a linear map can give.

    There is one adapter per shot, because the best one depends on it, trained when first needed.
    """

    def __init__(self, settings: BaselineSettings, base: BaseFeaturesSource) -> None:
        super().__init__(settings, base)
        self._adapters: dict[int, Adapter] = {}

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn from ``random``."""
        shot = support.shape[2]
        if shot not in self._adapters:
            base, settings = self.base(), self.settings
            self._adapters[shot] = train_adapter(base.features, base.class_sizes, shot, settings)
        scores = episode_scores(self._adapters[shot], support, queries)
        return F.log_softmax(scores / self.settings.temperature, -1)


BASELINES: Mapping[BaselineName, Callable[[BaselineSettings, BaseFeaturesSource], Baseline]] = {
    "simpleshot": SimpleShot,
    "simpleshot_l2n": partial(SimpleShot, transformation="l2n"),
    "simpleshot_un": partial(SimpleShot, transformation="un"),
    "cosine": partial(SimpleShot, transformation="un", distance="cosine"),
    "knn": NearestNeighbor,
    "logistic": LogisticRegression,
    "logistic-tuned": LogisticRegression,  # with C chosen on validation classes
    "calibration": DistributionCalibration,
    "protonet-adapter": ProtoNetAdapter,
}
