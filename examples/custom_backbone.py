"""A backbone of your own: any ``torch.nn.Module`` that maps images to feature vectors.

In the folder of this file, since modules are found in the current folder or among installed ones:

    vsm train --backbone custom_backbone:strided_network --steps 300 --output runs/own
    vsm evaluate runs/own --backbone custom_backbone:strided_network

The backbone is named again to evaluate, resume or compare, because a run directory never makes
anyone import code.
"""

from itertools import pairwise

from torch import nn


def strided_network(image_shape: tuple[int, int, int]) -> nn.Module:
    """Three strided convolutions, averaged over a 2×2 grid: 128 features of images of any size."""
    channels, _, _ = image_shape
    widths = (channels, 32, 32, 32)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after)]
        layers += [nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
