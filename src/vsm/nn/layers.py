"""The perceptrons of the paper's architecture table, and the prototype classifier (Eq. 1)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.nn.distributions import DiagonalGaussian, bounded_log_variance, unbounded_log_variance
from vsm.settings import ModelSettings

Distance = Literal["squared_euclidean", "cosine"]


class GaussianHead(nn.Module):
    """The layers after the first one, shared in form by ψ, φ and θ: ELU, linear, ELU, linear."""

    def __init__(self, num_features: int, settings: ModelSettings) -> None:
        super().__init__()
        self.hidden = nn.Linear(settings.hidden_units, settings.hidden_units)
        self.output = nn.Linear(settings.hidden_units, 2 * num_features)
        self.residual = settings.residual
        if settings.residual:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)
        with torch.no_grad():
            self.output.bias[num_features:] += unbounded_log_variance(settings.initial_log_variance)

    def forward(self, first_layer: Tensor, identity: Tensor) -> DiagonalGaussian:
        """Map pre-activations ``[..., hidden_units]`` of the first layer to a Gaussian.

        A residual mean is added to ``identity``, which is broadcastable to ``[..., D]``.
        """
        hidden = F.elu(self.hidden(F.elu(first_layer, inplace=True)), inplace=True)
        mean, log_variance = self.output(hidden).chunk(2, -1)
        if self.residual:
            mean = mean + identity
        return DiagonalGaussian(mean, bounded_log_variance(log_variance))


class GaussianNetwork(nn.Module):
    """A diagonal Gaussian given one vector: p_ψ(m | M_a), p_θ(z | h(x)), and VPN's q(z | S).

    256–256–256–2·256 with ELU in the paper.
    """

    def __init__(self, num_features: int, settings: ModelSettings) -> None:
        super().__init__()
        self.first = nn.Linear(num_features, settings.hidden_units)
        self.head = GaussianHead(num_features, settings)

    def forward(self, condition: Tensor) -> DiagonalGaussian:
        """Map ``[..., D]`` to a Gaussian over ``[..., D]``."""
        gaussian: DiagonalGaussian = self.head(self.first(condition), condition)
        return gaussian


class MemoryConditionedNetwork(nn.Module):
    """q_φ(z | m, S) of Eqs. 7 and 10 on [m, support mean]: 512–256–256–2·256 with ELU.

    The first layer of a concatenation is a sum, W_m·m + W_s·h̄ + b, so the support's half is
    computed once per class and not once per sample of m.
    """

    def __init__(self, num_features: int, settings: ModelSettings) -> None:
        super().__init__()
        self.first_memory = nn.Linear(num_features, settings.hidden_units, bias=False)
        self.first_support = nn.Linear(num_features, settings.hidden_units)
        self.head = GaussianHead(num_features, settings)

    def forward(self, memory_samples: Tensor, support_mean: Tensor) -> DiagonalGaussian:
        """Map samples of m ``[T, N, J, D]`` and support means ``[T, N, D]`` to ``[T, N, J, D]``."""
        from_support = self.first_support(support_mean).unsqueeze(-2)  # [T, N, 1, H]
        first_layer = self.first_memory(memory_samples).add_(from_support)  # [T, N, J, H]
        gaussian: DiagonalGaussian = self.head(first_layer, support_mean.unsqueeze(-2))
        return gaussian


class LearnedVariance(nn.Module):
    """One variance for each feature, the same for all classes."""

    def __init__(self, num_features: int, initial_log_variance: float) -> None:
        super().__init__()
        start = unbounded_log_variance(initial_log_variance)
        self.unbounded = nn.Parameter(torch.full((num_features,), start))

    def forward(self) -> Tensor:
        """Return the log-variance ``[D]``."""
        return bounded_log_variance(self.unbounded)


class Perceptron(nn.Sequential):
    """A deterministic network of the same form, T(·) of the transformed memory."""

    def __init__(self, num_features: int, settings: ModelSettings) -> None:
        width = settings.hidden_units
        super().__init__(
            nn.Linear(num_features, width),
            nn.ELU(),
            nn.Linear(width, width),
            nn.ELU(),
            nn.Linear(width, num_features),
        )


def pairwise_distance(queries: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """D of Eq. 1 of ``queries [T, B, D]`` and ``prototypes [T, N, L, D]``: ``[T, B, N, L]``."""
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

    Both distances are linear in what they need of a sample, z and |z|² or z / |z|. These are
    averaged first, so there is one product per class and not one per sample.
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
        """Eq. 1: log-probabilities over N, with the shapes of :func:`pairwise_distance`."""
        distances = pairwise_distance(queries, prototypes, self.distance)
        return F.log_softmax(-distances * (-self.log_temperature).exp(), dim=-2)


def predictive(log_probabilities: Tensor) -> Tensor:
    """Average the L probability vectors: log-probabilities ``[T, B, N, L]`` to ``[T, B, N]``."""
    if log_probabilities.shape[-1] == 1:
        return log_probabilities.squeeze(-1)
    return torch.logsumexp(log_probabilities, -1) - math.log(log_probabilities.shape[-1])
