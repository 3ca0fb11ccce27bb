"""Temperature scaling, fitted on classes that nothing was trained on.

The predictive distribution p averages the probabilities of all sampled prototypes. Its calibrated
form is p_i^(1/T) / Σ_j p_j^(1/T): T > 1 makes it less confident, T < 1 more, and the most probable
class stays the same.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

BOUNDS = (0.05, 20.0)
NUM_HALVINGS = 50
LOWEST_LOG_PROBABILITY = -1e4  # of what was held impossible, so that no zero meets an infinity


def scale_by_temperature(log_probabilities: Tensor, temperature: float) -> Tensor:
    """Return log(p_i^(1/T) / Z) of ``log_probabilities [..., N]``; T = 1 leaves them untouched."""
    if temperature == 1.0:
        return log_probabilities
    return F.log_softmax(log_probabilities / temperature, dim=-1)


def fit_temperature(
    log_probabilities: Tensor,
    labels: Tensor,
    bounds: tuple[float, float] = BOUNDS,
    halvings: int = NUM_HALVINGS,
) -> float:
    """Return the T that minimizes the mean negative log-likelihood of ``labels``.

    That is convex in b = 1/T with the slope E_p^b[log p] − log p_label, averaged over predictions,
    whose sign change is found by bisection of log b. Predictions without a mistake would want
    T = 0, and worthless ones infinity: T stays within the bounds.

    Args:
        log_probabilities: log p ``[P, N]`` of P predictions.
        labels: int64 ``[P]``, the true classes.
        bounds: of T.
        halvings: of the interval of log T.
    """
    log_probabilities = log_probabilities.double().clamp_min(LOWEST_LOG_PROBABILITY)
    mean_of_true = log_probabilities.gather(-1, labels.unsqueeze(-1)).mean()
    by_class = log_probabilities.mT.contiguous()  # [N, P]: a softmax over few classes is slow
    low, high = 1 / bounds[1], 1 / bounds[0]
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        weights = torch.softmax(middle * by_class, 0)
        if (weights * by_class).sum(0).mean() < mean_of_true:
            low = middle  # the true classes deserve more than they are given
        else:
            high = middle
    return 1 / math.sqrt(low * high)
