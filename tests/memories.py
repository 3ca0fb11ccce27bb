"""Memories for tests, made as training makes them."""

import torch
from torch import Tensor

from vsm.memory import Consolidation, Memory, Observations


def remember(consolidation: Consolidation | None, features: Tensor) -> Memory | None:
    """Let a memory take in one sample per class ``[A, D]``; None for methods without one."""
    if consolidation is None:
        return None
    classes = torch.arange(len(features))
    return consolidation(consolidation.empty(), Observations(features, classes), 0)
