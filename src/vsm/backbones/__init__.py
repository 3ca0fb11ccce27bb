"""Feature extractors. This room imports no sibling."""

from vsm.backbones.conv4 import Conv4

BACKBONES = {"conv4": Conv4}

__all__ = ["BACKBONES", "Conv4"]
