"""What the transductive classifiers share: hyper-parameters, features of length one, distances."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.baselines import BaseFeaturesSource, Baseline
from vsm.nn.layers import pairwise_distance
from vsm.seeding import Randomness
from vsm.settings import BaselineSettings


class TransductiveBaseline(Baseline):
    """A classifier that sees all queries of a task at once.

    Features are scaled to length one after subtracting the mean of the training features, as
    SimpleShot's ``cl2n``. Every loop has a fixed number of steps, so that the answer to a task does
    not depend on the tasks computed with it.
    """

    label: ClassVar[str]
    """Name on the command line."""
    defaults: ClassVar[Mapping[str, float]]
    """Every hyper-parameter that the method has, with its usual value."""
    candidates: ClassVar[Sequence[Mapping[str, float]]]
    """Combinations that are tried on validation classes."""
    graphs: ClassVar[int] = 0
    """How many matrices of all pairs of images a task holds at a time."""

    def __init__(
        self, settings: BaselineSettings, base: BaseFeaturesSource, **chosen: float
    ) -> None:
        super().__init__(settings, base)
        unknown = [name for name in chosen if name not in self.defaults]
        if unknown:
            raise TypeError(
                f"{', '.join(unknown)}: not a hyper-parameter of {self.label}; it has "
                f"{', '.join(self.defaults)}"
            )
        self.chosen: Mapping[str, float] = {**self.defaults, **chosen}

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`vsm.baselines.Baseline`; nothing is drawn."""
        return self.solve(self.transform(support), self.transform(queries))

    def transform(self, features: Tensor) -> Tensor:
        """Center features by the training features, and scale them to length one."""
        return unit(features - self.base().mean.to(features))

    @abstractmethod
    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """Return log-probabilities ``[T, B, N]``.

        Transformed support ``[T, N, K, D]`` and queries ``[T, B, D]``.
        """

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Count five copies of the images, what links them to classes, and the graphs.

        There is room for as many outliers as queries.
        """
        images = way * (shot + 2 * queries)
        return images * (5 * num_features + 8 * way + self.graphs * images)


def grid(**values: Sequence[float]) -> Sequence[Mapping[str, float]]:
    """Return all combinations of the values."""
    return [dict(zip(values, one, strict=True)) for one in product(*values.values())]


def unit(features: Tensor) -> Tensor:
    """Scale to length one, zero vectors excepted; numbers of any size neither over- nor underflow.

    The largest entry is scaled to one first, because the square of a large number is infinite.
    """
    largest = features.abs().amax(-1, keepdim=True)
    return F.normalize(features / largest.clamp_min(torch.finfo(features.dtype).tiny), dim=-1)


def squared_distances(inputs: Tensor, centers: Tensor) -> Tensor:
    """Squared Euclidean distances of ``[T, B, D]`` and ``[T, N, D]``: ``[T, B, N]``."""
    found = pairwise_distance(inputs, centers.unsqueeze(2), "squared_euclidean")
    return found.squeeze(-1).clamp_min(0)


def support_targets(support: Tensor) -> Tensor:
    """Classes of the flattened support ``[T, N, K, D]``, one-hot: ``[1, N·K, N]``."""
    way, shot = support.shape[1:3]
    return torch.eye(way).to(support).repeat_interleave(shot, 0).unsqueeze(0)
