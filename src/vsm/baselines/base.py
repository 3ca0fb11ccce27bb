"""The interface of baselines, and the training features that some of them use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vsm.seeding import Randomness
from vsm.settings import BaselineSettings


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
        """Classify queries by support features, all T episodes at once.

        Args:
            support: ``[T, N, K, D]``.
            queries: ``[T, N, Q, D]``.
            random: source of every draw.

        Returns:
            Log-probabilities ``[T, N·Q, N]``.
        """

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Estimate how many numbers an episode needs at once, to bound memory use."""
        return way * (shot + queries) * num_features + way**2 * queries
