"""The model: features → recall → prototype distribution → class probabilities → objective.

All T tasks of a batch run as one tensor program. The memory is a value that is handed in; a forward
pass only reads it. The objective is Eq. 4 without memory, Eq. 14 with it.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders import Backbone, Encoder
from vsm.errors import SettingsError
from vsm.memory import (
    MEMORIES,
    Consolidation,
    GaussianConsolidation,
    Memory,
    Observations,
    Posterior,
    Recall,
    Recollection,
    SampledPosterior,
    SupportSet,
)
from vsm.memory.slots.recall import ConjugateInference
from vsm.nn.distributions import DiagonalGaussian, GaussianMixture, pairwise_log_prob
from vsm.nn.layers import (
    GaussianNetwork,
    MemoryConditionedNetwork,
    PrototypeClassifier,
    predictive,
)
from vsm.seeding import Randomness, default_generator
from vsm.settings import ObjectiveSettings, RunSettings
from vsm.system.devices import Placement


class Prediction(NamedTuple):
    """One forward pass over T tasks."""

    posterior: Posterior
    log_probabilities: Tensor  # [T, N·Q, N, L], for each sample of the prototypes


class FewShotModel(nn.Module):
    """ProtoNet, the variational prototype network, or one of the memories, by ``settings.method``.

    ``inputs`` is the encoder, or the shape of inputs of one to be made: ``(C, H, W)`` of images, or
    ``(D,)`` of features.
    """

    def __init__(self, settings: RunSettings, inputs: Encoder | tuple[int, ...]) -> None:
        super().__init__()
        self.settings = settings
        with default_generator(settings.seed, "weights"):
            if not isinstance(inputs, Encoder):
                inputs = Encoder(settings.model, inputs, settings.data)
            self.encoder = inputs
            self.backbone = inputs.backbone
            width = self.num_features = inputs.num_features
            self.classifier = PrototypeClassifier(settings.model)
            if settings.method != "protonet" and settings.inference != "gaussian":
                self.prior = GaussianNetwork(width, settings.model)  # θ
            self.inference = _inference_for(settings, width)  # φ
            self.recall: Recall | None = None  # λ and ψ
            self.consolidation: Consolidation | None = None  # w of Eq. 11
            if settings.inference == "gaussian":  # class statistics need no network to be read
                self.consolidation = GaussianConsolidation(width)
            elif settings.method in MEMORIES:
                self.recall = MEMORIES[settings.method](width, settings)
                self.consolidation = self.recall.consolidation()
            self.adapter = inputs.adapter

    def place(self, placement: Placement) -> Self:
        """Move to a device; from now on the backbone computes in the placement's precision."""
        self.encoder.place(placement)
        return self.to(placement.device)

    @property
    def device(self) -> torch.device:
        """Where the parameters are, and the inputs must be."""
        return self.classifier.log_temperature.device

    def require_backbone(self) -> Backbone:
        """Return the backbone, where there must be one."""
        if self.backbone is None:
            raise SettingsError(
                "backbone: stored features have none; leave out --init and --freeze-backbone"
            )
        return self.backbone

    def embed(self, inputs: Tensor, random: Randomness | None = None) -> Tensor:
        """Map normalized images ``[B, C, H, W]``, or stored features, to features ``[B, D]``."""
        return self.encoder.embed(inputs, random)

    def forward(
        self,
        support: Tensor,
        queries: Tensor,
        memory: Memory | None,
        random: Randomness,
        slot_mask: Tensor | None = None,
    ) -> Prediction:
        """Classify queries by prototypes inferred from support features and memory.

        Features are ``support [T, N, K, D]`` and ``queries [T, N, Q, D]``; ``random`` is the source
        of every draw of m and z; slots in ``slot_mask [T, N, A]`` may not be addressed.
        """
        support, queries = (self.project(part, memory) for part in (support, queries))
        posterior = self.infer(SupportSet.of(support), memory, random, slot_mask)
        return Prediction(posterior, posterior.log_probabilities(queries.flatten(1, 2)))

    def project(self, features: Tensor, memory: Memory | None) -> Tensor:
        """Map features ``[..., D]`` to coordinates in which class statistics are read, if any."""
        return features if memory is None else memory.project(features)

    def infer(
        self,
        support: SupportSet,
        memory: Memory | None,
        random: Randomness,
        slot_mask: Tensor | None = None,
    ) -> Posterior:
        """Infer prototypes: the part of :meth:`forward` before there are queries.

        ``support`` is projected, and its classes may differ in size.
        """
        if memory is None and self.consolidation is not None:
            raise ValueError(f"memory: the method {self.settings.method} needs one, got None")
        statistics = None if memory is None else memory.statistics
        if statistics is not None:  # Eqs. 7-10 in closed form
            return statistics.reader.to(support.mean.device).infer(support, slot_mask)
        recollection: Recollection | None = None
        strength: Tensor | None = None
        evidence: Tensor | None = None
        if self.inference is None:
            return SampledPosterior(support.mean.unsqueeze(-2), self.classifier)  # L = 1
        if isinstance(self.inference, ConjugateInference):  # Eqs. 7-10 with m integrated out
            prior = None if self.recall is None else self.recall.prior(support, memory, slot_mask)
            mixture = GaussianMixture(self.inference(support, prior).unsqueeze(-2))
            evidence = torch.zeros_like(support.mean) + support.shot
            if prior is not None:
                no_divergence = torch.zeros_like(support.mean[..., 0])
                mean = prior.gaussian.mean.unsqueeze(-2)
                recollection = Recollection(mean, prior.weights, no_divergence)
                strength = self.inference.kappa(prior)
                evidence = evidence + strength
        elif self.recall is None:
            mixture = GaussianMixture(self.inference(support.mean).unsqueeze(-2))
        else:  # Eqs. 8, 9, then Eqs. 7, 10
            recollection = self.recall(support, memory, slot_mask, self.num_memory_samples, random)
            mixture = GaussianMixture(self.inference(recollection.samples, support.mean))
        samples = mixture.sample(self.num_prototype_samples, random)  # [T, N, L, D]
        found = (mixture, recollection, strength, evidence)
        return SampledPosterior(samples, self.classifier, *found)

    def empty_memory(self) -> Memory | None:
        """Return a memory that has taken in nothing; None for methods without one."""
        return None if self.consolidation is None else self.consolidation.empty().to(self.device)

    def consolidate(
        self, memory: Memory | None, observations: Observations | None, step: int
    ) -> Memory | None:
        """Return the memory after ``observations``, if any, at ``step``: Eqs. 11-13 or others."""
        if self.consolidation is None or memory is None or observations is None:
            return memory
        return self.consolidation(memory, observations, step)

    @property
    def num_prototype_samples(self) -> int:
        """L, for training or for evaluation."""
        sampling = self.settings.sampling
        return sampling.train_prototypes if self.training else sampling.evaluation_prototypes

    @property
    def num_memory_samples(self) -> int:
        """J, for training or for evaluation, where m that no prototype would use is not drawn."""
        sampling = self.settings.sampling
        if self.training:
            return sampling.train_memory
        return min(sampling.evaluation_memory, self.num_prototype_samples)


def _inference_for(
    settings: RunSettings, width: int
) -> GaussianNetwork | MemoryConditionedNetwork | ConjugateInference | None:
    if settings.method == "protonet" or settings.inference == "gaussian":
        return None
    if settings.inference == "conjugate":
        return ConjugateInference(width, settings.model, settings.memory)
    if settings.method == "vpn":
        return GaussianNetwork(width, settings.model)
    return MemoryConditionedNetwork(width, settings.model)


class ObjectiveTerms(NamedTuple):
    """The terms of the objective, each a scalar in nats."""

    total: Tensor  # cross_entropy + β_z · kl_z + β_m · kl_m / Q
    cross_entropy: Tensor  # mean over queries
    kl_z: Tensor  # of the prototypes, mean over queries
    kl_m: Tensor  # of the latent memory, mean over classes


def objective(
    prediction: Prediction, prior: DiagonalGaussian | None, settings: ObjectiveSettings
) -> ObjectiveTerms:
    """Eq. 14, with the signs of Eq. 4 and divided by the number of queries T·N·Q.

    ``prior`` is p_θ(z | h(x_i)) of every query ``[T, N, Q, D]``; None for mean prototypes and for
    those of the Gaussian memory.
    """
    posterior, log_probabilities = prediction
    mixture = posterior.mixture
    _, num_queries, way, _ = log_probabilities.shape
    queries_per_class = num_queries // way
    entropy = cross_entropy(log_probabilities, settings.likelihood)
    kl_z = kl_m = torch.zeros_like(entropy)
    if mixture is not None and prior is not None:
        if settings.kl == "bound":
            kl_z = prototype_kl_bound(mixture, prior).mean()
        else:
            kl_z = prototype_kl_monte_carlo(mixture, posterior.prototypes, prior).mean()
    if posterior.recollection is not None:
        kl_m = posterior.recollection.divergence.mean()
    total = entropy + settings.beta_z * kl_z + settings.beta_m * kl_m / queries_per_class
    return ObjectiveTerms(total, entropy, kl_z, kl_m)


def cross_entropy(log_probabilities: Tensor, likelihood: str) -> Tensor:
    """Mean negative log-likelihood of the true classes.

    Queries of ``[T, N·Q, N, L]`` are ordered by class. ``mean_of_logs`` averages −log p over the L
    samples (Eq. 14); ``log_of_mean`` takes −log of the averaged probability.
    """
    num_tasks, num_queries, way, num_samples = log_probabilities.shape
    labels = torch.arange(way, device=log_probabilities.device)
    labels = labels.repeat_interleave(num_queries // way)  # [N·Q]
    if likelihood == "log_of_mean":
        combined = predictive(log_probabilities)  # [T, B, N]
        return F.nll_loss(combined.flatten(0, 1), labels.repeat(num_tasks))
    index = labels.view(1, -1, 1, 1).expand(num_tasks, -1, 1, num_samples)
    return -log_probabilities.gather(2, index).mean()


def prototype_kl_bound(posterior: GaussianMixture, prior: DiagonalGaussian) -> Tensor:
    """Convexity bound on KL(q̃(z_n | M, S) ‖ p_θ(z_n | h(x_i))) for the queries of class n.

    Components ``[T, N, C, D]`` and priors ``[T, N, Q, D]`` give ``[T, N, Q]`` at the cost of
    O((C + Q)·D), since the bound depends on the components through four moments alone.
    """
    return posterior.moments().unsqueeze(-2).bound_on_kl(prior)


def prototype_kl_monte_carlo(
    posterior: GaussianMixture, prototypes: Tensor, prior: DiagonalGaussian
) -> Tensor:
    """Unbiased estimate of the same divergence, of prototypes ``[T, N, L, D]``: ``[T, N, Q]``."""
    log_posterior = posterior.log_prob(prototypes).mean(-1, keepdim=True)  # [T, N, 1]
    return log_posterior - pairwise_log_prob(prototypes, prior).mean(-2)  # [T, N, Q]
