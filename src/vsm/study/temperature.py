"""One temperature that makes probabilities honest (Guo et al. 2017)."""

import torch
from torch import Tensor

from vsm.evaluation import Evaluation

BOUNDS = (1e-3, 1e3)


def fit_temperature(evaluation: Evaluation) -> float:
    """Return T that minimises the mean negative log-likelihood of p^(1/T) / Z.

    With β = 1/T that is convex, and its derivative, the mean over queries of
    Σ_c p_c(β) log p_c − log p_true, rises with β: its zero is found by bisection of log β. Where
    all answers are right, or as good as guessed, T ends at a bound.
    """
    log_probabilities = evaluation.log_probabilities.double().clamp_min(-1e4)
    true = evaluation.log_likelihood.double().clamp_min(-1e4).mean().item()
    low, high = torch.tensor(BOUNDS).log().tolist()
    for _ in range(50):
        middle = (low + high) / 2
        weights = (log_probabilities * torch.tensor(middle).exp()).softmax(-1)
        if (weights * log_probabilities).sum(-1).mean().item() < true:
            low = middle
        else:
            high = middle
    return torch.tensor(-(low + high) / 2).exp().item()


def tempered(evaluation: Evaluation, temperature: float) -> Evaluation:
    """Return the same answers with probabilities p^(1/T) / Z."""
    scaled: Tensor = (evaluation.log_probabilities / temperature).log_softmax(-1)
    return Evaluation(evaluation.class_ids, scaled)
