"""The latent memory of Eqs. 8-10."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.memory.slots.recall import MemoryPrior, Recollection, SlotRecall, addressed
from vsm.memory.state import SlotMemory, SupportSet
from vsm.nn.distributions import (
    DiagonalGaussian,
    mean_and_variances,
    pairwise_log_prob,
    weighted_moments,
)
from vsm.nn.networks import GaussianNetwork
from vsm.seeding import Randomness, categorical, uniform
from vsm.settings import RunSettings


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
        """See :class:`vsm.memory.slots.recall.Recall`."""
        support_mean, content = support.mean, memory.content  # [T, N, D], [A, D]
        weights = self.addressing(support_mean, content, slot_mask)  # [T, N, A]
        slots: DiagonalGaussian = self.network(content)  # [A, D]
        prior: DiagonalGaussian = self.network(support_mean)  # [T, N, D]
        if self.kind == "soft":
            latent = self._soft(weights, slots).where(addressed(weights), prior)
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
        divergence = torch.where(addressed(weights), divergence, torch.zeros_like(divergence))
        return Recollection(samples, weights, divergence)

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`vsm.memory.slots.recall.Recall`: the mixture's mean and variance."""
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
            no_slots = torch.zeros(tasks, way, 0, dtype=torch.int64, device=weights.device)
            return prior.sample(num_samples, random), no_slots
        known = addressed(weights)
        chances = weights.detach().masked_fill(~known.unsqueeze(-1), 1.0)
        chosen = categorical(random, chances.flatten(0, 1), num_samples)
        shape = (tasks, way, num_samples, -1)
        drawn = DiagonalGaussian(
            slots.mean.index_select(0, chosen.flatten()).view(shape),
            slots.log_variance.index_select(0, chosen.flatten()).view(shape),
        ).where(known.unsqueeze(-1), prior.unsqueeze(-2))
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
        known = addressed(weights)
        log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log().unsqueeze(-2)
        chances = uniform(random, *weights.shape[:2], num_samples, weights.shape[-1])
        gumbel = -torch.log(-torch.log(chances.clamp(1e-20, 1 - 1e-7))).to(weights)
        relaxed = F.softmax((log_weights + gumbel) / self.gumbel_temperature, -1)
        relaxed = relaxed * (weights > 0).unsqueeze(-2)  # masked slots stay masked: [T, N, J, A]
        variance = (relaxed @ slots.variance).masked_fill(~known[..., None, None], 1.0)
        drawn = DiagonalGaussian(relaxed @ slots.mean, variance.log())
        return drawn.where(known.unsqueeze(-1), prior.unsqueeze(-2)).sample(1, random).squeeze(-2)


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
    baseline) is added with value zero.

    Args:
        weights: λ ``[T, N, A]``.
        slots: ``[A, D]``.
        prior: ``[T, N, D]``.
        samples: ancestral samples ``[T, N, J, D]``.
        chosen: the slot each came from ``[T, N, J]``.
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
