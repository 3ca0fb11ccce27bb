"""Deterministic recalls of the paper's Table 2: the addressed average, plain or transformed."""

import torch
from torch import Tensor

from vsm.memory.slots.recall import MemoryPrior, Recollection, SlotRecall, addressed
from vsm.memory.state import SlotMemory, SupportSet
from vsm.nn.networks import LearnedVariance, Perceptron
from vsm.probability import DiagonalGaussian
from vsm.seeding import Randomness
from vsm.settings import MemorySettings, ModelSettings


class RoteRecall(SlotRecall):
    """The addressed average M̄ = Σ λ_a M_a itself; the support mean where nothing is addressed.

    An average says nothing of how far a prototype may lie from it, so conjugate inference learns
    τ², one variance for each feature.
    """

    def __init__(self, num_features: int, memory: MemorySettings, model: ModelSettings) -> None:
        super().__init__(memory)
        self.variance: LearnedVariance | None = None
        if model.inference == "conjugate":
            self.variance = LearnedVariance(num_features, model.initial_log_variance)

    def forward(
        self,
        support: SupportSet,
        memory: SlotMemory,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`vsm.memory.slots.recall.Recall`; there is one value and nothing to draw."""
        del num_samples, random
        weights, average = self._average(support, memory, slot_mask)
        samples = self.transform(average).unsqueeze(-2)
        return Recollection(samples, weights, average.new_zeros(weights.shape[:2]))

    def prior(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`vsm.memory.slots.recall.Recall`: μ₀ is the recollection, τ² is learned."""
        assert self.variance is not None
        weights, average = self._average(support, memory, slot_mask)
        mean = self.transform(average)
        gaussian = DiagonalGaussian(mean, self.variance().expand_as(mean))
        return MemoryPrior(gaussian, weights, addressed(weights))

    def _average(
        self, support: SupportSet, memory: SlotMemory, slot_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return λ ``[T, N, A]`` and M̄ ``[T, N, D]``."""
        weights = self.addressing(support.mean, memory.content, slot_mask)
        recalled = weights @ memory.content
        return weights, torch.where(addressed(weights).unsqueeze(-1), recalled, support.mean)

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
        return transformed if self.variance is None else average + transformed
