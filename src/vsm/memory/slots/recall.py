"""Reading slots: addressing (Eq. 9), recall (Eqs. 8 and 10), and prototypes by Bayes' rule.

:data:`vsm.memory.MEMORIES` maps a method to its recall.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.memory.slots.consolidation import Consolidation, SlotConsolidation
from vsm.memory.state import SlotMemory, SupportSet
from vsm.nn.distributions import (
    DiagonalGaussian,
    mean_and_variances,
    pairwise_log_prob,
    weighted_moments,
)
from vsm.nn.layers import GaussianNetwork, LearnedVariance, Perceptron
from vsm.seeding import Randomness, categorical, uniform
from vsm.settings import MemorySettings, ModelSettings, RunSettings

EPSILON = 1e-6  # no length is taken to be less
DEFAULT_SCALE = {"cosine": 30.0, "dot": 1.0}


class Recollection(NamedTuple):
    """What the memory offers each class of a batch.

    Deterministic recalls give J = 1 and no divergence, and so does conjugate inference, with the
    mean of m. The weights of a Kanerva machine may be negative.
    """

    samples: Tensor  # m [T, N, J, D]
    weights: Tensor  # λ [T, N, A], all zero where nothing could be addressed
    divergence: Tensor  # KL of the latent memory, in nats [T, N]


class MemoryPrior(NamedTuple):
    """What the memory expects of each class's prototype: N(μ₀, τ²), in the space of features."""

    gaussian: DiagonalGaussian  # μ₀ and log τ² [T, N, D]; without meaning where not known
    weights: Tensor  # λ [T, N, A], as in a recollection
    known: Tensor  # boolean [T, N], false where nothing could be addressed


class Addressing(nn.Module):
    """λ_a = softmax_a(scale · g(M_a, S)), with g the cosine or the dot product.

    Raw dot products of many post-ReLU features saturate to one-hot, and cosines alone are almost
    uniform; hence the cosine with a learnable scale that starts sharp. Post-ReLU features also
    share a large common part, which makes every cosine close to one: by default they are compared
    relative to the mean of all slots that are not masked, so that a masked slot has no influence.

    Two controls measure what addressing is worth: equal weights for all slots, and equally sharp
    weights that belong to other slots (half the memory further on).
    """

    def __init__(self, settings: MemorySettings) -> None:
        super().__init__()
        self.similarity = settings.addressing
        self.center = settings.center_addressing
        self.control = settings.control
        scale = settings.addressing_scale or DEFAULT_SCALE[settings.addressing]
        self.log_scale = nn.Parameter(
            torch.tensor(math.log(scale)), requires_grad=settings.learn_addressing_scale
        )

    def forward(self, support_mean: Tensor, content: Tensor, slot_mask: Tensor | None) -> Tensor:
        """Eq. 9: return λ ``[T, N, A]``, zero where all slots are masked.

        Means are ``[T, N, D]``, M is ``[A, D]``; ``slot_mask [T, N, A]`` is true for masked slots.
        """
        num_slots = content.shape[0]
        is_centered = self.center and num_slots > 0
        if is_centered:
            center = content.mean(0)
            support_mean, content = support_mean - center, content - center
        if is_centered and slot_mask is not None:
            similarity = self._about_visible(support_mean, content, ~slot_mask)
        elif self.similarity == "cosine":
            similarity = F.normalize(support_mean, dim=-1) @ F.normalize(content, dim=-1).mT
        else:
            similarity = support_mean @ content.mT
        logits = self.log_scale.exp() * similarity
        if self.control == "uniform":
            logits = torch.zeros_like(logits)
        elif self.control == "permuted":
            logits = logits.roll(num_slots // 2, -1)
        if slot_mask is not None:
            logits = logits.masked_fill(slot_mask, -torch.inf)
        return masked_softmax(logits)

    def _about_visible(self, support: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Compare relative to the mean of each class's visible slots: ``[T, N, A]``.

        Products are expanded, since a center for each class would make slots ``[T, N, A, D]``. As
        ``support [T, N, D]`` and ``slots [A, D]`` are relative to the mean of all, nothing cancels.
        """
        counts = visible.sum(-1, keepdim=True).clamp_min(1)
        center = visible.to(slots) @ slots / counts  # [T, N, D]
        support = support - center
        dot: Tensor = support @ slots.mT - (support * center).sum(-1, keepdim=True)
        if self.similarity == "dot":
            return dot
        squares = slots.square().sum(-1) - 2 * (center @ slots.mT)
        squares = squares + center.square().sum(-1, keepdim=True)  # |M_a - center|² [T, N, A]
        lengths = squares.clamp_min(EPSILON**2).sqrt()
        cosine: Tensor = dot / (lengths * support.norm(dim=-1, keepdim=True).clamp_min(EPSILON))
        return cosine


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; rows of −∞ only become zeros, with finite gradients."""
    all_masked = torch.isneginf(logits).all(-1, keepdim=True)
    return logits.masked_fill(all_masked, 0.0).softmax(-1).masked_fill(all_masked, 0.0)


def entropy(weights: Tensor) -> Tensor:
    """Return −Σ λ log λ in nats over the last axis: ``[...]``."""
    total: Tensor = torch.special.entr(weights).sum(-1)
    return total


class Recall(nn.Module, ABC):
    """Maps a support set and a memory to a recollection; changes nothing."""

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__()
        self.num_features = num_features
        self.run = run

    @abstractmethod
    def forward(
        self,
        support: SupportSet,
        memory: Any,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """Recall for every class of a batch; ``num_samples`` is J.

        The memory is what :meth:`consolidation` writes; None for one cleared between episodes.
        ``slot_mask [T, N, A]`` is true for slots that may not be addressed.
        """

    def prior(self, support: SupportSet, memory: Any, slot_mask: Tensor | None) -> MemoryPrior:
        """Return one Gaussian for every class instead of samples, for conjugate inference."""
        raise NotImplementedError(f"{type(self).__name__} has no Gaussian prior")

    def consolidation(self) -> Consolidation | None:
        """Build what writes this memory; None for one that is cleared between episodes."""
        return None

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Return values to log, as means over the tasks ``[]``: the entropy of λ."""
        return {"address_entropy": entropy(recollection.weights).mean()}


class SlotRecall(Recall):
    """What recalls from one slot per class have in common: Eq. 9 with a learnable scale."""

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.addressing = Addressing(run.memory)

    def consolidation(self) -> SlotConsolidation:
        """Build Eqs. 11-13."""
        return SlotConsolidation(self.num_features, self.run.memory)

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Add the learned scale."""
        scale = self.addressing.log_scale.exp()
        return super().diagnostics(recollection) | {"address_scale": scale}


def addressed(weights: Tensor) -> Tensor:
    """Which rows of λ ``[T, N, A]`` address any slot: boolean ``[T, N]``."""
    return weights.detach().sum(-1) > 0


class RoteRecall(SlotRecall):
    """The addressed average M̄ = Σ λ_a M_a itself; the support mean where nothing is addressed.

    An average does not say how far a prototype may lie from it, so conjugate inference learns τ²,
    one variance for each feature.
    """

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.variance: LearnedVariance | None = None
        if run.model.inference == "conjugate":
            self.variance = LearnedVariance(num_features, run.model.initial_log_variance)

    def forward(
        self,
        support: SupportSet,
        memory: SlotMemory,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`Recall`; there is one value and nothing to draw."""
        del num_samples, random
        weights, recalled = self._recalled(support, memory, slot_mask)
        divergence = recalled.new_zeros(weights.shape[:2])
        return Recollection(recalled.unsqueeze(-2), weights, divergence)

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`Recall`: μ₀ is the recollection, τ² is learned."""
        assert self.variance is not None
        weights, mean = self._recalled(support, memory, slot_mask)
        gaussian = DiagonalGaussian(mean, self.variance().expand_as(mean))
        return MemoryPrior(gaussian, weights, addressed(weights))

    def _recalled(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights = self.addressing(support.mean, memory.content, slot_mask)
        known = addressed(weights).unsqueeze(-1)
        average = torch.where(known, weights @ memory.content, support.mean)
        return weights, self.transform(average)

    def transform(self, average: Tensor) -> Tensor:
        """Return M̄."""
        return average


class TransformedRecall(RoteRecall):
    """A perceptron of the addressed average, T(M̄).

    For conjugate inference it is M̄ + T(M̄): a prior for the prototype must begin in the space of
    the features.
    """

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.transformation = Perceptron(num_features, run.model)

    def transform(self, average: Tensor) -> Tensor:
        """Return T(M̄), or M̄ + T(M̄)."""
        transformed: Tensor = self.transformation(average)
        return transformed if self.variance is None else average + transformed


class VariationalRecall(SlotRecall):
    """The latent memory m ~ Σ λ_a p_ψ(m | M_a) of Eqs. 8-10, drawn in one of three ways.

    ``soft`` draws from one Gaussian with the mixture's mean and variance, so λ learns through
    both. ``mixture`` is ancestral, a ~ Cat(λ) and then N(μ_a, σ_a²), literally Eq. 10: the choice
    of a passes no gradient to λ, which learns through the divergence alone (its bound, or the score
    function of its Monte Carlo estimate). ``gumbel`` relaxes the choice to weights w_j (Table 11)
    and draws from N(Σ w_j μ, Σ w_j σ²).

    Where nothing can be addressed, m is drawn from p_ψ(m | h̄) and the divergence is zero.
    """

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.network = GaussianNetwork(num_features, run.model)  # ψ, shared by prior and posterior
        self.kind = run.memory.recall
        self.gumbel_temperature = run.memory.gumbel_temperature
        self.kl = run.objective.kl

    def forward(
        self,
        support: SupportSet,
        memory: SlotMemory,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`Recall`."""
        weights = self.addressing(support.mean, memory.content, slot_mask)  # [T, N, A]
        slots: DiagonalGaussian = self.network(memory.content)  # [A, D]
        prior: DiagonalGaussian = self.network(support.mean)  # [T, N, D]
        if self.kind == "soft":
            latent = self._soft(weights, slots).where(addressed(weights), prior)
            return Recollection(latent.sample(num_samples, random), weights, latent.kl(prior))

        def sample(drawn: DiagonalGaussian) -> Tensor:
            """Draw one of each ``[T, N, J, D]``, or of the prior where nothing is addressed."""
            known = addressed(weights).unsqueeze(-1)
            return drawn.where(known, prior.unsqueeze(-2)).sample(1, random).squeeze(-2)

        if self.kind == "mixture" or self.kl == "monte_carlo":
            drawn, chosen = self._ancestral(weights, slots, num_samples, random)
            ancestral = sample(drawn) if len(memory) else prior.sample(num_samples, random)
        if self.kind == "mixture":
            samples = ancestral
        else:
            samples = sample(self._relaxed(weights, slots, num_samples, random))
        if self.kl == "bound":
            divergence = weighted_moments(weights, slots).bound_on_kl(prior)
        else:
            divergence = mixture_divergence(weights, slots, prior, ancestral, chosen)
        divergence = torch.where(addressed(weights), divergence, torch.zeros_like(divergence))
        return Recollection(samples, weights, divergence)

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`Recall`: the mixture's mean and variance."""
        weights = self.addressing(support.mean, memory.content, slot_mask)
        gaussian = self._soft(weights, self.network(memory.content))
        return MemoryPrior(gaussian, weights, addressed(weights))

    def _soft(self, weights: Tensor, slots: DiagonalGaussian) -> DiagonalGaussian:
        """One Gaussian ``[T, N, D]``: mean Σλμ, variance Σλ(σ² + μ²) − (Σλμ)²."""
        mean, within, between = mean_and_variances(weights, slots)
        # Unaddressed rows have no variance; they are replaced by the prior, and their log must
        # not poison the gradient.
        variance = within.masked_fill(~addressed(weights).unsqueeze(-1), 1.0)
        return DiagonalGaussian(mean, (variance + between).log())

    def _ancestral(
        self, weights: Tensor, slots: DiagonalGaussian, num_samples: int, random: Randomness
    ) -> tuple[DiagonalGaussian, Tensor]:
        """N(μ_a, σ_a²) of J slots a ~ Cat(λ): ``[T, N, J, D]``, and the slots ``[T, N, J]``."""
        shape = (*weights.shape[:2], num_samples)
        if weights.shape[-1] == 0:
            nothing = slots.mean.new_zeros(*shape, slots.mean.shape[-1])
            return DiagonalGaussian(nothing, nothing), torch.zeros(shape, dtype=torch.int64)
        chances = weights.detach().masked_fill(~addressed(weights).unsqueeze(-1), 1.0)
        chosen = categorical(random, chances.flatten(0, 1), num_samples)
        parts = (slots.mean, slots.log_variance)
        drawn = (part.index_select(0, chosen.flatten()).view(*shape, -1) for part in parts)
        return DiagonalGaussian(*drawn), chosen.view(shape)

    def _relaxed(
        self, weights: Tensor, slots: DiagonalGaussian, num_samples: int, random: Randomness
    ) -> DiagonalGaussian:
        """N(Σ w_j μ, Σ w_j σ²) with J Gumbel-softmax weights w_j: ``[T, N, J, D]``."""
        known = addressed(weights)
        log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log().unsqueeze(-2)
        chances = uniform(random, *weights.shape[:2], num_samples, weights.shape[-1])
        gumbel = -torch.log(-torch.log(chances.clamp(1e-20, 1 - 1e-7))).to(weights)
        relaxed = F.softmax((log_weights + gumbel) / self.gumbel_temperature, -1)
        relaxed = relaxed * (weights > 0).unsqueeze(-2)  # masked slots stay masked: [T, N, J, A]
        variance = (relaxed @ slots.variance).masked_fill(~known[..., None, None], 1.0)
        return DiagonalGaussian(relaxed @ slots.mean, variance.log())


def mixture_divergence(
    weights: Tensor,
    slots: DiagonalGaussian,
    prior: DiagonalGaussian,
    samples: Tensor,
    chosen: Tensor,
) -> Tensor:
    """Monte Carlo KL(Σ λ_a p_ψ(m | M_a) ‖ p_ψ(m | h̄)) ``[T, N]``, unbiased, as its gradient is.

    Which slot a sample came from was drawn from λ, so differentiating the samples alone would tell
    λ nothing. The score function (log-ratio × ∇ log λ_a, less the mean of the other samples as a
    baseline) is added with value zero. ``samples [T, N, J, D]`` are of slots ``chosen [T, N, J]``.
    """
    if weights.shape[-1] == 0:
        return prior.mean.new_zeros(weights.shape[:2])
    log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    log_densities = pairwise_log_prob(samples, slots) + log_weights.unsqueeze(-2)  # [T, N, J, A]
    log_ratio = torch.logsumexp(log_densities, -1) - prior.unsqueeze(-2).log_prob(samples)
    value = log_ratio.detach()
    others = (value.sum(-1, keepdim=True) - value) / max(value.shape[-1] - 1, 1)
    log_chosen = log_weights.gather(-1, chosen)  # [T, N, J]
    score = (value - others) * (log_chosen - log_chosen.detach())
    return (log_ratio + score).mean(-1)


class ConjugateInference(nn.Module):
    """q(z | M, S) in closed form, for every feature by itself.

    With z ~ N(μ₀, τ²) from the memory and h_k | z ~ N(z, s²) for the K support images,

        z | h ~ N((κ·μ₀ + K·h̄) / (κ + K), s² / (κ + K)),    κ = s² / τ²,

    so the memory counts as κ support images. Without memory κ = 0. s² is one learned variance per
    feature. ``memory.strength`` sets κ instead of learning it: on the classes that the backbone was
    trained on, a learned κ comes out too small.
    """

    def __init__(self, num_features: int, model: ModelSettings, memory: MemorySettings) -> None:
        super().__init__()
        self.noise = LearnedVariance(num_features, model.initial_log_variance)  # s²
        self.strength = memory.strength

    def forward(self, support: SupportSet, prior: MemoryPrior | None) -> DiagonalGaussian:
        """Return the posterior of each prototype ``[T, N, D]``; no memory, no prior."""
        mean, shot, log_noise = support.mean, support.shot, self.noise()
        if prior is None:
            kappa = torch.zeros_like(mean)
        else:
            kappa = self.kappa(prior)
            mean = torch.lerp(mean, prior.gaussian.mean, kappa / (kappa + shot))
        return DiagonalGaussian(mean, log_noise - (kappa + shot).log())

    def kappa(self, prior: MemoryPrior) -> Tensor:
        """Return κ, the support images that the memory counts for ``[T, N, D]``."""
        if self.strength is None:
            kappa = (self.noise() - prior.gaussian.log_variance).exp()
        else:
            kappa = torch.full_like(prior.gaussian.mean, self.strength)
        counted: Tensor = kappa.masked_fill(~prior.known.unsqueeze(-1), 0.0)
        return counted
