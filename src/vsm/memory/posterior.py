"""The posterior of prototypes, which every inference returns, and how it classifies queries.

Class statistics give a Gaussian in closed form; the paper's slots give samples.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.memory.slots.addressing import entropy
from vsm.memory.slots.recall import Recollection
from vsm.nn.distributions import LOG_TWO_PI, DiagonalGaussian, GaussianMixture, pairwise_squares
from vsm.nn.networks import (
    PrototypeClassifier,
    mean_distance,
    pairwise_distance,
    predictive,
)
from vsm.seeding import Randomness, normal

if TYPE_CHECKING:
    from vsm.memory.reader import GaussianReader

PROTOTYPE_SAMPLES = 64


class SplitUncertainty(NamedTuple):
    """The uncertainty of the answers for B queries of T tasks.

    Attributes:
        std: standard deviation of probabilities over the prototypes ``[T, B, N]``.
        total: entropy in nats ``[T, B]``; the sum of the other two.
        aleatoric: what would be left if the prototypes were known ``[T, B]``.
        epistemic: mutual information of answer and prototypes ``[T, B]``.
    """

    std: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class Posterior(ABC):
    """Of the prototypes of N classes in each of T tasks, given support and memory.

    Queries are in the coordinates of :meth:`vsm.Memory.project`.
    """

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
        return None

    @property
    def displacement(self) -> tuple[Tensor, Tensor] | None:
        """How far the memory moved the prototypes from the support mean, and that: ``[T, N, D]``.

        None where coordinates have no meaning of their own.
        """
        return None

    def linear(self) -> tuple[Tensor, Tensor] | None:
        """Weights ``[N, D]`` and biases ``[N]`` of the first task's scores of normalized features.

        None where scores are not linear.
        """
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

    def memory_strength(self, shots: Tensor) -> Tensor | None:
        """See :class:`Posterior`."""
        del shots
        return None if self.strength is None else self.strength[0].mean(-1)


@dataclass(frozen=True)
class GaussianPosterior(Posterior):
    """Prototypes as Gaussians in the reader's coordinates, in which W is the identity.

    Attributes:
        gaussian: ``[T, N, D]``.
        prior_mean: π ``[T, N, D]``.
        recalled: λ ``[T, N, A]``, which remembered classes were recalled.
        support_mean: ``[T, N, D]``.
        reader: of the memory.
        precision: 1/(1 + v) ``[D]``, where all classes share v because they have equally many
            examples; None elsewhere.
    """

    gaussian: DiagonalGaussian
    prior_mean: Tensor
    recalled: Tensor
    support_mean: Tensor
    reader: "GaussianReader"
    precision: Tensor | None = None

    @property
    def prototypes(self) -> Tensor:  # type: ignore[override]
        """See :class:`Posterior`."""
        return self.gaussian.mean.unsqueeze(-2)

    @property
    def weights(self) -> Tensor:
        """See :class:`Posterior`."""
        return self.recalled

    def log_probabilities(self, queries: Tensor) -> Tensor:
        """See :class:`Posterior`: the log-softmax of :meth:`scores`, L = 1."""
        linear = self._linear()
        if linear is None:
            scores = self.scores(queries)
        else:
            weights, biases = linear
            scores = torch.baddbmm(biases.unsqueeze(-2), queries, weights.mT)
        return F.log_softmax(scores, -1).unsqueeze(-1)

    def _linear(self, offset: Tensor | float = 0.0) -> tuple[Tensor, Tensor] | None:
        """Return weights ``[T, N, D]`` and biases ``[T, N]`` of scores that are linear in queries.

        None unless classes share their variance. If so, squares of queries and determinants are
        the same for all and cancel, and with c the prototype of the first class,
        h·(m − c)/(1 + v) − ½ (m² − c²)/(1 + v) is left. The map is of queries less ``offset [D]``.
        """
        if self.precision is None:
            return None
        mean = self.gaussian.mean
        center = mean[..., :1, :].detach()  # far from zero, differences would cancel
        directions = (mean - center) * self.precision
        return directions, ((offset - torch.lerp(mean, center, 0.5)) * directions).sum(-1)

    def linear(self) -> tuple[Tensor, Tensor] | None:
        """See :class:`Posterior`: with projected features y = A·h + a, W·(y − a) = (W·A)·h."""
        linear = self._linear(self.reader.offset)
        return None if linear is None else (linear[0][0] @ self.reader.rotation, linear[1][0])

    def scores(self, queries: Tensor) -> Tensor:
        """See :class:`Posterior`: the density ∫ N(h; z, I) N(z; m, v) dz = N(h; m, I + v).

        It is tempered by the reader's noise, see ``gaussian_scores``.
        """
        determinants = self.gaussian.variance.log1p().sum(-1).unsqueeze(-2)
        noise, width = self.reader.noise, queries.shape[-1]
        return gaussian_scores(self.squares(queries), determinants, noise, width)

    def squares(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distances of ``queries [T, B, D]`` to each class: ``[T, B, N]``."""
        predictive = DiagonalGaussian(self.gaussian.mean, self.gaussian.variance.log1p())
        return pairwise_squares(queries, predictive)

    def rejection_scores(self, queries: Tensor, slots: Tensor | None) -> Tensor:
        """See :class:`Posterior`: how much nearer to a class than to one never met."""
        del slots
        unknown = self.reader.marginal_squares(queries)  # [T, B]
        return 0.5 * (self.squares(queries) - unknown.unsqueeze(-1))

    def uncertainty(
        self, queries: Tensor, random: Randomness, samples: int = PROTOTYPE_SAMPLES
    ) -> SplitUncertainty:
        """See :class:`Posterior`: H[y | x] = E H[y | x, z] + I(y; z | x).

        The expectation is over the prototypes z given the examples *and* the image x. It may be of
        class y with probability p(y | x), and is then one more member of it:

            E H[y | x, z] = Σ_y p(y | x) E[H | z_y ~ q(z_y | x), z_c ~ q(z_c) for the others c].

        The distances ‖x − z_c‖² that H depends on are drawn with the same noise for all images,
        which makes them matrix products; ``samples`` is L.
        """
        mean, variance = self.gaussian.mean, self.gaussian.variance  # [T, N, D]
        way = mean.shape[1]
        noise = normal(random, samples, *mean.shape[1:]).to(mean)  # [L, N, D]
        precision = (1 + variance).reciprocal()
        # x − z_c is N(x − m, v); if x is counted for c, it is N((x − m)/(1 + v), v/(1 + v)).
        without = _squared_distances(queries, mean, torch.ones_like(mean), variance, noise)
        counted = _squared_distances(queries, mean, precision, variance * precision, noise)
        own = torch.eye(way, dtype=torch.bool, device=mean.device)  # the y that x is counted for
        distances = torch.where(own, counted.unsqueeze(3), without.unsqueeze(3))  # [T, B, L, y, N]
        answers = (-0.5 * distances).softmax(-1)
        probabilities = self.scores(queries).softmax(-1)  # [T, B, N]
        weights = probabilities.unsqueeze(2)  # [T, B, 1, y]
        total = entropy(probabilities)
        aleatoric = torch.minimum((entropy(answers) * weights).sum(-1).mean(-1), total)
        first, second = (
            (power * weights.unsqueeze(-1)).sum(3).mean(2) for power in (answers, answers.square())
        )
        std = (second - first.square()).clamp_min(0).sqrt()
        return SplitUncertainty(std, total, aleatoric, total - aleatoric)

    def memory_strength(self, shots: Tensor) -> Tensor:
        """See :class:`Posterior`.

        The memory counts for κ_d = 1/e_d images in direction d; this is the κ of the mean share
        κ_d / (κ_d + K).
        """
        share = (1 / (1 + shots * self.reader.ratios.cpu())).mean(-1, keepdim=True)
        return (shots * share / (1 - share)).squeeze(-1)

    @property
    def displacement(self) -> tuple[Tensor, Tensor] | None:
        """See :class:`Posterior`."""
        if not len(self.reader.slots):
            return None
        return self.gaussian.mean - self.support_mean, self.support_mean


def gaussian_scores(squares: Tensor, determinants: Tensor, noise: float, width: int) -> Tensor:
    """Return a·log N(h; m, a(I + v)), but for a constant, from squared distances to the mean m.

    W is shrunk and scaled until probabilities are calibrated for equally many examples. It is then
    wider than the covariance within classes, which is a·W on average. That scales squares, but not
    determinants, which matter where K differs: without a correction, the class with most examples
    would always win. Hence the density under a·W, to the power a.

    Args:
        squares: of distances in units of I + v ``[...]``.
        determinants: log |I + v| ``[...]``.
        noise: a.
        width: D.
    """
    return -0.5 * (squares + (noise * determinants + width * LOG_TWO_PI))


def split_uncertainty(log_probabilities: Tensor) -> SplitUncertainty:
    """Split the uncertainty of the mean of L answers.

    H[E p] = E H[p] + I(answer; prototypes), with the expectation over the L samples.

    Args:
        log_probabilities: ``[T, B, N, L]``, none of them infinite.
    """
    probabilities, samples = log_probabilities.exp(), log_probabilities.shape[-1]
    mean = probabilities.mean(-1)
    aleatoric = -(probabilities * log_probabilities).sum((-1, -2)) / samples
    norms: Tensor = torch.linalg.vector_norm(probabilities.sub_(mean.unsqueeze(-1)), dim=-1)
    total, std = entropy(mean), norms / math.sqrt(samples)
    return SplitUncertainty(std, total, aleatoric, (total - aleatoric).clamp_min(0))


def _squared_distances(
    queries: Tensor, mean: Tensor, scale: Tensor, variance: Tensor, noise: Tensor
) -> Tensor:
    """|scale·(x − m) − √v·ξ|² by matrix products: ``[T, B, L, N]``.

    ``queries`` are ``[T, B, D]``, the others ``[T, N, D]``, the noise ξ ``[L, N, D]``.
    """
    drawn = variance.sqrt().unsqueeze(1) * noise  # [T, L, N, D]
    apart = (queries.unsqueeze(2) - mean.unsqueeze(1)) * scale.unsqueeze(1)  # [T, B, N, D]
    products = torch.einsum("tbnd,tlnd->tbln", apart, drawn)
    return apart.square().sum(-1).unsqueeze(2) - 2 * products + drawn.square().sum(-1).unsqueeze(1)
