"""Reading the Gaussian memory: prototypes from class statistics by Bayes' rule, in closed form.

    z ~ N(π, B)        prior of the prototype of a new class
    h | z ~ N(z, W)    members of a class

W is the shrunk covariance within the remembered classes, B that of their means, and π lies between
their grand mean and what the new class recalls. Coordinates in which W is the identity and B
diagonal make all of it per-feature; docs/design/gaussian-memory.md derives it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.memory.posterior import Posterior, QuadraticScores, SplitUncertainty
from vsm.memory.slots.recall import entropy, masked_softmax
from vsm.memory.state import SupportSet
from vsm.nn.distributions import LOG_TWO_PI, DiagonalGaussian, pairwise_squares
from vsm.seeding import Randomness, normal

PROTOTYPE_SAMPLES = 64
FLAT = 1e4
"""Variance between classes, in that within them, where no two classes are remembered."""


def unit(features: Tensor) -> Tensor:
    """Scale features ``[..., D]`` as ``F.normalize``, in half the time where there are few rows."""
    length: Tensor = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features / length.clamp_min(1e-12)


@dataclass(frozen=True)
class GaussianPosterior(Posterior):
    """Prototypes as Gaussians in the reader's coordinates, in which W is the identity."""

    gaussian: DiagonalGaussian  # [T, N, D]
    prior_mean: Tensor  # π [T, N, D]
    recalled: Tensor  # λ [T, N, A], which remembered classes were recalled
    support_mean: Tensor  # [T, N, D]
    reader: "GaussianReader"
    precision: Tensor | None = None  # 1/(1 + v) [D], if all classes have equally many examples
    log_shares: Tensor | None = None

    @property
    def prototypes(self) -> Tensor:  # type: ignore[override]
        """See :class:`.Posterior`."""
        return self.gaussian.mean.unsqueeze(-2)

    @property
    def mean(self) -> Tensor:
        """See :class:`.Posterior`."""
        return self.gaussian.mean

    @property
    def weights(self) -> Tensor:
        """See :class:`.Posterior`."""
        return self.recalled

    def log_probabilities(self, queries: Tensor) -> Tensor:
        """See :class:`.Posterior`: the log-softmax of :meth:`scores`, L = 1."""
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
        biases = ((offset - torch.lerp(mean, center, 0.5)) * directions).sum(-1)
        return directions, biases if self.log_shares is None else biases + self.log_shares

    def linear(self) -> tuple[Tensor, Tensor] | None:
        """See :class:`.Posterior`: with projected features y = A·h + a, W·(y − a) = (W·A)·h."""
        linear = self._linear(self.reader.offset)
        return None if linear is None else (linear[0][0] @ self.reader.rotation, linear[1][0])

    def scores(self, queries: Tensor) -> Tensor:
        """See :class:`.Posterior`: the density ∫ N(h; z, I) N(z; m, v) dz = N(h; m, I + v)."""
        determinants = self.gaussian.variance.log1p().sum(-1).unsqueeze(-2)
        scores = self.reader.tempered(self.squares(queries), determinants)
        return scores if self.log_shares is None else scores + self.log_shares.unsqueeze(1)

    def squares(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distances of ``queries [T, B, D]`` to each class: ``[T, B, N]``."""
        predictive = DiagonalGaussian(self.gaussian.mean, self.gaussian.variance.log1p())
        return pairwise_squares(queries, predictive)

    def rejection_scores(self, queries: Tensor, slots: Tensor | None) -> Tensor:
        """See :class:`.Posterior`: how much nearer to a class than to one never met."""
        del slots
        unknown = self.reader.marginal_squares(queries)  # [T, B]
        return 0.5 * (self.squares(queries) - unknown.unsqueeze(-1))

    def quadratic_scores(self, images: Tensor, slots: Tensor | None) -> QuadraticScores:
        """See :class:`.Posterior`."""
        del slots
        variance = self.gaussian.variance  # [T, N, D]
        known = variance if self.precision is None else variance[:, :1]
        scale = (1 + known).reciprocal()
        apart = scale - (1 + self.reader.ratios).reciprocal()
        constant = 0.5 * images.square() @ apart.mT  # [T, U, N], or one column for all classes
        return QuadraticScores(scale, constant, variance.reciprocal())

    def moved(self, mean: Tensor, log_shares: Tensor) -> Self:
        """See :class:`.Posterior`; variances stay those of the examples."""
        gaussian = DiagonalGaussian(mean, self.gaussian.log_variance)
        return replace(self, gaussian=gaussian, log_shares=log_shares)

    def uncertainty(
        self, queries: Tensor, random: Randomness, samples: int = PROTOTYPE_SAMPLES
    ) -> SplitUncertainty:
        """See :class:`.Posterior`: H[y | x] = E H[y | x, z] + I(y; z | x).

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
        shares = 0.0 if self.log_shares is None else self.log_shares[:, None, None, None]
        answers = (shares - 0.5 * distances).softmax(-1)
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
        """See :class:`.Posterior`.

        The memory counts for κ_d = 1/e_d images in direction d; this is the κ of the mean share
        κ_d / (κ_d + K).
        """
        share = (1 / (1 + shots * self.reader.ratios.cpu())).mean(-1, keepdim=True)
        return (shots * share / (1 - share)).squeeze(-1)

    @property
    def displacement(self) -> tuple[Tensor, Tensor] | None:
        """See :class:`.Posterior`."""
        if not len(self.reader.slots):
            return None
        return self.gaussian.mean - self.support_mean, self.support_mean


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


class ShotConstants(NamedTuple):
    """Constants for K examples of each class, by feature: ``[D]``, or ``[T, N, D]``."""

    gain: Tensor  # K·e/(K·e + 1), how far the mean lies from π towards that of the examples
    log_variance: Tensor  # log v of the posterior, v = e/(K·e + 1)
    precision: Tensor  # 1/(1 + v), that of the predictive density

    @staticmethod
    def of(ratios: Tensor, shot: int | Tensor) -> "ShotConstants":
        """Compute them of e ``[D]`` and K, a number or ``[T, N, 1]``."""
        evidence = shot * ratios
        total = evidence + 1
        return ShotConstants(evidence / total, (ratios / total).log(), total / (total + ratios))


class GaussianReader(NamedTuple):
    """Class statistics, ready to be read: y = A(h − g) has A W Aᵀ = I and A B Aᵀ = diag(e)."""

    rotation: Tensor  # A [D, D]; its rows are sorted by falling e
    offset: Tensor  # −A·g [D], with g the weighted mean of the class means
    ratios: Tensor  # e [D], the variance between classes in that within them, by direction
    slots: Tensor  # class means in these coordinates [A, D]
    cosine_scales: Tensor  # addressing scale over the length of each slot [A], for Eq. 9
    rho: float  # how far π lies towards what is recalled
    noise: float  # mean variance within the remembered classes in these coordinates
    constants: dict[int, ShotConstants]  # cache, by number of examples

    def to(self, device: torch.device) -> "GaussianReader":
        """Move to ``device``."""
        if self.slots.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor)
        }
        return self._replace(**moved, constants={})

    def project(self, features: Tensor) -> Tensor:
        """Map normalized features ``[..., D]`` to the coordinates in which they are read."""
        return F.linear(features, self.rotation, self.offset)

    def infer(self, support: SupportSet, slot_mask: Tensor | None = None) -> GaussianPosterior:
        """Infer prototypes from projected support by Bayes' rule, every feature by itself.

        With K members of mean h̄, z ~ N(π + e/(e + 1/K)·(h̄ − π), e/(K·e + 1)). ``slot_mask [T, N,
        A]`` is true for remembered classes that may not be recalled.
        """
        weights = self._address(support.mean, slot_mask)
        prior = self.rho * (weights @ self.slots)  # the grand mean is zero here
        constants = self._constants(support.shot)
        mean = torch.lerp(prior, support.mean, constants.gain)
        gaussian = DiagonalGaussian(mean, constants.log_variance.expand_as(mean))
        precision = constants.precision if support.shots is None else None
        return GaussianPosterior(gaussian, prior, weights, support.mean, self, precision)

    def _constants(self, shot: int | Tensor) -> ShotConstants:
        if isinstance(shot, Tensor):
            return ShotConstants.of(self.ratios, shot)
        if shot in self.constants:
            return self.constants[shot]
        with torch.inference_mode(False):  # training may use them too
            found = ShotConstants.of(self.ratios, shot)
        if type(found.gain) is Tensor:  # while an export traces, there are no numbers to keep
            self.constants[shot] = found
        return found

    def _address(self, support_mean: Tensor, slot_mask: Tensor | None) -> Tensor:
        """Eq. 9 with cosines in these coordinates, relative to the grand mean: ``[T, N, A]``."""
        logits = F.linear(unit(support_mean), self.slots) * self.cosine_scales
        if slot_mask is None:
            return logits.softmax(-1)
        return masked_softmax(logits.masked_fill(slot_mask, -torch.inf))

    def marginal_scores(self, queries: Tensor) -> Tensor:
        """Score ``queries [..., D]`` in a class never met, N(h; g, W + B)."""
        return self.tempered(self.marginal_squares(queries), self.ratios.log1p().sum())

    def marginal_squares(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distances of ``queries [..., D]`` to a class never met."""
        return (queries.square() / (1 + self.ratios)).sum(-1)

    def tempered(self, squares: Tensor, determinants: Tensor) -> Tensor:
        """Return a·log N(h; m, a(I + v)), but for a constant, with a the noise.

        W is shrunk and scaled until probabilities are calibrated for equally many examples. It is
        then wider than the covariance within classes, which is a·W on average. That scales
        ``squares``, distances to m in units of I + v, but not ``determinants``, log det(I + v),
        which matter where K differs: without a correction, the class with most examples would
        always win. Hence the density under a·W, to the power a.
        """
        constants = self.noise * determinants + len(self.ratios) * LOG_TWO_PI
        return -0.5 * (squares + constants)


class Decomposition(NamedTuple):
    """What all readings with one ε share: y = A(h − g) has A(S_w + ε·w̄·I)Aᵀ = I, w̄ = tr(S_w)/D."""

    grand_mean: Tensor  # g [D]
    rotation: Tensor  # A [D, D]; A S_b Aᵀ is diagonal
    ratios: Tensor  # that diagonal [D], falling
    share: float  # tr(S_b) / tr(S_w + ε·w̄·I)
    noise: float  # tr(A S_w Aᵀ) / D
    slots: Tensor  # class means in these coordinates [A, D]

    @staticmethod
    def of(means: Tensor, counts: Tensor, within: Tensor, epsilon: float) -> "Decomposition":
        """Decompose the means of A classes ``[A, D]`` and the covariance in them ``[D, D]``.

        Where there are fewer classes than features, it is a decomposition of their whitened means.
        ``counts [A]`` say of how many members each mean is.
        """
        width = means.shape[1]
        # What differs by rounding alone does not differ.
        rounding = (16 * torch.finfo(means.dtype).eps * means.norm()).square()
        within = within if within.trace() > rounding else torch.zeros_like(within)
        weights = _weights(means, counts, within)
        grand_mean = weights @ means
        apart = weights.sqrt().unsqueeze(-1) * (means - grand_mean)
        apart = apart if apart.square().sum() > rounding else torch.zeros_like(apart)
        between = apart.square().sum().item()  # tr S_b
        # Where members of classes do not differ at all, or none has two, w̄ is that between classes.
        mean_variance = within.trace().item() / width or between / width or 1.0
        identity = torch.eye(width, dtype=within.dtype)
        if math.isinf(epsilon):
            covariance = mean_variance * identity
        else:
            covariance = within + epsilon * mean_variance * identity
        factor = torch.linalg.cholesky(covariance)
        directions, ratios = _directions(factor, apart)
        rotation = directions.mT @ torch.linalg.solve_triangular(factor, identity, upper=False)
        share = between / covariance.trace().item()
        # A(S_w + δI)Aᵀ = I, so that tr(A S_w Aᵀ) = D − δ·tr(AAᵀ).
        added = (covariance - within).diagonal().mean().item()
        noise = max(0.0, 1 - added * rotation.square().sum().item() / width)
        if math.isinf(epsilon):
            noise = within.trace().item() / covariance.trace().item()
        slots = (means - grand_mean) @ rotation.mT
        return Decomposition(grand_mean, rotation, ratios, share, noise, slots)

    def reader(
        self, beta: float, rho: float, addressing_scale: float, noise_scale: float
    ) -> GaussianReader:
        """Read it with W = s(S_w + ε·w̄·I) and B = s·S_b + β·tr(S_b)/tr(S_w + ε·w̄·I)·W.

        B is shrunk towards a multiple of W and not of I, which is as good and lets one
        decomposition serve every β.
        """
        if self.share == 0:
            ratios = torch.full_like(self.ratios, FLAT)
        elif math.isinf(beta):
            ratios = torch.full_like(self.ratios, self.share)
        else:
            ratios = self.ratios + beta * self.share
        scale = math.sqrt(noise_scale)
        # Stored by column: few classes address and recall many slots faster than by row.
        slots = (self.slots / scale).float().mT.contiguous().mT
        return GaussianReader(
            (self.rotation / scale).float(),
            (self.rotation @ self.grand_mean / -scale).float(),
            ratios.float(),
            slots,
            addressing_scale / slots.norm(dim=-1).clamp_min(1e-12),
            rho,
            self.noise / noise_scale,
            {},
        )


def _weights(means: Tensor, counts: Tensor, within: Tensor) -> Tensor:
    """Return by how much each class counts in S_b and g, adding up to one ``[A]``.

    The mean of n members lies about g with the variance b̄ + w̄/n in place of b̄, so a class counts
    as n/(n + w̄/b̄): little with few images, and equally with many.
    """
    weights = counts / (counts + 1).double()
    for _ in range(2):  # b̄ depends on the weights, a little
        weights = weights / weights.sum()
        variances = (means - weights @ means).square().sum(-1)
        between = (weights @ (variances - within.trace() / counts)).clamp_min(0)
        weights = counts * between / (counts * between + within.trace())
        weights = torch.where(weights.sum() > 0, weights, torch.ones_like(weights))
    return weights / weights.sum() if len(weights) else weights


def _directions(factor: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalize the covariance of class means where W = LLᵀ, of ``factor`` L, is the identity.

    ``apart [A, D]`` are class means less their mean, times the root of their weight. Returns
    orthonormal columns ``[D, D]``, and the variances of the means along them ``[D]``, falling.
    """
    count, width = apart.shape
    ratios = apart.new_zeros(width)
    if count == 0:
        return torch.eye(width, dtype=apart.dtype), ratios
    whitened = torch.linalg.solve_triangular(factor, apart.mT, upper=False)
    if count >= width:
        values, vectors = torch.linalg.eigh(whitened @ whitened.mT)
        return vectors.flip(-1), values.flip(-1).clamp_min(0)
    vectors, values, _ = torch.linalg.svd(whitened, full_matrices=False)  # [D, A], [A]
    ratios[:count] = values.square()
    return torch.linalg.qr(vectors, mode="complete").Q, ratios  # begins with the vectors, or −1 ×
