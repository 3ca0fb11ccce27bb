"""Transductive information maximization, and its variant for classes of unequal size."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm_lab.transductive.contract import TransductiveBaseline, grid, support_targets

DECAYS = 0.9, 0.999  # of Adam's averages of the gradient and of its square
EPSILON = 1e-8  # Adam's


class Tim(TransductiveBaseline):
    """Transductive information maximization (Boudiaf et al. 2020), TIM-ADM.

    A linear classifier, p_n ∝ exp(−τ/2 |w_n − x|²), starts at the support's means and minimizes

        λ · cross-entropy of the support − entropy of the queries' mean p + α · mean entropy of p

    by alternating directions, where q stands in for the p of a query (S support images):

        q_n ∝ p_n^(1+α) / (Σ_queries p_n^(1+α))^½
        w_n ← w_n − [c Σ_support (y_n − p_n)(w_n − x) + S/B Σ_queries (q_n − p_n)(w_n − x)]
                    / [c Σ_support y_n + S/B Σ_queries q_n],    c = λ / (1 + α).

    The entropy of the mean favors classes of equal size among the queries. Adapted: features are
    centered by the training features too (the paper only scales them).
    """

    label = "tim"
    defaults: ClassVar = {
        "sharpness": 15,  # τ
        "support_weight": 0.1,  # λ
        "entropy_weight": 0.1,  # α
        "steps": 150,
    }
    candidates = grid(sharpness=[2.5, 5, 15], support_weight=[0.1, 1], entropy_weight=[0.1, 0.5])

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        targets = support_targets(support)
        images = torch.cat([support.flatten(1, 2), queries], 1)  # [T, S + B, D]
        weights = self.adapt(images, targets, support.mean(2))
        return self.log_probabilities(queries, weights)

    def log_probabilities(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Return log p of ``[T, B, D]`` by classifiers ``[T, N, D]``."""
        nearness = inputs @ weights.mT - weights.square().sum(-1).unsqueeze(1) / 2  # |x|² is common
        return F.log_softmax(self.chosen["sharpness"] * nearness, -1)

    def adapt(self, images: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return W ``[T, N, D]`` after all steps; the support comes first among the images."""
        power, count = 1 + self.chosen["entropy_weight"], targets.shape[1]
        num_queries = images.shape[1] - count
        scale = images.new_full((images.shape[1], 1), count / num_queries)  # of every image
        scale[:count] = self.chosen["support_weight"] / power
        for _ in range(int(self.chosen["steps"])):
            scores = self.log_probabilities(images, weights)  # log p [T, S + B, N]
            sharper = power * scores[:, count:]
            wanted = F.softmax(sharper - sharper.logsumexp(1, keepdim=True) / 2, -1)  # q
            wanted = scale * torch.cat([targets.expand(len(images), -1, -1), wanted], 1)
            missing = wanted - scale * scores.exp()
            pull = missing.sum(1).unsqueeze(-1) * weights - missing.mT @ images
            weights = weights - pull / wanted.sum(1).unsqueeze(-1)
        return weights


class AlphaTim(Tim):
    """Realistic evaluation of transductive few-shot learning (Veilleux et al. 2021), α-TIM.

    TIM with both entropies of the queries replaced by Tsallis's, H_α(p) = (1 − Σ_n p_n^α)/(α − 1),
    which punishes classes of unequal size less; the support keeps the cross-entropy, as in the
    authors' code. Adam minimizes it. Adapted: features as in :class:`Tim`; the gradient is written
    out; fewer steps at a higher rate (the paper takes 1,000 at 1e-4), because Adam moves a number
    by about rate · steps, whichever it is.
    """

    label = "alpha-tim"
    defaults: ClassVar = {
        "sharpness": 15,  # τ
        "support_weight": 1,  # λ
        "entropy_weight": 1,
        "alpha": 2,
        "steps": 100,
        "rate": 1e-3,
    }
    candidates = grid(sharpness=[4, 7.5, 15], alpha=[1.5, 2, 3, 7])

    def adapt(self, images: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """See :class:`Tim`."""
        mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(1, int(self.chosen["steps"]) + 1):
            gradient = self.gradient(images, targets, weights)
            mean = DECAYS[0] * mean + (1 - DECAYS[0]) * gradient
            square = DECAYS[1] * square + (1 - DECAYS[1]) * gradient.square()
            size = (square / (1 - DECAYS[1] ** step)).sqrt() + EPSILON
            weights = weights - self.chosen["rate"] / (1 - DECAYS[0] ** step) * mean / size
        return weights

    def gradient(self, images: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Gradient of the objective by W: ``[T, N, D]``."""
        alpha, count = self.chosen["alpha"], targets.shape[1]
        predicted = self.log_probabilities(images, weights).exp()  # p [T, S + B, N]
        known, p = predicted[:, :count], predicted[:, count:]
        factor = alpha / ((alpha - 1) * p.shape[1])
        by_p = p.mean(1, keepdim=True) ** (alpha - 1)
        by_p = factor * (by_p - self.chosen["entropy_weight"] * p ** (alpha - 1))
        by_scores = p * (by_p - (p * by_p).sum(-1, keepdim=True))
        errors = self.chosen["support_weight"] / count * (known - targets)
        slopes = torch.cat([errors, by_scores], 1)  # by −τ/2 |w_n − x|², of every image
        moved = slopes.mT @ images - slopes.sum(1).unsqueeze(-1) * weights
        return self.chosen["sharpness"] * moved
