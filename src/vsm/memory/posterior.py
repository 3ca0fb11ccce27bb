"""The posterior of prototypes, which every inference returns, and how it classifies queries."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vsm.errors import ClassifierError
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


class QuadraticScores(NamedTuple):
    """Rejection scores of U images, as a function of where the prototypes m lie.

    Of an image h and class n it is s_n = ½ Σ_d c·m_n² − Σ_d c·m_n·h + constant.
    """

    scale: Tensor  # c, [D] or [T, N, D]
    constant: Tensor  # [T, U, N], or [T, U, 1] if it is the same for all classes
    evidence: Tensor  # examples that each prototype rests on, those of the prior too [T, N, D]


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
    log_shares: Tensor | None = None
    """Of each class among the images, relative to equal ones ``[T, N]``; None: equal."""

    @property
    def mean(self) -> Tensor:
        """Mean of the prototypes ``[T, N, D]``."""
        return self.prototypes.mean(2)

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

    @abstractmethod
    def quadratic_scores(self, images: Tensor, slots: Tensor | None) -> QuadraticScores:
        """Return :meth:`rejection_scores` of ``images [T, U, D]`` for any prototypes.

        An error where there is no such form, or no prior to weigh images against.
        """

    @abstractmethod
    def moved(self, mean: Tensor, log_shares: Tensor) -> Self:
        """Return the posterior with another ``mean [T, N, D]`` and ``log_shares [T, N]``."""

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
    evidence: Tensor | None = None  # κ + K by Bayes' rule [T, N, D]; None: not so inferred
    log_shares: Tensor | None = None

    def log_probabilities(self, queries: Tensor) -> Tensor:
        """See :class:`Posterior`: Eq. 1."""
        log_probabilities: Tensor = self.classifier(queries, self.prototypes)
        if self.log_shares is None:
            return log_probabilities
        return (log_probabilities + self.log_shares[:, None, :, None]).log_softmax(-2)

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

    def quadratic_scores(self, images: Tensor, slots: Tensor | None) -> QuadraticScores:
        """See :class:`Posterior`: squared distances over the temperature."""
        if self.evidence is None or self.classifier.distance != "squared_euclidean":
            raise ClassifierError(
                "transductive: needs Gaussian inference, or conjugate inference with squared "
                "distances, to weigh unlabeled images against examples; leave it out, or use "
                "another model"
            )
        scale = 2 / self.classifier.log_temperature.exp()
        at_origin = replace(self, prototypes=torch.zeros_like(self.prototypes[:, :1, :1]))
        constant = at_origin.rejection_scores(images, slots)  # [T, U, 1]
        spread = (self.prototypes - self.mean.unsqueeze(2)).square().sum(-1).mean(-1)  # [T, N]
        constant = constant + 0.5 * scale * spread.unsqueeze(1)
        return QuadraticScores(scale.expand(images.shape[-1]), constant, self.evidence)

    def moved(self, mean: Tensor, log_shares: Tensor) -> Self:
        """See :class:`Posterior`; every sample moves as the mean does."""
        moved = self.prototypes + (mean - self.mean).unsqueeze(2)
        return replace(self, prototypes=moved, log_shares=log_shares)


def split_uncertainty(log_probabilities: Tensor) -> SplitUncertainty:
    """Split the uncertainty of the mean of L answers: finite log-probabilities ``[T, B, N, L]``."""
    probabilities, samples = log_probabilities.exp(), log_probabilities.shape[-1]
    mean = probabilities.mean(-1)
    aleatoric = -(probabilities * log_probabilities).sum((-1, -2)) / samples
    norms: Tensor = torch.linalg.vector_norm(probabilities.sub_(mean.unsqueeze(-1)), dim=-1)
    total, std = entropy(mean), norms / math.sqrt(samples)
    return SplitUncertainty(std, total, aleatoric, (total - aleatoric).clamp_min(0))
