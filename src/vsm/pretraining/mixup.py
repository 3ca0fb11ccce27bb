"""Mixup (Zhang et al. 2018) and manifold mixup (Verma et al. 2019): images that are two at once.

A share λ of an image, or of what a block of the backbone makes of it, is its own, and the rest is
another image's. Labels are shared alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vsm.encoders import Backbone, BuiltInBackbone
from vsm.seeding import derive_seed
from vsm.settings import MixupSettings


class Mixture(NamedTuple):
    """How the first B images of a batch are mixed.

    Attributes:
        share: λ, how much of each is its own.
        partners: whose the rest is, a permutation ``[B]``.
        depth: where, as a share of the backbone's blocks: 0 the input of the first, and below 1
            that of the last; None: the images are mixed.
    """

    share: float
    partners: Tensor
    depth: float | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Mix the first B of ``hidden [B + R, ...]`` and leave the others."""
        own = hidden[: len(self.partners)]
        mixed = torch.lerp(own[self.partners], own, self.share)
        return torch.cat([mixed, hidden[len(own) :]])


def draw_mixture(settings: MixupSettings, num_images: int, seed: int, step: int) -> Mixture | None:
    """Draw λ ~ Beta(α, α), partners and, for manifold mixup, a depth; one λ for all images."""
    if settings.form == "none":
        return None
    # numpy, because torch's Beta takes no generator
    random = np.random.Generator(np.random.PCG64(derive_seed(seed, "mixup", step)))
    share = random.beta(settings.alpha, settings.alpha)
    partners = torch.from_numpy(random.permutation(num_images))
    return Mixture(share, partners, random.random() if settings.form == "manifold" else None)


@contextmanager
def mixing(backbone: Backbone, mixture: Mixture | None) -> Iterator[None]:
    """Let a backbone, or one of its blocks, mix what it is given, as long as the context lasts."""
    if mixture is None:
        yield
        return
    mixed: nn.Module = backbone
    if mixture.depth is not None:
        assert isinstance(backbone, BuiltInBackbone)  # the settings refuse others
        mixed = backbone.blocks[int(mixture.depth * len(backbone.blocks))]

    def mix(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (mixture(inputs[0]), *inputs[1:])

    hook = mixed.register_forward_pre_hook(mix)
    try:
        yield
    finally:
        hook.remove()
