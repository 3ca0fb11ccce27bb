"""The posterior of prototypes, which every inference returns, and how it classifies queries."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.memory.slots.recall import Recollection, entropy
from vsm.nn.distributions import GaussianMixture
from vsm.nn.layers import PrototypeClassifier, mean_distance, pairwise_distance, predictive
from vsm.seeding import Randomness


class SplitUncertainty(NamedTuple):
    """The uncertainty of the answers for B queries of T tasks."""

    std: Tensor  # standard deviation of probabilities over the prototypes [T, B, N]
    total: Tensor  # entropy in nats [T, B]; the sum of the other two
    aleatoric: Tensor  # what would be left if the prototypes were known [T, B]
    epistemic: Tensor  # mutual information of answer and prototypes [T, B]


class Posterior(ABC):
    """Of the prototypes of N classes in each of T tasks, in the coordinates of ``project``."""

    mixture: GaussianMixture | None = None
    """q̃(z | M, S) with components ``[T, N, C, D]``, for the KL of Eq. 14."""
    recollection: Recollection | None = None
    """What the slots offered."""
    strength: Tensor | None = None
    """κ ``[T, N, D]``, the support images that the memory counted for by Bayes' rule."""
    prototypes: Tensor
    """Samples of z, or its mean with L = 1: ``[T, N, L, D]``."""

    @property
    def weights(self) -> Tensor | None:
        """λ ``[T, N, A]``, which remembered classes were recalled; None without memory."""
        return None if self.recollection is None else self.recollection.weights

    @abstractmethod
    def log_probabilities(self, queries: Tensor) -> Tensor:
        """Classify ``queries [T, B, D]`` by every sample of the prototypes: ``[T, B, N, L]``."""

    @abstractmethod
    def scores(self, queries: Tensor) -> Tensor:
        """Score ``queries [T, B, D]`` in each class, for a softmax over classes: ``[T, B, N]``."""

    @abstractmethod
    def rejection_scores(self, queries: Tensor, slots: Tensor | None) -> Tensor:
        """Score how far every query ``[T, B, D]`` lies from every class: ``[T, B, N]``.

        ``slots [A, D]`` are other remembered classes; see :attr:`vsm.Memory.rejection_slots`.
        """

    @abstractmethod
    def uncertainty(self, queries: Tensor, random: Randomness) -> SplitUncertainty:
        """Split the uncertainty of the answers for ``queries [T, B, D]``."""

    def memory_strength(self, shots: Tensor) -> Tensor | None:
        """Support images that the memory counts for ``[N]`` in the first task; None without.

        ``shots [N, 1]`` are the support images of each class.
        """
        del shots
        return None if self.strength is None else self.strength[0].mean(-1)

    @property
    def displacement(self) -> tuple[Tensor, Tensor] | None:
        """How far the memory moved the prototypes from the support mean, and that: ``[T, N, D]``.

        None where coordinates have no meaning of their own.
        """
        return None

    def linear(self) -> tuple[Tensor, Tensor] | None:
        """Weights ``[N, D]`` and biases ``[N]`` of the first task's scores, if these are linear."""
        return None


@dataclass(frozen=True)
class SampledPosterior(Posterior):
    """Samples of the prototypes; ``classifier`` classifies by distance to them (Eq. 1)."""

    prototypes: Tensor
    classifier: PrototypeClassifier
    mixture: GaussianMixture | None = None
    recollection: Recollection | None = None
    strength: Tensor | None = None

    def log_probabilities(self, queries: Tensor) -> Tensor:
        """See :class:`Posterior`: Eq. 1."""
        log_probabilities: Tensor = self.classifier(queries, self.prototypes)
        return log_probabilities

    def scores(self, queries: Tensor) -> Tensor:
        """See :class:`Posterior`: log-probabilities averaged over the samples."""
        return predictive(self.log_probabilities(queries))

    def rejection_scores(self, queries: Tensor, slots: Tensor | None) -> Tensor:
        """See :class:`Posterior`: distances to prototypes against those to the slots."""
        distance, temperature = self.classifier.distance, self.classifier.log_temperature.exp()
        scores: Tensor = mean_distance(queries, self.prototypes, distance) / temperature
        if slots is None:
            return scores
        rows, others = queries.flatten(0, 1).unsqueeze(0), slots.view(1, len(slots), 1, -1)
        to_slots = pairwise_distance(rows, others, distance)
        logits = -to_slots.view(*queries.shape[:2], len(slots)) / temperature  # [T, B, A]
        return scores + torch.logsumexp(logits, -1, keepdim=True)

    def uncertainty(self, queries: Tensor, random: Randomness) -> SplitUncertainty:
        """See :class:`Posterior`: H[E p] = E H[p] + I(answer; z), E over the samples."""
        del random
        return split_uncertainty(self.log_probabilities(queries))


def split_uncertainty(log_probabilities: Tensor) -> SplitUncertainty:
    """Split the uncertainty of the mean of L answers: finite log-probabilities ``[T, B, N, L]``."""
    probabilities, samples = log_probabilities.exp(), log_probabilities.shape[-1]
    mean = probabilities.mean(-1)
    aleatoric = -(probabilities * log_probabilities).sum((-1, -2)) / samples
    norms: Tensor = torch.linalg.vector_norm(probabilities.sub_(mean.unsqueeze(-1)), dim=-1)
    total, std = entropy(mean), norms / math.sqrt(samples)
    return SplitUncertainty(std, total, aleatoric, (total - aleatoric).clamp_min(0))
