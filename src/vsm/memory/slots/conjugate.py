"""Prototypes by Bayes' rule: the memory is a Gaussian prior, the support its likelihood."""

import torch
from torch import Tensor, nn

from vsm.memory import MemoryPrior, SupportSet
from vsm.nn.distributions import DiagonalGaussian
from vsm.nn.networks import LearnedVariance
from vsm.settings import MemorySettings, ModelSettings


class ConjugateInference(nn.Module):
    """q(z | M, S) in closed form, for every feature by itself.

    With z ~ N(μ₀, τ²) from the memory and h_k | z ~ N(z, s²) for the K support images,

        z | h ~ N((κ·μ₀ + K·h̄) / (κ + K), s² / (κ + K)),    κ = s² / τ²,

    so the memory counts as κ support images. Without memory κ = 0. s² is one
    learned variance per feature. ``memory.strength`` sets κ instead of learning it: on the classes
    that the backbone was trained on, a learned κ comes out too small.
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
