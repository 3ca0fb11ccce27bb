"""Class probabilities from prototypes: Eq. 1."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.settings import ModelSettings

Distance = Literal["squared_euclidean", "cosine"]


def pairwise_distance(queries: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """D of Eq. 1 between every query and every prototype, by one matrix product per task.

    Queries ``[T, B, D]`` and prototypes ``[T, N, L, D]`` give ``[T, B, N, L]``. The distance is
    squared Euclidean, or one minus the cosine.
    """
    if distance == "cosine":
        queries, prototypes = F.normalize(queries, dim=-1), F.normalize(prototypes, dim=-1)
    products: Tensor = (queries @ prototypes.flatten(1, 2).mT).unflatten(-1, prototypes.shape[1:3])
    if distance == "cosine":
        return 1 - products
    query_norms = queries.square().sum(-1)[..., None, None]
    prototype_norms = prototypes.square().sum(-1).unsqueeze(1)
    return query_norms + prototype_norms - 2 * products


def mean_distance(queries: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """D of Eq. 1 averaged over the samples of each prototype: ``[T, B, N]``.

    Both distances are linear in what they need of a sample, z and |z|² or z / |z|, so these are
    averaged first, and there is one product per class and not one per sample. Arguments are those
    of :func:`pairwise_distance`.
    """
    if distance == "cosine":
        queries, prototypes = F.normalize(queries, dim=-1), F.normalize(prototypes, dim=-1)
    products = queries @ prototypes.mean(2).mT
    if distance == "cosine":
        return 1 - products
    squares = prototypes.square().sum(-1).mean(-1).unsqueeze(1)  # [T, 1, N]
    return queries.square().sum(-1, keepdim=True) + squares - 2 * products


class PrototypeClassifier(nn.Module):
    """Softmax over negative distances; sample ℓ of all N classes forms one classifier."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.distance: Distance = settings.distance
        self.log_temperature = nn.Parameter(
            torch.tensor(math.log(settings.temperature)), requires_grad=settings.learn_temperature
        )

    def forward(self, queries: Tensor, prototypes: Tensor) -> Tensor:
        """Eq. 1 for every sample of the prototypes: log-probabilities, normalized over N.

        Queries ``[T, B, D]`` and prototypes ``[T, N, L, D]`` give ``[T, B, N, L]``.
        """
        distances = pairwise_distance(queries, prototypes, self.distance)
        return F.log_softmax(-distances * (-self.log_temperature).exp(), dim=-2)


def predictive(log_probabilities: Tensor) -> Tensor:
    """Average the L probability vectors: log-probabilities ``[T, B, N, L]`` to ``[T, B, N]``."""
    if log_probabilities.shape[-1] == 1:
        return log_probabilities.squeeze(-1)
    return torch.logsumexp(log_probabilities, -1) - math.log(log_probabilities.shape[-1])
