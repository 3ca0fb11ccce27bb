"""Feature extractors. This room imports no sibling."""

from vsm.backbones.conv4 import Conv4

__all__ = ["Conv4"]
