"""What comes back from the memory: Eqs. 8-10 and the alternatives of the paper's Table 2.

Every recall fulfils the contract of :class:`Recall`. The look-up from a method to its recall is
:data:`vsm.memory.MEMORIES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.memory.addressing import Addressing, Keys, entropy
from vsm.memory.state import SlotMemory
from vsm.nn.networks import GaussianNetwork, LearnedVariance, Perceptron
from vsm.probability import DiagonalGaussian
from vsm.probability.mixture import SharedComponents, pairwise_log_prob, weighted_moments
from vsm.seeding import Randomness, categorical, uniform
from vsm.settings import MemorySettings, ModelSettings, ObjectiveSettings


class SupportSet(NamedTuple):
    """S, the labeled images that a batch's classes are told by.

    Attributes:
        features: ``[T, N, K, D]``; where classes differ in size, K is the largest, and smaller ones
            repeat their images.
        mean: h̄ ``[T, N, D]``, over the images of each class.
        shots: images of each class ``[T, N, 1]``; nothing where all have K.
    """

    features: Tensor
    mean: Tensor
    shots: Tensor | None = None

    @staticmethod
    def of(features: Tensor) -> "SupportSet":
        """Take the mean of ``features`` ``[T, N, K, D]``."""
        return SupportSet(features, features.mean(2))

    @staticmethod
    def of_classes(classes: Sequence[Tensor]) -> "SupportSet":
        """Make one task of classes of any sizes, each ``[K_n, D]`` with K_n ≥ 1."""
        sizes = [len(features) for features in classes]
        if len(set(sizes)) == 1:
            return SupportSet.of(torch.stack(list(classes)).unsqueeze(0))
        turns = torch.arange(max(sizes))
        repeated = torch.stack([features[turns % len(features)] for features in classes])
        means = torch.stack([features.mean(0) for features in classes])
        shots = means.new_tensor(sizes).view(1, -1, 1)
        return SupportSet(repeated.unsqueeze(0), means.unsqueeze(0), shots)

    @property
    def shot(self) -> int | Tensor:
        """K: one number, or ``[T, N, 1]`` where classes differ in it."""
        return self.features.shape[2] if self.shots is None else self.shots


class Recollection(NamedTuple):
    """What the memory offers each class of a batch.

    Attributes:
        samples: m ``[T, N, J, D]``; deterministic recalls give J = 1, and so does conjugate
            inference with the mean of m.
        weights: λ ``[T, N, A]``, all zero where nothing could be addressed; the weights w of a
            Kanerva machine, which may be negative, or the read weights of a short-term memory.
        divergence: KL of the latent memory, in nats ``[T, N]``; zero for deterministic recalls.
    """

    samples: Tensor
    weights: Tensor
    divergence: Tensor


class MemoryPrior(NamedTuple):
    """What the memory expects of each class's prototype: N(μ₀, τ²), in the space of the features.

    Attributes:
        gaussian: μ₀ and log τ² ``[T, N, D]``.
        weights: λ ``[T, N, A]``, as in a recollection.
        known: boolean ``[T, N]``, false where nothing could be addressed; the Gaussian then says
            nothing.
    """

    gaussian: DiagonalGaussian
    weights: Tensor
    known: Tensor


class Recall(nn.Module, ABC):
    """The contract: a support set and a memory in, a recollection out, nothing changed."""

    @abstractmethod
    def forward(
        self,
        support: SupportSet,
        memory: Any,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """Recall for every class of a batch.

        Args:
            support: of every class.
            memory: of the kind that the method's consolidation makes; it may be empty. Nothing for
                memories that are wiped between episodes.
            slot_mask: boolean ``[T, N, A]``, slots that may not be addressed, or nothing.
            num_samples: J.
            random: source of every draw.
        """

    def prior(self, support: SupportSet, memory: Any, slot_mask: Tensor | None) -> MemoryPrior:
        """Return one Gaussian for every class instead of samples, for conjugate inference.

        Args:
            support: of every class; it decides where to look.
            memory: as above.
            slot_mask: as above.

        A memory that has none (mann) always goes with the network.
        """
        raise NotImplementedError(f"{type(self).__name__} has no Gaussian prior")

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Return what is logged of a recollection, as means over its tasks ``[]``.

        Here, how sharply it was addressed.
        """
        return {"address_entropy": entropy(recollection.weights).mean()}


class SlotRecall(Recall):
    """What recalls from one slot a class have in common: Eq. 9 with a learnable scale."""

    def __init__(self, memory: MemorySettings) -> None:
        super().__init__()
        self.addressing = Addressing(memory)

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Add the learned scale."""
        return super().diagnostics(recollection) | {
            "address_scale": self.addressing.log_scale.exp()
        }


class RoteRecall(SlotRecall):
    """The addressed average M̄ = Σ λ_a M_a itself; the support mean where nothing is addressed.

    An average says nothing of how far a prototype may lie from it, so conjugate inference learns
    τ², one variance for each feature.
    """

    def __init__(self, num_features: int, memory: MemorySettings, model: ModelSettings) -> None:
        super().__init__(memory)
        self.spread: LearnedVariance | None = None
        if model.inference == "conjugate":
            self.spread = LearnedVariance(num_features, model.initial_log_variance)

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
        weights, average = self._average(support, memory, slot_mask)
        return Recollection(
            self.transform(average).unsqueeze(-2), weights, average.new_zeros(weights.shape[:2])
        )

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`Recall`: μ₀ is the recollection, τ² is learned."""
        assert self.spread is not None
        weights, average = self._average(support, memory, slot_mask)
        mean = self.transform(average)
        gaussian = DiagonalGaussian(mean, self.spread().expand_as(mean))
        return MemoryPrior(gaussian, weights, _addressed(weights))

    def _average(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return λ ``[T, N, A]`` and M̄ ``[T, N, D]``."""
        weights = self.addressing(support.mean, memory.content, slot_mask)
        recalled = weights @ memory.content
        return weights, torch.where(_addressed(weights).unsqueeze(-1), recalled, support.mean)

    def transform(self, average: Tensor) -> Tensor:
        """Return M̄ as it is."""
        return average


class TransformedRecall(RoteRecall):
    """A perceptron of the addressed average, T(M̄).

    For conjugate inference it is M̄ + T(M̄): a prior for the prototype must begin in the space of
    the features.
    """

    def __init__(self, num_features: int, memory: MemorySettings, model: ModelSettings) -> None:
        super().__init__(num_features, memory, model)
        self.transformation = Perceptron(num_features, model)

    def transform(self, average: Tensor) -> Tensor:
        """Return T(M̄), or M̄ + T(M̄)."""
        transformed: Tensor = self.transformation(average)
        return transformed if self.spread is None else average + transformed


class VariationalRecall(SlotRecall):
    """The latent memory m ~ Σ λ_a p_ψ(m | M_a) of Eqs. 8-10, drawn in one of three ways.

    ``soft`` draws from one Gaussian with the mixture's mean and variance, so λ learns through
    both. ``mixture`` is ancestral, a ~ Cat(λ) and then N(μ_a, σ_a²), literally Eq. 10: the choice
    of a passes no gradient to λ, which learns through the divergence alone (its bound, or the score
    function of its Monte Carlo estimate). ``gumbel`` relaxes the
    choice to weights w_j (Table 11) and draws from N(Σ w_j μ, Σ w_j σ²).

    Where nothing can be addressed, m is drawn from p_ψ(m | h̄) and the divergence is zero.
    """

    def __init__(
        self,
        num_features: int,
        memory: MemorySettings,
        model: ModelSettings,
        objective: ObjectiveSettings,
    ) -> None:
        super().__init__(memory)
        self.network = GaussianNetwork(num_features, model)  # ψ, shared by prior and posterior
        self.kind = memory.recall
        self.soft_variance = memory.soft_variance
        self.gumbel_temperature = memory.gumbel_temperature
        self.kl = objective.kl
        self._kept: tuple[list[Tensor], list[int], Keys, SharedComponents] | None = None

    @torch.no_grad()
    def keep(self, memory: SlotMemory) -> None:
        """Prepare this memory's prior once, for a model that will never be trained again.

        What is kept serves this very memory with these very weights alone, and only where no
        gradient is asked for.
        """
        prepared = self._prepared(memory.content)
        made_of = [memory.content, *self.parameters()]
        self._kept = made_of, [one._version for one in made_of], *prepared

    def _prepared(self, content: Tensor) -> tuple[Keys, SharedComponents]:
        """Return the keys of all slots ``[A, D]`` and p_ψ(m | M_a), as kept or computed anew."""
        kept = self._kept  # another thread may put something else there
        if kept is not None and not torch.is_grad_enabled():
            made_of, versions, keys, shared = kept
            now = [content, *self.parameters()]
            unchanged = all(one is other for one, other in zip(made_of, now, strict=True))
            if unchanged and versions == [one._version for one in now]:  # none was written to
                return keys, shared
        return self.addressing.keys(content), SharedComponents.of(self.network(content))

    def forward(
        self,
        support: SupportSet,
        memory: SlotMemory,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`Recall`."""
        support_mean, content = support.mean, memory.content  # [T, N, D], [A, D]
        weights = self.addressing(support_mean, content, slot_mask)  # [T, N, A]
        slots: DiagonalGaussian = self.network(content)  # [A, D]
        prior: DiagonalGaussian = self.network(support_mean)  # [T, N, D]
        if self.kind == "soft":
            latent = self._soft(weights, SharedComponents.of(slots))
            latent = latent.where(_addressed(weights), prior)
            return Recollection(latent.sample(num_samples, random), weights, latent.kl(prior))
        if self.kind == "mixture" or self.kl == "monte_carlo":
            ancestral, chosen = self._ancestral(weights, slots, prior, num_samples, random)
        if self.kind == "mixture":
            samples = ancestral
        else:
            samples = self._relaxed(weights, slots, prior, num_samples, random)
        if self.kl == "bound":
            divergence = weighted_moments(weights, slots).bound_on_kl(prior)
        else:
            divergence = mixture_divergence(weights, slots, prior, ancestral, chosen)
        divergence = torch.where(_addressed(weights), divergence, torch.zeros_like(divergence))
        return Recollection(samples, weights, divergence)

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`Recall`: the mixture's mean and variance, however samples would be drawn."""
        keys, shared = self._prepared(memory.content)
        weights = self.addressing(support.mean, keys, slot_mask)
        return MemoryPrior(self._soft(weights, shared), weights, _addressed(weights))

    def _soft(self, weights: Tensor, slots: SharedComponents) -> DiagonalGaussian:
        """One Gaussian ``[T, N, D]``: mean Σλμ, variance Σλ(σ² + μ²) − (Σλμ)² or Σλσ²."""
        mean, within, between = slots.spread(weights)
        # Unaddressed rows have no variance; they are replaced by the prior, and their log must
        # not poison the gradient.
        variance = within.masked_fill(~_addressed(weights).unsqueeze(-1), 1.0)
        if self.soft_variance == "moment_matched":
            variance = variance + between
        return DiagonalGaussian(mean, variance.log())

    def _ancestral(
        self,
        weights: Tensor,
        slots: DiagonalGaussian,
        prior: DiagonalGaussian,
        num_samples: int,
        random: Randomness,
    ) -> tuple[Tensor, Tensor]:
        """m_j ~ N(μ_a, σ_a²) with a ~ Cat(λ): ``[T, N, J, D]``, and the slots a ``[T, N, J]``."""
        tasks, way, num_slots = weights.shape
        if num_slots == 0:
            nothing = torch.zeros(tasks, way, 0, dtype=torch.int64, device=weights.device)
            return prior.sample(num_samples, random), nothing
        addressed = _addressed(weights)
        chances = weights.detach().masked_fill(~addressed.unsqueeze(-1), 1.0)
        chosen = categorical(random, chances.flatten(0, 1), num_samples)
        shape = (tasks, way, num_samples, -1)
        drawn = DiagonalGaussian(
            slots.mean.index_select(0, chosen.flatten()).view(shape),
            slots.log_variance.index_select(0, chosen.flatten()).view(shape),
        ).where(addressed.unsqueeze(-1), prior.unsqueeze(-2))
        return drawn.sample(1, random).squeeze(-2), chosen.view(shape[:3])

    def _relaxed(
        self,
        weights: Tensor,
        slots: DiagonalGaussian,
        prior: DiagonalGaussian,
        num_samples: int,
        random: Randomness,
    ) -> Tensor:
        """m_j ~ N(Σ w_j μ, Σ w_j σ²) with Gumbel-softmax weights w_j: ``[T, N, J, D]``."""
        addressed = _addressed(weights)
        log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log().unsqueeze(-2)
        chances = uniform(random, *weights.shape[:2], num_samples, weights.shape[-1])
        gumbel = -torch.log(-torch.log(chances.clamp(1e-20, 1 - 1e-7))).to(weights)
        relaxed = F.softmax((log_weights + gumbel) / self.gumbel_temperature, -1)
        relaxed = relaxed * (weights > 0).unsqueeze(-2)  # hidden slots stay hidden: [T, N, J, A]
        variance = (relaxed @ slots.variance).masked_fill(~addressed[..., None, None], 1.0)
        drawn = DiagonalGaussian(relaxed @ slots.mean, variance.log())
        return (
            drawn.where(addressed.unsqueeze(-1), prior.unsqueeze(-2)).sample(1, random).squeeze(-2)
        )


def mixture_divergence(
    weights: Tensor,
    slots: DiagonalGaussian,
    prior: DiagonalGaussian,
    samples: Tensor,
    chosen: Tensor,
) -> Tensor:
    """Monte Carlo KL(Σ λ_a p_ψ(m | M_a) ‖ p_ψ(m | h̄)), unbiased in value and in gradient.

    Which slot a sample came from was drawn from λ, so differentiating the samples alone would tell
    λ nothing. The score function (log-ratio × ∇ log λ_a, less the mean of the other samples as a
    baseline) is added with value zero.

    Args:
        weights: λ ``[T, N, A]``.
        slots: ``[A, D]``.
        prior: ``[T, N, D]``.
        samples: ancestral samples ``[T, N, J, D]``.
        chosen: the slot each came from ``[T, N, J]``.

    Returns:
        ``[T, N]``.
    """
    if weights.shape[-1] == 0:
        return prior.mean.new_zeros(weights.shape[:2])
    log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    log_densities = pairwise_log_prob(samples, slots) + log_weights.unsqueeze(-2)  # [T, N, J, A]
    log_ratio = torch.logsumexp(log_densities, -1) - prior.unsqueeze(-2).log_prob(samples)
    count = log_ratio.shape[-1]
    value = log_ratio.detach()
    others = (value.sum(-1, keepdim=True) - value) / max(count - 1, 1)
    log_chosen = log_weights.gather(-1, chosen)  # [T, N, J]
    score = (value - others) * (log_chosen - log_chosen.detach())
    return (log_ratio + score).mean(-1)


def _addressed(weights: Tensor) -> Tensor:
    """Tell which rows of λ ``[T, N, A]`` address anything at all: boolean ``[T, N]``."""
    return weights.detach().sum(-1) > 0
