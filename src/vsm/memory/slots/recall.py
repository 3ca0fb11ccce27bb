"""Recall: the interface of all methods, and the deterministic recalls of the paper's Table 2.

:data:`vsm.memory.MEMORIES` maps a method to its recall.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vsm.memory.slots.addressing import Addressing, entropy
from vsm.memory.slots.consolidation import Consolidation, SlotConsolidation
from vsm.memory.state import SlotMemory, SupportSet
from vsm.nn.distributions import DiagonalGaussian
from vsm.nn.networks import LearnedVariance, Perceptron
from vsm.seeding import Randomness
from vsm.settings import RunSettings


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
    """Maps a support set and a memory to a recollection; changes nothing.

    Args:
        num_features: D.
        run: settings of the run.
    """

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
        """Recall for every class of a batch.

        Args:
            support: of every class.
            memory: of the kind that the method's consolidation makes; it may be empty. None for
                memories that are wiped between episodes.
            slot_mask: boolean ``[T, N, A]``, slots that may not be addressed, or None.
            num_samples: J.
            random: source of every draw.
        """

    def prior(self, support: SupportSet, memory: Any, slot_mask: Tensor | None) -> MemoryPrior:
        """Return one Gaussian for every class instead of samples, for conjugate inference.

        A memory that has none (mann) always goes with the network.
        """
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
        """Return λ ``[T, N, A]`` and the transformed M̄ ``[T, N, D]``."""
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
