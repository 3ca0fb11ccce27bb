"""What comes back from the memory: the contract that every recall fulfills.

The look-up from a method to its recall is :data:`vsm.memory.MEMORIES`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from vsm.memory.slots.addressing import Addressing, Keys, entropy
from vsm.memory.state import Memory, SupportSet
from vsm.probability import DiagonalGaussian
from vsm.probability.mixture import SharedComponents
from vsm.seeding import Randomness
from vsm.settings import MemorySettings


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


@dataclass(frozen=True)
class PreparedMemory:
    """A memory whose prior was computed once, for a model that will never be trained again."""

    keys: Keys
    components: SharedComponents  # p_ψ(m | M_a) of every slot
    statistics = None  # slots have none


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

    def prepare(self, memory: Memory) -> PreparedMemory | None:
        """Compute once what :meth:`prior` needs of ``memory``; None where that saves nothing."""
        del memory
        return None

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Return what is logged, as means over the tasks ``[]``: how sharply it was addressed."""
        return {"address_entropy": entropy(recollection.weights).mean()}


class SlotRecall(Recall):
    """What recalls from one slot per class have in common: Eq. 9 with a learnable scale."""

    def __init__(self, memory: MemorySettings) -> None:
        super().__init__()
        self.addressing = Addressing(memory)

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Add the learned scale."""
        scale = self.addressing.log_scale.exp()
        return super().diagnostics(recollection) | {"address_scale": scale}


def addressed(weights: Tensor) -> Tensor:
    """Tell which rows of λ ``[T, N, A]`` address anything at all: boolean ``[T, N]``."""
    return weights.detach().sum(-1) > 0
