"""Draws of a classifier as tensors, so that a graph without a generator can repeat them.

One task draws noise of shapes ``[1, N, samples, ...]``. It is kept as ``[N, samples, width]``, in
the order of drawing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vsm.seeding import Draws, normal, uniform


class RecordedNoise(Draws):
    """Draws from a generator, and keeps what was ``drawn``, each ``[N, samples, width]``."""

    def __init__(self, random: torch.Generator) -> None:
        self.drawn: list[Tensor] = []
        self._random = random

    def normal(self, *shape: int) -> Tensor:
        """See :class:`vsm.seeding.Draws`."""
        return self._kept(normal(self._random, *shape))

    def uniform(self, *shape: int) -> Tensor:
        """See :class:`vsm.seeding.Draws`."""
        return self._kept(uniform(self._random, *shape))

    def _kept(self, noise: Tensor) -> Tensor:
        self.drawn.append(noise.reshape(*noise.shape[1:3], -1))
        return noise


class StoredNoise(Draws):
    """Gives noise that was drawn for W classes to any number of them.

    Class n gets the noise of class n mod W, begun n // W samples further on. So in one sample no
    two classes share their noise, as long as there are at most W times as many as samples. What
    is ``stored`` is in the order of drawing, each ``[W, samples, width]``.
    """

    def __init__(self, stored: Sequence[Tensor]) -> None:
        self._stored = iter(stored)

    def normal(self, *shape: int) -> Tensor:
        """See :class:`vsm.seeding.Draws`."""
        noise = next(self._stored)
        stored, samples = torch.full((1,), noise.shape[0]), noise.shape[1]
        classes = torch.arange(shape[1]).unsqueeze(-1)  # [N, 1]
        turns = (torch.arange(samples) + classes // stored) % samples  # [N, samples]
        return noise[classes % stored, turns].view(shape)

    uniform = normal  # whatever was drawn is what comes
