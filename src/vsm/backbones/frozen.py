"""An encoder that others trained: used as it is, and its weights stay where they are."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from vsm.seeding import Randomness


class FrozenEncoder(nn.Module):
    """Wraps a network so that it is a backbone without parameters and without state.

    A run directory of a model with such a backbone holds none of its weights.

    Attributes:
        network: maps images ``[B, C, H, W]`` to features ``[B, D]``.
        num_features: D.
    """

    network: nn.Module

    def __init__(self, network: nn.Module, num_features: int) -> None:
        super().__init__()
        object.__setattr__(self, "network", network.eval().requires_grad_(False))  # not a child
        self.num_features = num_features

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:  # noqa: ARG002 - contract
        """Map images ``[B, C, H, W]`` to features ``[B, num_features]``."""
        features: Tensor = self.network(images)
        return features

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Move with the model that it is a part of."""
        self.network._apply(fn, recurse)
        return self
