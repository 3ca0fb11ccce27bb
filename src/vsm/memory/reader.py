"""Reading the Gaussian memory: prototypes from class statistics by Bayes' rule, in closed form.

    z ~ N(π, B)        prior of the prototype of a new class
    h | z ~ N(z, W)    members of a class

W is the shrunk covariance within the remembered classes, B that of their means, and π lies between
their grand mean and what the new class recalls. Coordinates in which W is the identity and B
diagonal make all of it per-feature; docs/design/gaussian-memory.md derives it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.memory.posterior import GaussianPosterior, gaussian_scores
from vsm.memory.slots.addressing import masked_softmax
from vsm.memory.state import SupportSet
from vsm.nn.distributions import DiagonalGaussian

FLAT = 1e4
"""Variance between classes, in that within them, where no two classes are remembered."""


def unit(features: Tensor) -> Tensor:
    """Scale features ``[..., D]`` to length one; zeros stay zero.

    As ``F.normalize``, in half the time where there are few rows.
    """
    length: Tensor = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features / length.clamp_min(1e-12)


class ShotConstants(NamedTuple):
    """Constants for K examples of each class, by feature: ``[D]``, or ``[T, N, D]``.

    Attributes:
        gain: K·e/(K·e + 1), how far the posterior's mean lies from π towards that of the examples.
        log_variance: log v of the posterior, v = e/(K·e + 1).
        precision: 1/(1 + v), that of the predictive density.
    """

    gain: Tensor
    log_variance: Tensor
    precision: Tensor

    @staticmethod
    def of(ratios: Tensor, shot: int | Tensor) -> "ShotConstants":
        """Compute them of e ``[D]`` and K, a number or ``[T, N, 1]``."""
        evidence = shot * ratios
        total = evidence + 1
        return ShotConstants(evidence / total, (ratios / total).log(), total / (total + ratios))


class GaussianReader(NamedTuple):
    """Class statistics, ready to be read: y = A(h − g) has A W Aᵀ = I and A B Aᵀ = diag(e).

    Attributes:
        rotation: A ``[D, D]``; its rows are sorted by falling e.
        offset: −A·g ``[D]``, with g the weighted mean of the class means.
        ratios: e ``[D]``, the variance between classes in that within them, by direction.
        slots: class means in these coordinates ``[A, D]``.
        cosine_scales: factors on inner products with slots of length one ``[A]``: the addressing
            scale over the length of each slot, which makes the logits of Eq. 9.
        rho: how far π lies towards what is recalled.
        noise: mean variance within the remembered classes in these coordinates.
        constants: cache, by number of examples.
    """

    rotation: Tensor
    offset: Tensor
    ratios: Tensor
    slots: Tensor
    cosine_scales: Tensor
    rho: float
    noise: float
    constants: dict[int, ShotConstants]

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
        """Infer prototypes from projected support by Bayes' rule.

        With K members of mean h̄, every feature by itself: z ~ N(π + e/(e + 1/K)·(h̄ − π),
        e/(K·e + 1)).

        Args:
            support: projected.
            slot_mask: boolean ``[T, N, A]``, remembered classes that may not be recalled.
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
        """Score ``queries [..., D]`` in a class never met, N(h; g, W + B).

        Tempered as ``GaussianPosterior.scores``.
        """
        squares, determinant = self.marginal_squares(queries), self.ratios.log1p().sum()
        return gaussian_scores(squares, determinant, self.noise, queries.shape[-1])

    def marginal_squares(self, queries: Tensor) -> Tensor:
        """Squared Mahalanobis distances of ``queries [..., D]`` to a class never met."""
        return (queries.square() / (1 + self.ratios)).sum(-1)


class Decomposition(NamedTuple):
    """What all readings with one ε share: y = A(h − g) has A(S_w + ε·w̄·I)Aᵀ = I, w̄ = tr(S_w)/D.

    Attributes:
        grand_mean: g ``[D]``.
        rotation: A ``[D, D]``; A S_b Aᵀ is diagonal.
        ratios: that diagonal ``[D]``, falling.
        share: tr(S_b) / tr(S_w + ε·w̄·I).
        noise: tr(A S_w Aᵀ) / D.
        slots: class means in these coordinates ``[A, D]``.
    """

    grand_mean: Tensor
    rotation: Tensor
    ratios: Tensor
    share: float
    noise: float
    slots: Tensor

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
        covariance = _shrunk(within, epsilon, between)
        factor = torch.linalg.cholesky(covariance)
        directions, ratios = _directions(factor, apart)
        identity = torch.eye(width, dtype=factor.dtype)
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


def _shrunk(within: Tensor, epsilon: float, between: float) -> Tensor:
    """Return S_w + ε·w̄·I, or w̄·I for infinite ε: ``[D, D]``.

    Where members of classes do not differ at all, or none has two, w̄ is that between classes.
    """
    width = len(within)
    identity = torch.eye(width, dtype=within.dtype)
    mean_variance = within.trace().item() / width or between / width or 1.0
    if math.isinf(epsilon):
        return mean_variance * identity
    return within + epsilon * mean_variance * identity


def _directions(factor: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonalize the covariance of class means where W = LLᵀ is the identity.

    Args:
        factor: L ``[D, D]``.
        apart: class means less their mean, times the root of their weight ``[A, D]``.

    Returns:
        Orthonormal columns ``[D, D]``, and the variances of the means along them ``[D]``, falling.
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
