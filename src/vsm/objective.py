"""The variational objective: Eq. 4 without memory, Eq. 14 with it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.model import Prediction
from vsm.nn.distributions import DiagonalGaussian, GaussianMixture, pairwise_log_prob
from vsm.nn.networks import predictive
from vsm.settings import ObjectiveSettings


class ObjectiveTerms(NamedTuple):
    """The terms of the objective, each a scalar in nats.

    Attributes:
        total: minimized: cross_entropy + β_z · kl_z + β_m · kl_m / Q.
        cross_entropy: mean over queries.
        kl_z: KL of the prototypes, mean over queries.
        kl_m: KL of the latent memory, mean over classes.
    """

    total: Tensor
    cross_entropy: Tensor
    kl_z: Tensor
    kl_m: Tensor


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
