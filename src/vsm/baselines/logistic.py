"""Logistic regression on the support set."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.baselines.contract import Baseline
from vsm.baselines.multinomial import LinearClassifiers, fit_logistic_regression
from vsm.seeding import Randomness
from vsm.settings import BaselineSettings


class LogisticRegression(Baseline):
    """A good embedding is all you need (Tian, Wang, Krishnan, Tenenbaum and Isola 2020).

    Multinomial logistic regression with an L2 penalty on features scaled to length one.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """Classify ``[T, N, Q, D]`` by ``[T, N, K, D]``; nothing is drawn."""
        fitted = fit_classes(F.normalize(support, dim=-1), self.settings)
        return fitted.log_probabilities(F.normalize(queries, dim=-1).flatten(1, 2))


def fit_classes(samples: Tensor, settings: BaselineSettings) -> LinearClassifiers:
    """Fit one classifier per task to samples ``[T, N, M, D]``, whose position names their class."""
    _, num_classes, count, _ = samples.shape
    return fit_logistic_regression(
        samples.flatten(1, 2),
        torch.arange(num_classes, device=samples.device).repeat_interleave(count),
        num_classes,
        settings.inverse_penalty,
        settings.tolerance,
        settings.max_iterations,
    )
