"""A Kanerva machine: one Gaussian memory that all classes share, written by Bayes' rule.

Y. Wu, G. Wayne, A. Graves, T. Lillicrap, "The Kanerva Machine: A Generative Distributed Memory",
ICLR 2018. The memory M ``[S, D]`` is a random matrix with mean R, row covariance U and independent
columns. An observation z is w·M plus noise σ², where the weights w compare its key with S learnable
addresses. So writing is Bayesian linear regression of observations on weights, in closed form, and
reading is its predictive distribution N(w·R, w·U·wᵀ + σ²).

Differences from the original, which generates images and forgets them after an episode:

* Features are written (of every image of the last step) and read (at a class's support mean). The
  reading is q(m | M, S), with the KL to the prior p_ψ(m | h̄) of Eq. 14.
* The address of a feature is a point, not a latent variable, so that the reading is one Gaussian.
  Key and addresses have length one, so that all observations have equal weight.
* The memory lasts for the full run. Features and addresses change while they are learned, so old
  evidence loses a little weight at every step and the posterior falls back towards the prior.
* The evidence is stored and not the posterior, so that prior and noise can be learned.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.errors import SettingsError
from vsm.memory.slots.consolidation import Consolidation
from vsm.memory.slots.recall import MemoryPrior, Recall, Recollection
from vsm.memory.state import Mask, Memory, Observations, SupportSet
from vsm.nn.distributions import DiagonalGaussian, bounded_log_variance, unbounded_log_variance
from vsm.nn.layers import GaussianNetwork, Perceptron
from vsm.seeding import Randomness
from vsm.settings import KanervaSettings, ModelSettings, RunSettings


@dataclass(frozen=True)
class KanervaMemory(Memory):
    """The evidence of all P observations so far, Z ``[P, D]`` written with weights W ``[P, S]``.

    In double precision: keys of similar features are similar, so their differences are small beside
    the sums over thousands of observations.
    """

    weight_products: Annotated[Tensor, "float S S"]  # WᵀW
    weighted_sums: Annotated[Tensor, "float S D"]  # WᵀZ
    count: Annotated[Tensor, "int"]  # P

    def check(self, width: int | None = None) -> None:
        """See :class:`vsm.Memory`."""
        super().check(width)
        if self.count < 0:
            raise ValueError("its count is negative")

    def __len__(self) -> int:
        return len(self.weight_products) if self.count > 0 else 0

    @property
    def slot_classes(self) -> list[int]:
        """Empty: every class is distributed over all slots."""
        return []

    def first(self, count: int) -> "KanervaMemory":
        """See :class:`vsm.Memory`; only 0 is possible."""
        if count:
            raise SettingsError(
                "memory_slots: a Kanerva machine spreads every class over all of its slots, so it "
                f"can only be emptied with 0, got {count}; use 0 or leave it out"
            )
        return KanervaMemory(*map(torch.zeros_like, self.tensors().values()))

    def to(self, device: torch.device) -> "KanervaMemory":
        """Move to ``device``, which must support double precision."""
        if device.type == "mps":
            raise SettingsError(
                "device: the method kanerva needs double precision, which mps does not have; use "
                "--device cpu"
            )
        return super().to(device)

    def slot_mask(self, class_ids: Tensor, mask: Mask) -> None:
        """Mask nothing: no slot belongs to a class."""


class KanervaMachine(nn.Module):
    """What writing and reading share: keys, addresses, prior and noise."""

    def __init__(self, num_features: int, settings: KanervaSettings, model: ModelSettings) -> None:
        super().__init__()
        self.key = Perceptron(num_features, model)
        self.addresses = nn.Parameter(torch.randn(settings.slots, num_features))
        self.prior_mean = nn.Parameter(torch.zeros(settings.slots, num_features))
        self.log_prior_variance = nn.Parameter(torch.zeros(()))
        noise = unbounded_log_variance(model.initial_log_variance)
        self.log_noise_variance = nn.Parameter(torch.tensor(noise))

    @property
    def prior_variance(self) -> Tensor:
        """Of every entry of M before anything was written ``[]``."""
        return bounded_log_variance(self.log_prior_variance).exp()

    @property
    def noise_variance(self) -> Tensor:
        """σ² ``[]``."""
        return bounded_log_variance(self.log_noise_variance).exp()

    def weights(self, features: Tensor) -> Tensor:
        """Compare keys with addresses: features ``[..., D]`` to cosines w ``[..., S]``."""
        key = F.normalize(self.key(features), dim=-1)
        return key @ F.normalize(self.addresses, dim=-1).mT

    def posterior(self, memory: KanervaMemory) -> tuple[Tensor, Tensor]:
        """R ``[S, D]`` and U ``[S, S]`` by Bayes' rule, in double precision.

        U⁻¹ = I/u₀ + WᵀW/σ² and R = U (R₀/u₀ + WᵀZ/σ²), with u₀ the prior variance: its cost grows
        with S and not with the number of observations.
        """
        products, sums = memory.weight_products, memory.weighted_sums
        prior_variance, noise_variance = self.prior_variance.double(), self.noise_variance.double()
        identity = torch.eye(len(products)).to(products)
        precision = identity / prior_variance + products / noise_variance
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        mean = covariance @ (self.prior_mean / prior_variance + sums / noise_variance)
        return mean, covariance

    def read(self, weights: Tensor, memory: KanervaMemory) -> DiagonalGaussian:
        """Return N(w·R, w·U·wᵀ + σ²), M integrated out: ``[..., S]`` to ``[..., D]``."""
        mean, covariance = self.posterior(memory)
        weights_ = weights.double()
        variance = (weights_ @ covariance * weights_).sum(-1, keepdim=True)  # [..., 1]
        log_variance = (variance + self.noise_variance).log()
        log_variance = log_variance.expand(*weights.shape[:-1], mean.shape[1])
        return DiagonalGaussian((weights_ @ mean).to(weights), log_variance.to(weights))


@dataclass(frozen=True)
class KanervaConsolidation(Consolidation):
    """Writing: adds the evidence of new observations to the retained share of the old.

    Not a module: the recall owns the machine's parameters.
    """

    machine: KanervaMachine
    retention: float

    def empty(self) -> KanervaMemory:
        """Return the memory without evidence, which reads as its prior."""
        num_slots, num_features = self.machine.prior_mean.shape
        return KanervaMemory(
            torch.zeros(num_slots, num_slots, dtype=torch.float64),
            torch.zeros(num_slots, num_features, dtype=torch.float64),
            torch.zeros((), dtype=torch.int64),
        )

    def __call__(self, memory: Memory, observations: Observations, step: int) -> KanervaMemory:
        """See :class:`Consolidation`; neither classes nor the step matter."""
        del step
        assert isinstance(memory, KanervaMemory)
        features = observations.features.double()
        weights = self.machine.weights(observations.features).double()  # [P, S]
        return KanervaMemory(
            self.retention * memory.weight_products + weights.mT @ weights,
            self.retention * memory.weighted_sums + weights.mT @ features,
            memory.count + len(features),
        )


class KanervaRecall(Recall):
    """Reading: m ~ N(w·R, w·U·wᵀ + σ²), reparameterized, with w the weights of the support mean."""

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.machine = KanervaMachine(num_features, run.kanerva, run.model)
        self.network = GaussianNetwork(num_features, run.model)  # ψ, of the prior alone

    def consolidation(self) -> KanervaConsolidation:
        """Build what adds evidence."""
        return KanervaConsolidation(self.machine, self.run.kanerva.retention)

    def forward(
        self,
        support: SupportSet,
        memory: KanervaMemory,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`Recall`; no class has a slot that could be masked."""
        del slot_mask
        weights = self.machine.weights(support.mean)  # [T, N, S]
        latent = self.machine.read(weights, memory)
        prior: DiagonalGaussian = self.network(support.mean)
        return Recollection(latent.sample(num_samples, random), weights, latent.kl(prior))

    def prior(
        self, support: SupportSet, memory: KanervaMemory, slot_mask: Tensor | None
    ) -> MemoryPrior:
        """See :class:`Recall`: a reading is a Gaussian already."""
        del slot_mask
        weights = self.machine.weights(support.mean)
        known = (memory.count > 0).expand(weights.shape[:2])
        return MemoryPrior(self.machine.read(weights, memory), weights, known)

    def diagnostics(self, recollection: Recollection) -> dict[str, Tensor]:
        """Return the learned variances; w are no probabilities and have no entropy."""
        del recollection
        return {
            "noise_variance": self.machine.noise_variance,
            "prior_variance": self.machine.prior_variance,
        }
