"""An exponential moving average of a network's weights, which swings less than the weights do."""

import torch
from torch import nn


def average_decay(decay: float, step: int) -> float:
    """Return the decay of ``step``, counted from 1: lower at first, to forget how it all began."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move ``average``, a copy of ``network``, to ``decay · average + (1 - decay) · network``.

    Statistics of batch norm are averaged as weights are; counters are copied.
    """
    values = network.state_dict()
    for name, mean in average.state_dict().items():
        if mean.is_floating_point():
            mean.lerp_(values[name], 1 - decay)
        else:
            mean.copy_(values[name])
