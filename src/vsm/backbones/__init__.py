"""Feature extractors. This room imports no sibling; its randomness is handed in."""

from vsm.backbones.conv4 import Conv4
from vsm.backbones.resnet12 import ResNet12
from vsm.backbones.wrn28_10 import WideResNet

Backbone = Conv4 | ResNet12 | WideResNet

BACKBONES: dict[str, type[Backbone]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "wrn28_10": WideResNet,
}

__all__ = ["BACKBONES", "Backbone", "Conv4", "ResNet12", "WideResNet"]
